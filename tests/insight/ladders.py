"""Made-up benchmark results, for tests of what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from expert.insight.ladder import Ladder, Measured, SettingResult

FACTS = json.loads(Path(__file__).with_name("ladder.json").read_text(encoding="utf-8"))


def measured(
    rate: float, *, loss: float | None = 2.0, spread: float = 0.0, **more: Any
) -> Measured:
    own = {"samples_per_second": rate / 100, "spread": spread}
    facts = {**FACTS["measured"], "tokens_per_second": rate, "loss": loss, **own}
    return Measured(**{**facts, **more})


def setting(name: str, rate: float | None, status: str = "kept", **more: Any) -> SettingResult:
    facts: dict[str, Any] = {"adds": "something", "name": name, "status": status}
    facts |= {"because": "" if status == "kept" else "for a reason"}
    facts |= {"measured": None if rate is None else measured(rate)}
    return SettingResult(**{**facts, **more})


def ladder(*settings: SettingResult, **more: Any) -> Ladder:
    given = list(settings) or [setting("baseline", 100.0, cumulative=1.0)]
    return Ladder(**{**FACTS["ladder"], "rungs": given, **more})

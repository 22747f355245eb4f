"""Rates that were measured on a card, remembered for the plans that come after."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError


class MeasuredRate(BaseModel):
    """Real tokens a second of one configuration on one card, and how it was measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    card: str
    model: str
    adapter: str
    quantization: str
    tokens_per_second: float
    measured_on: str
    command: str


def measurements_file(environ: Mapping[str, str] = os.environ) -> Path:
    """$EXPERT_HOME, else the user's data folder."""
    if environ.get("EXPERT_HOME"):
        return Path(environ["EXPERT_HOME"]) / "measurements.json"
    if os.name == "nt" and environ.get("LOCALAPPDATA"):
        return Path(environ["LOCALAPPDATA"]) / "expert" / "measurements.json"
    data = environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(data) / "expert" / "measurements.json"


def read_rates(path: Path) -> list[MeasuredRate]:
    """Every readable record; a file that is absent or damaged has none."""
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    rates = []
    for record in records if isinstance(records, list) else []:
        try:
            rates.append(MeasuredRate.model_validate(record))
        except ValidationError:
            continue
    return rates


def find_rate(rates: list[MeasuredRate], wanted: tuple[str, str, str, str]) -> MeasuredRate | None:
    """The rate measured for (card, model, adapter, quantization), or None."""
    for rate in reversed(rates):
        if (rate.card, rate.model, rate.adapter, rate.quantization) == wanted:
            return rate
    return None

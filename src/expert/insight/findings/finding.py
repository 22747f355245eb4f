"""One thing that was found: how bad, by what evidence, with what consequence, and what mends it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "note", "good"]
ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "note": 2, "good": 3}
"""Worst first. An error stops a run or ruins it, a warning costs time, a note is worth knowing."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found. `name` is stable, for tests and scripts; the rest is for a person."""

    name: str
    severity: Severity
    title: str
    """One line: what is the matter."""
    evidence: str
    """The numbers that show it."""
    consequence: str = ""
    fix: str = ""
    """The command or the manifest key that mends it; empty where nothing is to be mended."""
    overrides: tuple[str, ...] = ()
    """The same fix as `--set` takes it, such as "training.config.batch_size=8", for `--try`."""
    gain: float | None = None
    """How many times as fast the run would be, where that can be told."""
    numbers: dict[str, float] = field(default_factory=dict)
    """The evidence for machines."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def worst_first(findings: list[Finding]) -> list[Finding]:
    """Errors before warnings before notes; among equals the largest gain first."""
    return sorted(findings, key=lambda found: (ORDER[found.severity], -(found.gain or 1.0)))

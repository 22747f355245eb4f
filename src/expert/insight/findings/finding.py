"""A finding, and what a rule says of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note", "good"]
ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "note": 2, "good": 3}
"""Worst first. An error stops or ruins a run, a warning costs time, a note is worth knowing."""
CONFIG = "training.config"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding. `name` is stable, for tests and scripts; the other fields are for people."""

    name: str
    severity: Severity
    title: str
    """One line: what is wrong."""
    evidence: str
    """The numbers that show it."""
    consequence: str = ""
    fix: str = ""
    """The command or manifest key that fixes it; empty if there is nothing to fix."""
    overrides: tuple[str, ...] = ()
    """The same fix for `--set`, such as "training.config.batch_size=8"."""
    gain: float | None = None
    """Expected speedup factor, if known."""


def worst_first(findings: list[Finding]) -> list[Finding]:
    """Errors before warnings before notes; among equals the largest gain first."""
    return sorted(findings, key=lambda found: (ORDER[found.severity], -(found.gain or 1.0)))


class Noted:
    """What a rule says besides its evidence: fields of the finding that differ from its row in the
    table, with `keys` in place of `overrides`."""

    def __init__(self, evidence: str, **changes: Any) -> None:
        self.evidence, self.changes = evidence, changes


Answer = str | Noted | None
"""What a rule finds: nothing, the evidence alone, or more."""

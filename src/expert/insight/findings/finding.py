"""A finding, and the rules that findings come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from expert.insight.findings.evidence import Evidence

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
    """The same fix for `--set` and `--try`, such as "training.config.batch_size=8"."""
    gain: float | None = None
    """Expected speedup factor, if known."""
    numbers: dict[str, float] = field(default_factory=dict)
    """The evidence in machine-readable form."""


def worst_first(findings: list[Finding]) -> list[Finding]:
    """Errors before warnings before notes; among equals the largest gain first."""
    return sorted(findings, key=lambda found: (ORDER[found.severity], -(found.gain or 1.0)))


class RuleResult:
    """What a rule saw: the evidence, and `changes`, fields of the finding that differ from its row
    in the table, with `keys` in place of `overrides`."""

    def __init__(self, evidence: str, **changes: Any) -> None:
        self.evidence, self.changes = evidence, changes


RuleFunction = Callable[["Evidence"], RuleResult | None]
"""Examines the plan before a run or the events after it; None if nothing is wrong."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A row of the table: a possible finding, its consequence and its fix."""

    name: str
    title: str
    look: RuleFunction | None = None
    """None for findings that only jobs/diagnose makes, from the machine or the rows."""
    consequence: str = ""
    keys: tuple[str, ...] = ()
    """The fix as keys of training.config, such as "packing=true"."""
    fix: str = ""
    """The fix in words; the keys by default."""
    severity: Severity = "warning"
    repeats: tuple[str, ...] = ()
    """Plan warnings, by the start of their path, that this finding repeats with more evidence."""

    def find(self, found: Evidence) -> Finding | None:
        answer = self.look(found) if self.look is not None else None
        return None if answer is None else self.finding(answer)

    def finding(self, answer: RuleResult) -> Finding:
        """The table row with this evidence."""
        changes = dict(answer.changes)
        keys: tuple[str, ...] = changes.pop("keys", self.keys)
        if "fix" not in changes:
            changes["fix"] = self.fix if keys == self.keys and self.fix else in_words(keys)
        row = Finding(
            name=self.name,
            severity=self.severity,
            title=self.title,
            evidence=answer.evidence,
            consequence=self.consequence,
            overrides=tuple(
                key if "." in key.partition("=")[0] else f"{CONFIG}.{key}" for key in keys
            ),
        )
        return replace(row, **changes)


def in_words(keys: tuple[str, ...]) -> str:
    """`training.config.bf16: auto and fp16: auto`."""
    words = " and ".join(key.replace("=", ": ", 1) for key in keys)
    return words if not words or "." in keys[0].partition("=")[0] else f"{CONFIG}.{words}"

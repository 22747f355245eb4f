"""One thing that was found, and the rows of the table that findings come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from expert.insight.findings.evidence import Evidence

Severity = Literal["error", "warning", "note", "good"]
ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "note": 2, "good": 3}
"""Worst first. An error stops a run or ruins it, a warning costs time, a note is worth knowing."""
CONFIG = "training.config"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found. `name` is stable, for tests and scripts; the rest is for a person."""

    name: str
    severity: Severity
    title: str
    """One line: what is wrong."""
    evidence: str
    """The numbers that show it."""
    consequence: str = ""
    fix: str = ""
    """The command or the manifest key that fixes it; empty where nothing is to be fixed."""
    overrides: tuple[str, ...] = ()
    """The same fix as `--set` takes it, such as "training.config.batch_size=8", for `--try`."""
    gain: float | None = None
    """How many times as fast the run would be, where that is known."""
    numbers: dict[str, float] = field(default_factory=dict)
    """The evidence for machines."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def worst_first(findings: list[Finding]) -> list[Finding]:
    """Errors before warnings before notes; among equals the largest gain first."""
    return sorted(findings, key=lambda found: (ORDER[found.severity], -(found.gain or 1.0)))


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a rule saw: the evidence, and where it differs from its row in the table."""

    evidence: str
    changes: dict[str, Any]
    """Fields of the finding; `keys` instead of `overrides`."""


def seen(evidence: str, *, numbers: dict[str, float] | None = None, **changes: Any) -> Seen:
    """Evidence for a finding. `changes` are fields that are not as the table has them."""
    return Seen(evidence=evidence, changes={"numbers": numbers or {}, **changes})


Look = Callable[["Evidence"], Seen | None]
"""Looks at the plan before a run or at the events after it; None where nothing is wrong."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A row of the table: what may be found, what it means, and the fix."""

    name: str
    title: str
    look: Look | None = None
    """None for what only a look at the machine or the rows can find (jobs/diagnose)."""
    consequence: str = ""
    keys: tuple[str, ...] = ()
    """The fix as keys of training.config, such as "packing=true"."""
    fix: str = ""
    """The fix in words; by default the keys."""
    severity: Severity = "warning"
    repeats: tuple[str, ...] = ()
    """Warnings of the plan, by the start of their path, that this says with more evidence."""

    def find(self, found: Evidence) -> Finding | None:
        """The finding in this evidence."""
        answer = self.look(found) if self.look is not None else None
        return None if answer is None else self.finding(answer)

    def finding(self, answer: Seen) -> Finding:
        """The row with what was seen."""
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

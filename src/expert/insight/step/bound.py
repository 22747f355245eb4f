"""What limits a run's speed: a sentence, a fix, and the expected gain."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from expert.core.text import times

Kind = Literal[
    "data-bound",
    "copy-bound",
    "launch-bound",
    "sync-bound",
    "memory-bound",
    "compute-bound",
    "evaluation-bound",
    "saving-bound",
    "start-bound",
    "unknown",
]


@dataclass(frozen=True, kw_only=True)
class Gain:
    """One change, its largest possible speedup, and how that was computed."""

    what: str
    factor: float
    reckoned: str

    def __str__(self) -> str:
        return f"{self.what}: {times(self.factor)} ({self.reckoned})"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What limits the run; `gains` is empty if nothing can be gained."""

    kind: Kind
    sentence: str
    fix: str = ""
    overrides: tuple[str, ...] = ()
    """The fix as `--set` takes it, if a key alone fixes it."""
    gains: tuple[Gain, ...] = ()

    @property
    def gain(self) -> float | None:
        return max((gain.factor for gain in self.gains), default=None)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gain": self.gain, "gains": [asdict(g) for g in self.gains]}

"""What a run is bound by, as it is shown: a sentence, what fixes it, and what that would gain."""

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
    """One change, how many times as fast it would be at most, and how that was computed."""

    what: str
    factor: float
    reckoned: str

    def __str__(self) -> str:
        return f"{self.what}: {times(self.factor)} ({self.reckoned})"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the run is bound by; `gains` is empty where nothing is to be gained."""

    kind: Kind
    sentence: str
    fix: str = ""
    overrides: tuple[str, ...] = ()
    """The fix as `--set` takes it, where a key alone fixes it."""
    gains: tuple[Gain, ...] = ()

    @property
    def gain(self) -> float | None:
        return max((gain.factor for gain in self.gains), default=None)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gain": self.gain, "gains": [asdict(g) for g in self.gains]}

"""Where a run stands: everything but the weights, as numbers that JSON holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from expert.training.spikes import Skipped


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The place in the data and in the schedule, and what was seen on the way."""

    done: int = 0
    """Steps behind us: the next one has this number."""
    epoch: int = 0
    place: tuple[int, int, int] | None = None
    """Epoch, window and step in it from which a stream continues."""
    tokens: int = 0
    examples: int = 0
    skipped: Skipped = field(default_factory=Skipped)
    """Steps that are passed over since a rollback."""
    rollbacks: int = 0
    skips: int = 0
    """Steps in a row, up to here, that were not finite and changed nothing."""
    evaluated: int = 0
    """Steps that were behind us at the last evaluation."""
    schedule: dict[str, Any] = field(default_factory=dict)
    """What rollbacks have changed about the rate."""
    best: dict[str, Any] = field(default_factory=dict)
    losses: dict[str, Any] = field(default_factory=dict)
    """What the watch over loss spikes remembers."""
    sums: dict[str, Any] = field(default_factory=dict)
    """What the meter has summed up over this epoch and over the run."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "skipped": self.skipped.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrainState:
        place = data.get("place")
        return cls(
            **{
                **data,
                "place": tuple(place) if place else None,
                "skipped": Skipped.from_json(data.get("skipped", ())),
            }
        )

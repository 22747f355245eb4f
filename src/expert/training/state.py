"""The state of a run except for its weights, as JSON values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from expert.training.spikes import SkippedSteps


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Position in data and schedule, and statistics so far."""

    done: int = 0
    """Completed steps, which is also the number of the next one."""
    epoch: int = 0
    place: tuple[int, int, int] | None = None
    """Epoch, window and step in it at which a stream continues."""
    tokens: int = 0
    examples: int = 0
    skipped: SkippedSteps = field(default_factory=SkippedSteps)
    """Steps to leave out after a rollback."""
    rollbacks: int = 0
    skips: int = 0
    """Consecutive latest steps that were not finite and changed nothing."""
    evaluated: int = 0
    """Completed steps at the last evaluation."""
    schedule: dict[str, Any] = field(default_factory=dict)
    """Changes of the learning rate by rollbacks."""
    best: dict[str, Any] = field(default_factory=dict)
    losses: dict[str, Any] = field(default_factory=dict)
    """State of the loss-spike detector."""
    sums: dict[str, Any] = field(default_factory=dict)
    """The meter's sums over this epoch and over the run."""

    def after(self, step: Any, tokens: int, examples: int) -> TrainState:
        """The state after a step of the feed with this many tokens and examples on all ranks."""
        return replace(
            self,
            done=step.done + 1,
            epoch=step.epoch,
            place=(step.epoch, step.window, step.in_epoch + 1),
            tokens=self.tokens + tokens,
            examples=self.examples + examples,
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "skipped": self.skipped.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrainState:
        place = data.get("place")
        return cls(
            **{
                **data,
                "place": tuple(place) if place else None,
                "skipped": SkippedSteps.from_json(data.get("skipped", ())),
            }
        )

"""What a run still has before it besides updates: its evaluations, and how long they will take."""

from __future__ import annotations

from dataclasses import dataclass

EVALUATION_SHARE = 1 / 3
"""An evaluation of as many places as an update: it goes forward only, and backward is twice that.
Used until one was measured."""


@dataclass
class Ahead:
    """The evaluations of a run. What one costs is told in updates, so that their pace tells how
    long it will take; from the first that was measured on, that one tells it."""

    total_steps: int
    every: int = 0
    """Updates between evaluations of the validation rows; 0: none in between."""
    at_end: bool = False
    """Whether the validation rows are evaluated after the last update."""
    validation: float = 0.0
    test: float = 0.0
    """The test rows are evaluated once, when everything else is done."""
    _seconds_for_one: float | None = None
    _evaluated: int = -1

    def measured(self, seconds: float, *, cost: float, done: int | None = None) -> None:
        """An evaluation took so long; `done`: after how many updates, for validation rows."""
        if cost > 0:
            self._seconds_for_one = seconds / cost
        if done is not None:
            self._evaluated = done

    def evaluations(self, done: int) -> int:
        """Of the validation rows, from after `done` updates to the end."""
        left = max(0, self.total_steps - done)
        count = (done + left) // self.every - done // self.every if self.every else 0
        if self.at_end and left and not (self.every and self.total_steps % self.every == 0):
            count += 1
        return count + self._waits_now(done)

    def cost(self, done: int = 0) -> float:
        """All evaluations still to come, in updates."""
        return self.evaluations(done) * self.validation + self.test

    def seconds(self, done: int, update_seconds: float) -> float:
        """How long they will take, at so many seconds an update."""
        for_one = self._seconds_for_one
        return self.cost(done) * (update_seconds if for_one is None else for_one)

    def _waits_now(self, done: int) -> bool:
        """The update is made, and its evaluation is not: that of the last one may take longest."""
        due = bool(self.every) and done > 0 and done % self.every == 0
        last = self.at_end and done >= self.total_steps
        return (due or last) and self._evaluated != done

"""The time of a climb, shared out among the rungs that are still to come."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

LONGEST = 1.5
"""Times the announced time: no rung is begun by itself where the climb would end later."""
REST = 2
"""Rungs' time for all that are left together: most of them are quicker, but they compile."""
DIRECT = 1
"""Rungs' time for what won against the baseline."""
LEARNING_SHARE = 0.25
"""Of a rung's time, before it is timed: what every later rung has to learn as well."""


class ClimbTime:
    """What is left, what a rung may take, and what is told of both."""

    def __init__(self, total_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total_seconds
        self._clock = clock
        self._began = clock()
        self._rung_began = self._began
        self.rung_share = total_seconds
        """Seconds that the rung may take."""
        self._took: list[float] = []

    @property
    def elapsed(self) -> float:
        return self._clock() - self._began

    @property
    def usual(self) -> float:
        """What a rung has taken so far; 0 before the first."""
        return statistics.median(self._took) if self._took else 0.0

    def begin_rung(self, to_come: int) -> float:
        """A rung begins, one of so many that are to come; the seconds it may take."""
        self._rung_began = self._clock()
        self.rung_share = max(0.0, self.total - self.elapsed) / max(1, to_come)
        return self.rung_share

    def end_rung(self) -> float:
        """The rung is over; the seconds that it took."""
        self._took.append(took := self.rung_took)
        return took

    @property
    def rung_took(self) -> float:
        """Seconds that the rung has taken so far."""
        return self._clock() - self._rung_began

    @property
    def rung_left(self) -> float:
        """Seconds of the rung's share that are left; below zero where it has taken longer."""
        return self.rung_share - self.rung_took

    @property
    def is_up(self) -> bool:
        """Whether another rung would end after the longest time that a climb may take."""
        return bool(self._took) and self.elapsed + self.usual > LONGEST * self.total

    def is_up_for(self, to_come: int) -> bool:
        """Whether one rung more, with so many after it and what ends a climb, would end after the
        longest time; then those that are left are measured together."""
        after = min(to_come, REST) + DIRECT
        return bool(self._took) and self.elapsed + (1 + after) * self.usual > LONGEST * self.total

    def left(self, to_come: int) -> float:
        """Seconds that are likely left for so many rungs: as those before took, within the limit;
        before the first it is what was announced, and never less than one of them."""
        if not self._took:
            return max(0.0, self.total - self.elapsed)
        return max(self.usual, min(to_come * self.usual, LONGEST * self.total - self.elapsed))

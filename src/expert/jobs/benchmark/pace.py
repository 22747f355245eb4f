"""Time limits of a benchmark: how long each part may take, and what is left for the rest."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

MAX_OVERRUN = 1.5
"""Times the announced time: no setting is started by itself if the benchmark would end later."""
REST_IN_SETTINGS = 2
"""Settings' worth of time for all remaining ones together: most are faster, but they compile."""
TRAINING_SHARE = 0.25
"""Share of a setting's time before it is timed: every later setting trains as many steps."""
MIN_TIMING_SHARE = 0.5
"""Timing takes at least this share of the time it took to get a setting ready: on an H200 a setting
of 17 s was timed for a fifth of a second, because its share of the benchmark was used up."""
LEAST_WINDOWS = 2
"""However slow the steps are: a single window has no spread."""
SLOW_STEP_SECONDS = 0.3
"""Slower steps need no untimed ones first: an idle device is back at full speed long before."""
SETTLING_STEPS = 2
"""Untimed steps after a pause: the host is not yet ahead of its device, and batches made during the
pause are waiting."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkPace:
    """Time limits of a benchmark and its settings."""

    total_seconds: float
    """Of the whole benchmark, as announced."""
    train_seconds: float
    """Training before the loss is evaluated, and at most `max_train_steps` steps of it."""
    max_train_steps: int
    window_seconds: float
    """Steps that take longer are a window each."""
    least_pairs: int
    """Windows of a setting, each paired with one of the setting it is compared with."""
    most_pairs: int
    """If fewer pairs leave the result open."""
    held_out: int
    """Rows that the loss is evaluated on."""
    limit_seconds: float
    """A process that is silent for this long is killed."""


QUICK = BenchmarkPace(
    total_seconds=120.0,
    train_seconds=3.0,
    max_train_steps=10,
    window_seconds=1.0,
    least_pairs=3,
    most_pairs=6,
    held_out=64,
    limit_seconds=150.0,
)
THOROUGH = BenchmarkPace(
    total_seconds=600.0,
    train_seconds=12.0,
    max_train_steps=30,
    window_seconds=3.0,
    least_pairs=5,
    most_pairs=10,
    held_out=256,
    limit_seconds=600.0,
)
THOROUGH_FROM_MINUTES = 5.0
"""With less time, windows are short and pairs few, as with --quick."""


def pace_of(*, quick: bool, minutes: float | None) -> BenchmarkPace:
    if minutes is None:
        return QUICK if quick else THOROUGH
    pace = QUICK if minutes < THOROUGH_FROM_MINUTES else THOROUGH
    return replace(pace, total_seconds=60 * minutes)


class Clock:
    """What is left of the announced time, and the share of one setting."""

    def __init__(self, total_seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.total, self._now = total_seconds, now
        self._started = self._setting_started = now()
        self.share = total_seconds
        """Seconds that the setting may take."""
        self._took: list[float] = []

    @property
    def elapsed(self) -> float:
        return self._now() - self._started

    @property
    def spent(self) -> float:
        """Seconds that the setting has taken so far."""
        return self._now() - self._setting_started

    @property
    def median_seconds(self) -> float:
        """Median time of a setting so far; 0 before the first."""
        return statistics.median(self._took) if self._took else 0.0

    def start_setting(self, to_come: int) -> float:
        """Start one of `to_come` settings; returns the seconds it may take."""
        self._setting_started = self._now()
        self.share = max(0.0, self.total - self.elapsed) / max(1, to_come)
        return self.share

    def end_setting(self) -> float:
        self._took.append(self.spent)
        return self._took[-1]

    def is_used_up(self, to_come: int = 0) -> bool:
        """Whether one more setting would exceed the longest time; with `to_come` after it, also
        counting those together and the comparison with the baseline."""
        more = 1 + min(to_come, REST_IN_SETTINGS) + bool(to_come)
        return (
            bool(self._took)
            and self.elapsed + more * self.median_seconds > MAX_OVERRUN * self.total
        )

    def left(self, to_come: int) -> float:
        """Seconds likely left for `to_come` settings, judging by earlier ones and within the limit;
        before the first the announced time, and never less than one setting."""
        if not self._took:
            return max(0.0, self.total - self.elapsed)
        return max(
            self.median_seconds,
            min(to_come * self.median_seconds, MAX_OVERRUN * self.total - self.elapsed),
        )

    def timing_seconds(self, pace: BenchmarkPace) -> float:
        """Seconds for timing the setting that is ready; enough for two pairs of windows."""
        least = 2 * LEAST_WINDOWS * pace.window_seconds
        return max(self.share - self.spent, MIN_TIMING_SHARE * self.spent, least)


def window_steps(step_seconds: float, window_seconds: float) -> tuple[int, int]:
    """(timed, untimed before them): the steps that make up a window, at least one."""
    steps = max(1, math.ceil(window_seconds / step_seconds))
    return steps, 0 if step_seconds > SLOW_STEP_SECONDS else SETTLING_STEPS

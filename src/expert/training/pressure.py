"""Detects, from measurements made anyway, that another plan would suit the run better.

Nothing here ends a run: if no other plan helps, it continues unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from expert.training.recovery import DataBound, OutOfMemory, RecompileStorm

WINDOW_SECONDS = 60.0
WAITING_SHARE = 0.2
MOST_RETUNES = 2
# A restarted feed starts its workers, and a new run compiles.
SETTLING_STEPS = 3
# The allocator may empty its cache once; on three log lines in a row it happens in every step.
RETRYING_LINES = 3
# Graphs after the warm-up: a few are odd last batches; more mean that shapes never repeat.
STORM_GRAPHS = 16
STORM_WARMUP_STEPS = 10

PlanHint = DataBound | OutOfMemory | RecompileStorm


class DataWait:
    """The fraction of time that the device waits for batches, in windows."""

    def __init__(self, *, workers: int, cores: int) -> None:
        self.workers, self._cores = workers, cores
        self._left = MOST_RETUNES
        self._before: float | None = None
        self.restart()

    def restart(self) -> None:
        """Reset when a new feed starts."""
        self._wall = self._waited = 0.0
        self._settling = SETTLING_STEPS

    def add(self, wall: float, waited: float) -> DataBound | None:
        """Add one step's seconds; returns what to try if too much of a full window was waiting.

        The first remedy is more workers. If the fraction has grown since, they compete for cores.
        """
        if self._settling:
            self._settling -= 1
            return None
        self._wall += wall
        self._waited += waited
        if self._wall < WINDOW_SECONDS:
            return None
        share = self._waited / self._wall
        self._wall = self._waited = 0.0
        if share <= WAITING_SHARE or not self._left:
            return None
        self._left -= 1
        worse = self._before is not None and share > self._before
        self._before = share
        return DataBound(share=share, workers=self.workers, cores=self._cores, thrashing=worse)


class AllocatorRetries:
    """Detects that the allocator constantly frees its cache and retries."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._grown = 0
        self._first = 0

    def add(self, facts: Mapping[str, Any]) -> OutOfMemory | None:
        """Add the fields of a log line; `allocator_retries` counts from process start."""
        retries = facts.get("allocator_retries")
        if retries is None:
            return None
        if self._last is None or retries <= self._last:
            self._grown, self._first = 0, retries
        else:
            self._grown += 1
        self._last = retries
        if self._grown < RETRYING_LINES:
            return None
        count = retries - self._first
        self._grown, self._first = 0, retries
        message = f"the allocator had to empty its cache {count} times in {RETRYING_LINES} lines"
        return OutOfMemory(where="training", message=message)


class RecompileCounter:
    """Counts graphs compiled after every shape should have been seen."""

    def __init__(self, graphs: Callable[[], int], *, most: int = STORM_GRAPHS) -> None:
        self._graphs, self._most = graphs, most
        self.restart()

    def restart(self) -> None:
        """Reset when the model was built again: it may compile."""
        self._warming, self._known, self._storms = STORM_WARMUP_STEPS, 0, 0
        self._fresh = 0

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Ignore graphs compiled meanwhile, for another reason than a step: an evaluation."""
        before = self._graphs()
        yield
        self._known += self._graphs() - before

    @property
    def since_warm_up(self) -> int:
        """Graphs compiled in steps after the warm-up."""
        return self._storms + self._fresh

    def add(self) -> RecompileStorm | None:
        """Call after every step."""
        if self._warming:
            self._warming -= 1
            self._known = self._graphs()
            return None
        fresh = self._fresh = self._graphs() - self._known
        if fresh <= self._most:
            return None
        self._known += fresh
        self._storms, self._fresh = self._storms + fresh, 0
        return RecompileStorm(count=fresh)


class Pressure:
    """All detectors together; the first sign is kept until the loop asks for it."""

    def __init__(
        self, *, data: DataWait, spilling: AllocatorRetries, recompiling: RecompileCounter
    ) -> None:
        self.data, self.spilling, self.recompiling = data, spilling, recompiling
        self._sign: PlanHint | None = None

    def add_times(self, wall: float, waited: float) -> None:
        self._sign = self._sign or self.data.add(wall, waited)

    def add_facts(self, facts: Mapping[str, Any]) -> None:
        self._sign = self._sign or self.spilling.add(facts)

    def take_hint(self) -> PlanHint | None:
        """The sign after a step, if any; clears it."""
        hint = self._sign or self.recompiling.add()
        self._sign = None
        return hint

"""How many threads a CPU run uses: one per core that is free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables with which a user sets the number, which is respected."""
SLACK = 0.3
"""A core is not given up for less use than this: an idle desktop uses as much."""


@dataclass(frozen=True)
class Threads:
    """The number of threads, and why."""

    count: int
    because: str
    lowered: bool = False
    """Fewer than there are cores, because other processes use them."""
    kept: bool = False
    """From the resumed run, regardless of the current load."""


def choose_threads(
    *, own: int, granted: int, cores: int, busy: float, environ: Mapping[str, str]
) -> Threads:
    """Threads of a run: torch's `own` number, limited to the cores that are `granted` and free.

    Threads wait for each other at the end of every operation, so one whose core is busy delays
    all: on two cores, one of them busy, two threads made 150 to 650 tokens/s and one made 2,400 to
    2,700.
    """
    asked = next((name for name in NAMES if environ.get(name)), None)
    if asked is not None:
        return Threads(own, f"{asked} is set")
    most = max(1, min(own, granted))
    free = max(1, math.floor(cores - busy + SLACK))
    if free < most:
        words = f"other processes use {busy:.1f} of {cores} cores"
        return Threads(free, words, lowered=True)
    if most < own:
        return Threads(most, f"this process may use {granted} of {cores} cores")
    return Threads(own, "torch's own number")


def resumed_threads(recorded: Mapping[str, Any], *, granted: int, cores: int) -> Threads | None:
    """The recorded threads of a resumed run; None if it ran on another machine.

    Splitting sums differently rounds differently, so the number stays on the same machine. On
    another it would not fit the cores.
    """
    count = recorded.get("threads")
    if recorded.get("cores") != cores or not isinstance(count, int) or count < 1:
        return None
    if count > granted:
        because = f"the run began with {count}, this process may use {granted} of {cores} cores"
        return Threads(granted, because, kept=True)
    return Threads(count, "as the run began", kept=True)

"""How many threads a CPU run computes with: as many as there are cores that nobody else uses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""What a user sets to say it; their word is kept."""
SLACK = 0.3
"""Less of a core than this is not given up: a desktop at rest uses as much."""


@dataclass(frozen=True)
class Threads:
    """The number, and why."""

    count: int
    because: str
    lowered: bool = False
    """Fewer than there are cores, because others use them."""
    kept: bool = False
    """Those of the run that is resumed, whatever this moment would have given."""


def choose_threads(
    *, own: int, granted: int, cores: int, busy: float, environ: Mapping[str, str]
) -> Threads:
    """Threads of a run: torch's `own` number, and no more than are `granted` and free.

    Threads wait for each other at the end of every operation. One whose core is taken by another
    process holds all of them up: on two cores, one of them busy, two threads made 150 to 650 tokens
    a second and one made 2,400 to 2,700.
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


def threads_as_before(recorded: Mapping[str, Any], *, granted: int, cores: int) -> Threads | None:
    """The threads that a resumed run had, by its record; None if its machine was another.

    Sums of other parts round to other bits, so on the same machine the number stays. On another it
    would be a number for other cores.
    """
    count = recorded.get("threads")
    if recorded.get("cores") != cores or not isinstance(count, int) or count < 1:
        return None
    if count > granted:
        because = f"the run began with {count}, this process may use {granted} of {cores} cores"
        return Threads(granted, because, kept=True)
    return Threads(count, "as the run began", kept=True)

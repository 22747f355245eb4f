"""How many threads a CPU run uses: torch's number, within the cores that it may use.

Splitting sums differently rounds differently. So the number depends on the machine and not on how
busy it is: the same command gives the same losses, and a resumed run keeps its number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables with which a user sets the number, which is respected."""


def choose_threads(
    *, own: int, granted: int, recorded: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[int, str]:
    """The number of threads, and why. `own`: torch's; `granted`: cores this process may use;
    `recorded`: the "threads" event of the run that is resumed, or empty."""
    asked = next((name for name in NAMES if environ.get(name)), None)
    if asked is not None:
        return own, f"{asked} is set"
    before = recorded.get("threads")
    if isinstance(before, int) and 1 <= before <= granted:
        return before, "as the run began"
    if granted < own:
        return max(1, granted), f"this process may use {granted} cores"
    return own, "torch's own number"

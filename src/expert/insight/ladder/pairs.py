"""Two settings timed against each other: the speedup, and whether it is significant.

A rate measured minutes ago cannot be compared: clocks and other processes have changed. On an H200
with a busy host, the same character model made 804,000 and 600,000 tokens a second within minutes.
So windows of both settings are timed in turns, and each pair gives one ratio: whatever slows the
machine slows both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

EQUAL_WITHIN = 0.02
"""Ratios closer to 1 than this count as equal: a shared machine is not steadier."""
ENOUGH_PAIRS = 5
"""All of five ratios fall on one side by chance once in sixteen times, both of two every second
time: on two cores with five processes a setting that does not change the arithmetic measured 0.68
and 0.68."""
HALF = 0.5
MAX_CHANCE = 0.125
"""Allowed probability of as few pairs on the other side of 1 by chance: none of five to seven, one
of eight. Ratios of 0.88, 0.85, 0.77, 1.12 and 0.85 were once called slower."""

Difference = Literal["faster", "slower", "none"]


class Paired(BaseModel):
    """How much faster one setting is than another, and how that was measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    against: str
    """The name of the setting it was compared with."""
    how: Literal["in turns", "one after the other"]
    """In turns: both processes were alive, and windows alternated. One after the other: memory did
    not hold both, so every window of one is divided by every window of the other."""
    ratios: list[float]
    """Tokens per second of the setting over the other's, pair by pair."""
    gain: float
    """The median of the ratios."""
    spread: float
    """Interquartile range of the ratios."""

    @property
    def difference(self) -> Difference:
        """Whether the gain differs from 1 by more than its spread and more than 2 %. Quartiles of
        few pairs are close together by chance, so few pairs need twice the spread, and a setting is
        slower only if half as fast; with many pairs nearly all must lie on one side of 1."""
        if self.how == "in turns" and not self._pairs_agree:
            return "none"
        few = self.how == "in turns" and len(self.ratios) < ENOUGH_PAIRS
        beyond = max(self.spread * (2 if few or self.how != "in turns" else 1), EQUAL_WITHIN)
        if self.gain - beyond > 1:
            return "faster"
        return "slower" if self.gain + beyond < (HALF if few else 1) else "none"

    @property
    def _pairs_agree(self) -> bool:
        """Whether too few pairs contradict the rest for it to be chance; of two to four none
        may."""
        count = len(self.ratios)
        others = sum((ratio > 1) != (self.gain > 1) for ratio in self.ratios)
        ways = sum(math.comb(count, few) for few in range(others + 1))
        return others == 0 or 2 * ways / 2**count < MAX_CHANCE

    @property
    def looks_slower(self) -> bool:
        """Whether more pairs might show that it is slower."""
        return self.difference != "slower" and self.gain + max(self.spread, EQUAL_WITHIN) < 1

    @property
    def words(self) -> str:
        """`1.24x ± 0.03`."""
        return f"{self.gain:.2f}x ± {self.spread:.2f}"


def in_turns(against: str, pairs: Sequence[tuple[float, float]]) -> Paired:
    """From pairs of rates, the other setting's rate first."""
    return _paired(against, "in turns", [here / there for there, here in pairs])


def one_after_the_other(against: str, there: Sequence[float], here: Sequence[float]) -> Paired:
    """From windows that did not alternate: each of one over each of the other."""
    return _paired(against, "one after the other", [one / other for one in here for other in there])


def spread_of(values: Sequence[float]) -> float:
    """Interquartile range; 0 for a single value. For two or three values it is half their range, so
    that median ± spread reaches about as far as the outermost."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def _paired(
    against: str, how: Literal["in turns", "one after the other"], ratios: list[float]
) -> Paired:
    return Paired(
        against=against,
        how=how,
        ratios=ratios,
        gain=statistics.median(ratios),
        spread=spread_of(ratios),
    )

"""How many tokens a second to expect of a card and a model: from what was measured, or an estimate.

Where the very card and a model of that size were measured, their best rate is what can be had.
Elsewhere the share of the card's peak that models of about that size reach is taken over, which is
an estimate and says so. The borders follow a guide to the RTX 4080 Super with the character GPT:
1500 samples a second are good there, 2000 excellent, 1000 acceptable, below 500 something is wrong.
"""

from __future__ import annotations

import importlib.resources
import json
import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

Word = Literal["something is wrong", "slow", "acceptable", "good", "excellent"]

WRONG, ACCEPTABLE, EXCELLENT = 500 / 1500, 1000 / 1500, 2000 / 1500
SAME_SIZE = 1.25
"""A model within this factor of a measured one counts as measured."""
SMALLER_IS_UNKNOWN = 2
"""Models so many times smaller than any measured one wait for launches, which no peak tells of."""


@dataclass(frozen=True, kw_only=True)
class MeasuredCase:
    """One measured rate, and where it is written down."""

    card: str
    model: str
    parameters: int
    case: str
    tokens_per_second: int
    share_of_peak: float
    measured_on: str
    file: str


@dataclass(frozen=True, kw_only=True)
class Band:
    """Tokens a second: the rate that can be had, and from where on it is how good."""

    reference: float
    measured: bool
    """False: an estimate, scaled by arithmetic and peak."""
    because: str

    @property
    def wrong_below(self) -> float:
        return self.reference * WRONG

    @property
    def acceptable_from(self) -> float:
        return self.reference * ACCEPTABLE

    @property
    def excellent_from(self) -> float:
        return self.reference * EXCELLENT

    def word(self, tokens_per_second: float) -> Word:
        """How good a rate is."""
        if tokens_per_second < self.wrong_below:
            return "something is wrong"
        if tokens_per_second < self.acceptable_from:
            return "slow"
        if tokens_per_second < self.reference:
            return "acceptable"
        return "excellent" if tokens_per_second >= self.excellent_from else "good"


@cache
def measured_cases() -> tuple[MeasuredCase, ...]:
    """What was measured, as benchmarks/measured_rates.py has collected it."""
    text = importlib.resources.files("expert.insight").joinpath("rates.json").read_text("utf-8")
    return tuple(MeasuredCase(**record) for record in json.loads(text))


def expected_band(
    *,
    card: str | None,
    parameters: int | None,
    flops_per_token: float | None,
    peak_flops: float | None,
    cases: tuple[MeasuredCase, ...] | None = None,
) -> Band | None:
    """The band for a model of so many parameters on a card (its slug); None where none is known."""
    known = measured_cases() if cases is None else cases
    if parameters is None or not flops_per_token or not peak_flops or not known:
        return None
    if parameters < min(case.parameters for case in known) / SMALLER_IS_UNKNOWN:
        return None
    share, nearest = _share_of_peak(parameters, known)
    rate = share * peak_flops / flops_per_token
    if card == nearest.card and _apart(parameters, nearest.parameters) <= math.log(SAME_SIZE):
        because = (
            f"{nearest.tokens_per_second:,} tokens/s were measured on {nearest.card} with "
            f"{nearest.model} ({nearest.case}, {nearest.measured_on}, {nearest.file}); "
            "scaled to this run's arithmetic a token"
        )
        return Band(reference=rate, measured=True, because=because)
    because = (
        f"an estimate: {share:.0%} of the card's peak, as models of this size reach on "
        f"{nearest.card} (nearest measured: {nearest.model})"
    )
    return Band(reference=rate, measured=False, because=because)


def _share_of_peak(parameters: int, cases: tuple[MeasuredCase, ...]) -> tuple[float, MeasuredCase]:
    """The share of the peak at this size, between the neighbours' on a logarithmic scale."""
    best: dict[int, MeasuredCase] = {}
    for case in cases:
        there = best.get(case.parameters)
        if there is None or case.share_of_peak > there.share_of_peak:
            best[case.parameters] = case
    points = [best[size] for size in sorted(best)]
    nearest = min(points, key=lambda case: _apart(parameters, case.parameters))
    below = [case for case in points if case.parameters <= parameters]
    above = [case for case in points if case.parameters >= parameters]
    if not below or not above or below[-1] is above[0]:
        return nearest.share_of_peak, nearest
    low, high = below[-1], above[0]
    part = _apart(parameters, low.parameters) / _apart(high.parameters, low.parameters)
    return low.share_of_peak + part * (high.share_of_peak - low.share_of_peak), nearest


def _apart(one: int, other: int) -> float:
    return abs(math.log(one / other))

"""Detects loss spikes, and decides what to do about them and about values that are not finite."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any

from expert.planning.run_plan import StabilityPlan
from expert.training.recovery import LossSpike

# The median absolute deviation times this is the standard deviation of normal noise.
MAD_TO_SIGMA = 1.4826
# The upper decile of a normal distribution, in standard deviations.
UPPER_TENTH = 1.2816
SMALLEST_NOISE = 1e-12


@dataclass(frozen=True, kw_only=True)
class SpikeTest:
    """A spike exceeds `z`, `rise` and `least_rise` for `stays` steps in a row."""

    window: int = 50
    least_history: int = 25
    recent: int = 10
    """Latest losses left out of the upper tail: a spike may take a few steps to build up."""
    z: float = 10.0
    """Robust standard deviations above the window's median. Ordinary rows reached 6.5 in steps of
    four rows and 7.9 in steps of one (tests/training/files/losses.json)."""
    rise: float = 0.5
    """Relative to that median: heavy tails reach z 8 without meaning anything."""
    least_rise: float = 0.05
    """Nats above that median: a loss of 0.001 that becomes 0.01 is harmless."""
    noise_floor: float = 0.01
    """Minimum noise as a fraction of the median: smooth losses have almost none."""
    stays: int = 5
    """Consecutive steps that must be that high. Broken weights stay broken; a single row that is
    not learned yet spikes alone: one of 16 that costs 1.2 nats made a loss of 0.077 beside a median
    of 0.001, and a run of 495 steps was rolled back at step 444 because of it."""


class SpikeWatch:
    """Checks the loss of every step; its state goes into a checkpoint as JSON."""

    def __init__(self, test: SpikeTest | None = None, state: Mapping[str, Any] | None = None):
        self.test = test or SpikeTest()
        saved = state or {}
        self._history: deque[tuple[int, float]] = deque(
            _pairs(saved.get("history", ())), maxlen=self.test.window
        )
        self._high: list[tuple[int, float]] = list(_pairs(saved.get("high", ())))
        """The latest consecutive losses that were too high."""
        self.begun: LossSpike | None = None
        """The latest loss if it is too high and the one before was not."""

    def state(self) -> dict[str, Any]:
        return {
            "history": [list(seen) for seen in self._history],
            "high": [list(seen) for seen in self._high],
        }

    def observe(self, step: int, loss: float) -> LossSpike | None:
        """The spike that this loss confirms, if any; each is reported once.

        A spike joins the history like any loss: the median stays until half of the window is at
        the new level, which then becomes normal. A loss that is not finite is ignored here.
        """
        self.begun = None
        if not math.isfinite(loss):
            return None
        spike = self._judge(step, loss)
        self.begun = spike if not self._high else None
        self._history.append((step, loss))
        if spike is None:
            self._high = []
            return None
        self._high.append((step, loss))
        if len(self._high) != self.test.stays:
            return None
        first, height = self._high[0]
        return replace(spike, step=first, loss=height)

    def _judge(self, step: int, loss: float) -> LossSpike | None:
        test = self.test
        if len(self._history) < test.least_history:
            return None
        losses = [seen for _, seen in self._history]
        middle = median(losses)
        rise = loss - middle
        if rise <= max(test.least_rise, test.rise * abs(middle)):
            return None
        spread = max(
            MAD_TO_SIGMA * median(abs(seen - middle) for seen in losses),
            _upper_spread(losses[: -test.recent], middle),
        )
        noise = max(spread, test.noise_floor * max(abs(middle), test.least_rise))
        z = rise / max(noise, SMALLEST_NOISE)
        return LossSpike(step=step, loss=loss, median=middle, z=z) if z > test.z else None


def _pairs(saved: Iterable[Any]) -> Iterator[tuple[int, float]]:
    return ((int(step), float(loss)) for step, loss in saved)


def _upper_spread(losses: list[float], middle: float) -> float:
    """The standard deviation estimated from the upper tail: with few rows per step the losses have
    a long one, which says nothing about the run."""
    if len(losses) < 2:
        return 0.0
    return (quantiles(losses, n=10, method="inclusive")[-1] - middle) / UPPER_TENTH


def after_not_finite(plan: StabilityPlan, *, skips: int, rollbacks: int) -> str:
    """What the plan says after so many skips in a row and so many rollbacks."""
    if plan.on_not_finite == "skip" and skips < plan.max_skipped_updates:
        return "skip"
    if plan.on_not_finite == "rollback" and rollbacks < plan.max_rollbacks:
        return "rollback"
    return "stop"


def after_spike(plan: StabilityPlan, *, rollbacks: int) -> str:
    if plan.on_loss_spike == "ignore":
        return "ignore"
    return "rollback" if rollbacks < plan.max_rollbacks else "stop"


@dataclass(frozen=True)
class SkippedSteps:
    """Steps to leave out when a run reaches them again, as windows."""

    windows: tuple[tuple[int, int], ...] = ()
    """First and last step of each, sorted, with gaps in between."""

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and any(first <= step <= last for first, last in self.windows)

    def with_window(self, first: int, last: int) -> SkippedSteps:
        """These and the steps from `first` to `last`, inclusive."""
        assert first <= last, f"invalid window from {first} to {last}"
        merged: list[tuple[int, int]] = []
        for begin, end in sorted([*self.windows, (first, last)]):
            if merged and begin <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((begin, end))
        return SkippedSteps(tuple(merged))

    def to_json(self) -> list[list[int]]:
        return [[first, last] for first, last in self.windows]

    @staticmethod
    def from_json(windows: Iterable[Iterable[int]]) -> SkippedSteps:
        skipped = SkippedSteps()
        for first, last in windows:
            skipped = skipped.with_window(first, last)
        return skipped

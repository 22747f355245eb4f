"""Losses that spike, numbers that are not finite: noticing them, and what is done about it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from typing import Any, Literal

from expert.training.recovery import LossSpike

# The median distance from the median times this is the standard deviation of normal noise.
MAD_TO_SIGMA = 1.4826
# The tenth largest of a hundred normal numbers lies this many standard deviations up.
UPPER_TENTH = 1.2816
SMALLEST_NOISE = 1e-12


@dataclass(frozen=True, kw_only=True)
class SpikeTest:
    """What counts as a spike: `z`, `rise` and `least_rise` are all exceeded, `stays` times."""

    window: int = 50
    least_history: int = 25
    recent: int = 10
    """Losses that do not count for the upper tail: a spike may take a few steps to build up."""
    z: float = 10.0
    """Robust standard deviations above the median of the window. Ordinary rows reached 6.5 in
    steps of four rows and 7.9 in steps of one (tests/training/files/losses.json)."""
    rise: float = 0.5
    """Share above that median: heavy tails reach z 8 without meaning anything."""
    least_rise: float = 0.05
    """Nats above that median: a loss of 0.001 that becomes 0.01 is no catastrophe."""
    noise_floor: float = 0.01
    """Noise is never taken for less than this share of the median: smooth losses have none."""
    stays: int = 5
    """Steps in a row that must be so high. Weights that are broken stay broken; a single row that
    is not learned yet spikes alone: one of 16 that costs 1.2 nats made 0.077 of a median of 0.001,
    and a run of 495 steps started over for it at the 444th."""


class SpikeWatch:
    """Looks at the loss of every step; what it remembers goes into a checkpoint as JSON."""

    def __init__(self, test: SpikeTest | None = None, state: Mapping[str, Any] | None = None):
        self.test = test or SpikeTest()
        kept = state or {}
        self._history: deque[tuple[int, float]] = deque(
            _pairs(kept.get("history", ())), maxlen=self.test.window
        )
        self._high: list[tuple[int, float]] = list(_pairs(kept.get("high", ())))
        """The losses in a row that were too high, up to the newest."""
        self.begun: LossSpike | None = None
        """The newest loss, where it is too high and the one before was not."""

    def state(self) -> dict[str, Any]:
        """What a watch that continues from here has to know."""
        return {
            "history": [list(seen) for seen in self._history],
            "high": [list(seen) for seen in self._high],
        }

    def observe(self, step: int, loss: float) -> LossSpike | None:
        """The spike that this loss makes certain, if it does; each is told once.

        A spike joins the history like any loss: the median stays where it is until half of the
        window is like it, and from then on the new level is the usual one. A loss that is not
        finite is no spike and leaves no trace here.
        """
        self.begun = None
        if not math.isfinite(loss):
            return None
        found = self._judge(step, loss)
        self.begun = found if not self._high else None
        self._history.append((step, loss))
        if found is None:
            self._high = []
            return None
        self._high.append((step, loss))
        if len(self._high) != self.test.stays:
            return None
        first, height = self._high[0]
        return replace(found, step=first, loss=height)

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


def _pairs(kept: Iterable[Any]) -> Iterator[tuple[int, float]]:
    return ((int(step), float(loss)) for step, loss in kept)


def _upper_spread(losses: list[float], middle: float) -> float:
    """The standard deviation that the upper tail looks like: losses of few rows have a long one,
    which says nothing about the run."""
    if len(losses) < 2:
        return 0.0
    return (quantiles(losses, n=10, method="inclusive")[-1] - middle) / UPPER_TENTH


@dataclass(frozen=True, kw_only=True)
class Stability:
    """What is done about numbers that are not finite and about spikes, and how often."""

    on_not_finite: Literal["stop", "skip", "rollback"] = "stop"
    max_skips: int = 10
    on_spike: Literal["ignore", "rollback"] = "ignore"
    max_rollbacks: int = 3
    rate_factor: float = 0.5
    """What the rate is multiplied by after each rollback."""
    most_rewarm_steps: int = 100
    rewarm_share: float = 0.1
    least_rewarm_steps: int = 5

    def rewarm_steps(self, left: int) -> int:
        """Steps over which the rate rises again after a rollback with so many to go.

        A tenth of them: a hundred in a run of 120 would leave nothing to learn with.
        """
        share = round(self.rewarm_share * left)
        return min(max(share, self.least_rewarm_steps), self.most_rewarm_steps)

    def after_not_finite(
        self, *, skips: int, rollbacks: int
    ) -> Literal["stop", "skip", "rollback"]:
        """What to do about a step that was not finite, after so many skipped and rolled back."""
        if self.on_not_finite == "skip" and skips < self.max_skips:
            return "skip"
        if self.on_not_finite == "rollback" and rollbacks < self.max_rollbacks:
            return "rollback"
        return "stop"

    def after_spike(self, *, rollbacks: int) -> Literal["ignore", "rollback", "stop"]:
        """What to do about a spike, after so many rollbacks."""
        if self.on_spike == "ignore":
            return "ignore"
        return "rollback" if rollbacks < self.max_rollbacks else "stop"


@dataclass(frozen=True)
class Skipped:
    """The steps that are left out when the run passes them again: whole windows of them."""

    windows: tuple[tuple[int, int], ...] = field(default=())
    """First and last step of each, in order, with gaps between them."""

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and any(first <= step <= last for first, last in self.windows)

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.windows)

    def with_window(self, first: int, last: int) -> Skipped:
        """These and the steps from `first` to `last`, both included."""
        assert first <= last, f"a window from {first} to {last} is none"
        merged: list[tuple[int, int]] = []
        for begin, end in sorted([*self.windows, (first, last)]):
            if merged and begin <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((begin, end))
        return Skipped(tuple(merged))

    def to_json(self) -> list[list[int]]:
        return [[first, last] for first, last in self.windows]

    @staticmethod
    def from_json(windows: Iterable[Iterable[int]]) -> Skipped:
        """What `to_json` wrote."""
        found = Skipped()
        for window in windows:
            first, last = window
            found = found.with_window(first, last)
        return found

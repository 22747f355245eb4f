"""Which bins come when: a pure function of the seed, the epoch and the step.

The place in a run is one number, the updates done; from it the order goes on as if it had never
stopped. An update is a run of bins whatever the micro-batch, which only cuts it into slices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from expert.core.world import ALONE, World


class Draw(IntEnum):
    """What a shuffle is for; different uses of one seed never share their random numbers."""

    PIECES = 0
    BINS = 1
    EPOCH = 2
    BASELINE = 4  # 3 was the order of batches that were grouped by length
    SAMPLE = 5
    WINDOW = 6
    SHIFT = 7


def shuffled(count: int, *, seed: int, draw: Draw, number: int = 0) -> NDArray[np.int64]:
    """The numbers 0 to count - 1 in an order that depends on nothing else than the arguments.

    Sorts raw words of the bit generator, which NumPy promises never to change; it makes no such
    promise for `Generator.permutation`, and a resumed run may meet a newer NumPy.
    """
    key = np.random.SeedSequence(seed, spawn_key=(int(draw), number))
    return np.argsort(np.random.Philox(key).random_raw(count), kind="stable")


@dataclass(frozen=True, eq=False, slots=True)
class Update:
    """What one update is made of."""

    done: int
    """Updates before this one: the place in the run."""
    epoch: int
    step: int
    """Updates before this one in its epoch, or in its window where rows are streamed."""
    bins: NDArray[np.int64]
    window: int = 0
    """Which run of rows it is from where rows are streamed."""


class DataOrder:
    """The updates of a whole run, from any place on."""

    def __init__(
        self,
        count: int,
        bins_per_update: int,
        seed: int,
        grouped: NDArray[np.integer[Any]] | None = None,
    ) -> None:
        """`grouped`: tokens of every bin, where those of a step are sorted by them: rows of one
        length go into one micro-batch then, and pad each other least."""
        if count < 1 or bins_per_update < 1:
            raise ValueError(f"{count} bins in updates of {bins_per_update} make no order")
        self.count = count
        self.bins_per_update = bins_per_update
        self.seed = seed
        self._grouped = grouped
        self._current: tuple[int, NDArray[np.int64]] | None = None

    def epoch(self, number: int) -> NDArray[np.int64]:
        """Every bin once; drawn anew for every epoch, and kept until another one is asked for.

        Bins of a step are sorted with the longest first; which they are stays random. Sorting more
        than a step at a time pads less, and makes steps of rows of one length, from which less is
        learnt (docs/benchmarks/packing-cpu.json)."""
        if self._current is None or self._current[0] != number:
            order = shuffled(self.count, seed=self.seed, draw=Draw.EPOCH, number=number)
            if self._grouped is not None:
                step = np.arange(self.count) // self.bins_per_update
                order = order[np.lexsort((-self._grouped[order], step))]
            self._current = number, order
        return self._current[1]

    @property
    def steps_per_epoch(self) -> int:
        """Updates in which every bin is seen once; the last one takes what is left."""
        return math.ceil(self.count / self.bins_per_update)

    def updates_in(self, epochs: float) -> int:
        """Updates of so many epochs, a fraction rounded up; 1.1 epochs of 50 updates are 55."""
        return math.ceil(Fraction(str(epochs)) * self.steps_per_epoch)

    def step_of_bins(self) -> NDArray[np.int64]:
        """The step of each bin in the first epoch."""
        steps = np.empty(self.count, np.int64)
        steps[self.epoch(0)] = np.arange(self.count) // self.bins_per_update
        return steps

    def update(self, done: int) -> Update:
        """The update that follows after `done` of them."""
        epoch, step = divmod(done, self.steps_per_epoch)
        size = self.bins_per_update
        return Update(done, epoch, step, self.epoch(epoch)[step * size : (step + 1) * size])

    def updates(self, done: int, total: int) -> Iterator[Update]:
        """The updates that are left of `total` when `done` are behind us."""
        return map(self.update, range(done, total))


def clumping(sizes: NDArray[np.integer[Any]], groups: NDArray[np.int64]) -> float | None:
    """How far the sizes of each group add up from their mean, against groups drawn at random: the
    ratio of the variances, 1 for a shuffle, and the rows of a group where all of a group are of one
    size. None where all sizes are the same."""
    away = sizes - sizes.mean() if len(sizes) else np.zeros(1)
    spread = float((away**2).sum())
    return float((np.bincount(groups, weights=away) ** 2).sum()) / spread if spread else None


def micro_batches(bins: NDArray[np.int64], rows: int) -> list[NDArray[np.int64]]:
    """An update in slices of `rows` bins, in the same order; the last one may have fewer."""
    return [bins[begin : begin + rows] for begin in range(0, len(bins), rows)]


class Dealt(NamedTuple):
    """The bins of one batch of a rank."""

    bins: NDArray[np.int64]
    silent: bool = False
    """It is computed like any other, and nothing of it is trained on."""


def dealt(bins: NDArray[np.int64], rows: int, world: World = ALONE) -> list[Dealt]:
    """The batches of one rank: bins are dealt to ranks in turn, as cards are.

    Which bins a step is made of does not depend on the number of ranks. Every rank has as many
    batches as the one with the most bins, since ranks that share a model compute in step; silent
    ones make up for bins that it does not have.
    """
    own = [Dealt(some) for some in micro_batches(bins[world.rank :: world.size], rows)]
    most = -(-len(bins) // world.size)
    missing = -(-most // rows) - len(own)
    return own + [Dealt(bins[:1], silent=True)] * missing

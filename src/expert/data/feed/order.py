"""The order of bins: a pure function of the seed, the epoch and the step.

The position in a run is one number, the completed steps; a resumed run continues in the same order.
A step is a range of bins whatever the micro-batch size, which only divides it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from expert.core.world import SINGLE_PROCESS, World


class ShufflePurpose(IntEnum):
    """Purpose of a shuffle; each gets independent random numbers from the same seed."""

    PIECES = 0
    BINS = 1
    EPOCH = 2
    SAMPLE = 5
    WINDOW = 6
    SHIFT = 7


def shuffled(count: int, *, seed: int, draw: ShufflePurpose, number: int = 0) -> NDArray[np.int64]:
    """The numbers 0 to count - 1 in an order that depends only on the arguments.

    Sorts raw output of the bit generator, which NumPy guarantees never to change; there is no such
    guarantee for `Generator.permutation`, and a run may be resumed with a newer NumPy.
    """
    key = np.random.SeedSequence(seed, spawn_key=(int(draw), number))
    return np.argsort(np.random.Philox(key).random_raw(count), kind="stable")


@dataclass(frozen=True, eq=False, slots=True)
class StepBins:
    """The bins of one step."""

    done: int
    """Steps before this one in the run."""
    epoch: int
    in_epoch: int
    """Steps before this one in its epoch, or in its window of a stream."""
    bins: NDArray[np.int64]
    window: int = 0
    """Number of the window of a stream."""


@dataclass(eq=False)
class DataOrder:
    """The steps of a run, from any position on."""

    count: int
    bins_per_step: int
    seed: int
    grouped: NDArray[np.integer[Any]] | None = None
    """The tokens of every bin. The bins of a step are then sorted by length, so that rows of
    similar length share a micro-batch and need the least padding."""

    def __post_init__(self) -> None:
        if self.count < 1 or self.bins_per_step < 1:
            raise ValueError(f"cannot order {self.count} bins in steps of {self.bins_per_step}")
        self._current: tuple[int, NDArray[np.int64]] | None = None

    def epoch(self, number: int) -> NDArray[np.int64]:
        """Every bin once, shuffled for each epoch; the last epoch asked for is cached.

        The bins of a step are sorted, longest first; which bins they are stays random. Sorting
        across steps would pad less, but steps of rows of equal length train worse
        (docs/benchmarks/packing-cpu.json).
        """
        if self._current is None or self._current[0] != number:
            order = shuffled(self.count, seed=self.seed, draw=ShufflePurpose.EPOCH, number=number)
            if self.grouped is not None:
                step = np.arange(self.count) // self.bins_per_step
                order = order[np.lexsort((-self.grouped[order], step))]
            self._current = number, order
        return self._current[1]

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every bin is seen once; the last one may be smaller."""
        return math.ceil(self.count / self.bins_per_step)

    def step(self, done: int) -> StepBins:
        """The step that follows after `done` steps."""
        epoch, step = divmod(done, self.steps_per_epoch)
        size = self.bins_per_step
        return StepBins(done, epoch, step, self.epoch(epoch)[step * size : (step + 1) * size])

    def steps(self, done: int, total: int) -> Iterator[StepBins]:
        """The remaining steps up to `total` after `done`."""
        return map(self.step, range(done, total))


def micro_batches(bins: NDArray[np.int64], rows: int) -> list[NDArray[np.int64]]:
    """Divide a step into slices of `rows` bins, in order; the last one may have fewer."""
    return [bins[begin : begin + rows] for begin in range(0, len(bins), rows)]


class RankBatch(NamedTuple):
    """The bins of one batch of a rank."""

    bins: NDArray[np.int64]
    filler: bool = False
    """Computed like any other batch, but not trained on."""


def rank_batches(
    bins: NDArray[np.int64], rows: int, world: World = SINGLE_PROCESS
) -> list[RankBatch]:
    """The batches of one rank; bins are assigned to ranks in turn.

    The bins of a step do not depend on the number of ranks. Every rank has as many batches as the
    one with the most bins, because ranks that share a model run in lockstep; silent batches, which
    are not trained on, fill the gap.
    """
    own = [RankBatch(batch) for batch in micro_batches(bins[world.rank :: world.size], rows)]
    most = -(-len(bins) // world.size)
    missing = -(-most // rows) - len(own)
    return own + [RankBatch(bins[:1], filler=True)] * missing

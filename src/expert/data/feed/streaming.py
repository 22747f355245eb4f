"""Rows read while training, tokenised and packed one window at a time.

A window is a number of consecutive rows of bounded size. Its batches depend only on the seed, the
epoch and its number, so that the position in a stream is three numbers, and the number of workers
makes no difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from expert.core.text import counted
from expert.core.world import World
from expert.data.feed.feed import StepWork
from expert.data.feed.order import ShufflePurpose, StepBins, shuffled
from expert.data.pack.pack import bins_per_step
from expert.data.pack.pack_index import PackIndex
from expert.data.pipeline import STREAM_WINDOW_ROWS
from expert.data.processes import Restart, in_workers
from expert.data.records import BadRow, DataError, Row, RowOutcome
from expert.data.tokens.documents import FlatDocuments, shard_of
from expert.data.tokens.encoder import EncodedBatch, Encoder
from expert.data.tokens.tokenise import TokenisedRows, in_portions, tokenise_rows
from expert.planning.run_plan import LoaderPlan

WINDOW_CHARACTERS = 8_000_000
SPARE_BOUNDARIES = 1.5
"""Factor for later windows, whose rows may be shorter; fuller bins are divided."""

Pack = Callable[[FlatDocuments, int], PackIndex]
"""Packs documents into bins with a seed."""


class StreamPosition(NamedTuple):
    """The position in a stream: the next step."""

    epoch: int = 0
    window: int = 0
    step: int = 0


@dataclass(eq=False)
class Stream:
    """Steps from rows that are read as needed."""

    open_rows: Callable[[], Iterator[Row | BadRow]]
    """Start a new pass over the rows."""
    formatter: Callable[[], Callable[[Row], RowOutcome]]
    encoder: Encoder
    pack: Pack
    _: KW_ONLY
    examples_per_update: int
    seed: int
    options: LoaderPlan
    max_bad_rows: int = 0
    window_rows: int = STREAM_WINDOW_ROWS

    def __post_init__(self) -> None:
        self._bad_rows = 0
        self.first_rows = self.first_left_out = 0
        """Rows of the first window, and how many of them packing leaves out."""
        # Sizes derived from the first window are used for the whole stream.
        rows = next(self._cut(), None)
        first = self._tokeniser()(rows) if rows else None
        if first is None or not len(first.batch.lengths):
            self._judge(first.bad if first else [])
            raise DataError("the stream has no rows that can be used")
        if not len(first.batch.spans):
            what = "there is nothing to train on in the first rows of the stream: no answers"
            raise DataError(f"{what}  (check the columns with expert dataset check)")
        index = self.pack(FlatDocuments([shard_of(first.batch)]), self.seed)
        if not index.bins:
            count = counted(len(first.batch.lengths), "row")
            what = f"the answer starts after max_seq_length {index.length}"
            fix = "a larger training.config.max_seq_length"
            raise DataError(f"the first {count} of the stream: {what}  ({fix})")
        self.first_rows = len(first.batch.lengths)
        self.first_left_out = index.overlong.unlearnt
        pieces = int(np.diff(index.bin_offsets).max())
        self.whole_rows = pieces == 1 and index.rule == "none"
        self.boundaries_per_bin = 1 if self.whole_rows else int(pieces * SPARE_BOUNDARIES) + 1
        self.bins_per_step = bins_per_step(index, self.examples_per_update)

    def batches_per_step(self, rows: int, world: World) -> int:
        """Room for the largest step: windows are divided evenly, so steps may exceed the
        average."""
        return -(-(2 * self.bins_per_step) // (rows * world.size))

    def works(
        self,
        *,
        done: int,
        place: StreamPosition,
        epochs: float,
        total: int | None,
        patience: float = math.inf,
        restart: Restart = lambda error: False,
    ) -> Iterator[StepWork]:
        """The steps from `place` on; `done` are completed. `patience`: seconds without a window
        after which idle workers count as hanging."""
        for epoch in range(place.epoch, -int(-epochs // 1)):
            here = place if epoch == place.epoch else StreamPosition(epoch)
            for work in self._epoch(here, patience, restart):
                if total is not None and done >= total:
                    return
                yield replace(work, step=replace(work.step, done=done))
                done += 1

    def _cut(self) -> Iterator[list[Row | BadRow]]:
        return in_portions(self.open_rows(), self.window_rows, WINDOW_CHARACTERS)

    def _tokeniser(self) -> Callable[[list[Row | BadRow]], TokenisedRows]:
        return partial(tokenise_rows, segments_of=self.formatter(), encoder=self.encoder)

    def _epoch(
        self, place: StreamPosition, patience: float, restart: Restart
    ) -> Iterator[StepWork]:
        self._bad_rows = 0  # the same rows come again in every epoch
        windows = in_workers(
            self._tokeniser,
            lambda made: islice(self._cut(), place.window + made, None),
            self.options.workers,
            ahead=self.options.prefetch,
            patience=patience,
            restart=restart,
        )
        for number, window in enumerate(windows, start=place.window):
            self._judge(window.bad)
            skipped = place.step if number == place.window else 0
            if len(window.batch.lengths):
                yield from self._window(place.epoch, number, window.batch, skipped)

    def _window(
        self, epoch: int, number: int, documents: EncodedBatch, skipped: int
    ) -> Iterator[StepWork]:
        """The steps of a window: its bins in random order, divided evenly."""
        store = FlatDocuments([shard_of(documents)])
        turn = epoch << 32 | number
        index = divided(self.pack(store, self.seed), self.boundaries_per_bin)
        if not index.bins:  # nothing to train on in this window
            return
        order = shuffled(index.bins, seed=self.seed, draw=ShufflePurpose.WINDOW, number=turn)
        count = max(1, round(index.bins / self.bins_per_step))
        for step, bins in enumerate(np.array_split(order, count)):
            if step >= skipped:
                yield StepWork(StepBins(0, epoch, step, bins, window=number), index, store)

    def _judge(self, bad: list[BadRow]) -> None:
        self._bad_rows += len(bad)
        if self._bad_rows > self.max_bad_rows:
            shown = "\n".join(f"  - {row}" for row in bad[:10])
            words = "a row" if self._bad_rows == 1 else f"{self._bad_rows} rows"
            fix = "fix the data, or tolerate some: --set training.dataset.max_bad_rows=100"
            raise DataError(f"{words} of the stream cannot be used\n{shown}\n  ({fix})")


def divided(index: PackIndex, most: int) -> PackIndex:
    """The same pieces with at most `most` per bin; fuller bins are divided."""
    counts = np.diff(index.bin_offsets)
    if counts.max(initial=0) <= most:
        return index
    inside = [np.arange(begin, end, most) for begin, end in pairwise(index.bin_offsets.tolist())]
    offsets = np.concatenate([*inside, index.bin_offsets[-1:]])
    return replace(index, bin_offsets=offsets)

"""Padded batches: one document per row, grouped by length or not, made here or by workers.

Also the usual approach, kept as a fair baseline: rows are tokenised one by one when a batch needs
them, and nothing is prepared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expert.core.world import SINGLE_PROCESS, World
from expert.data.feed.batches import BatchArrays, BatchCounts, padded_batch
from expert.data.feed.feed import Batch, FedStep
from expert.data.feed.order import DataOrder, RankBatch, StepBins, rank_batches
from expert.data.pack.pack import pack_none
from expert.data.pack.pack_index import PackIndex
from expert.data.processes import Restart, in_workers
from expert.data.records import Row
from expert.data.tokens.documents import FlatDocuments, shard_of
from expert.data.tokens.encoder import Encoder
from expert.planning.run_plan import LoaderPlan

MakeBatch = Callable[[NDArray[np.int64]], tuple[BatchArrays, BatchCounts]]
"""Makes the batch of some bins."""


def from_prepared(index: PackIndex, store: FlatDocuments) -> MakeBatch:
    """Batches of prepared documents; workers share the mapped files."""
    return lambda bins: padded_batch(index, bins, store)


def from_text(
    rows: Sequence[Row],
    segments_of: Callable[[Row], Any],
    encoder: Encoder,
    length: int,
    soft_tokens: int,
) -> MakeBatch:
    """Batches of rows that are tokenised on demand: the slow way, for comparison. Overlong rows are
    always cut, even where preparing would split them."""

    def make(bins: NDArray[np.int64]) -> tuple[BatchArrays, BatchCounts]:
        made = encoder.encode([segments_of(rows[number]) for number in bins])
        store = FlatDocuments([shard_of(made)])
        index = pack_none(store.lengths, length, overlong="cut", soft_tokens=soft_tokens)
        return padded_batch(index, range(index.bins), store)

    return make


@dataclass(eq=False)
class PaddedFeed:
    """The steps of an order, in padded batches of varying width."""

    make: MakeBatch
    order: DataOrder
    _: KW_ONLY
    done: int
    total: int
    rows: int
    device: torch.device
    options: LoaderPlan
    soft: bool = False
    skipped: Container[int] = ()
    world: World = SINGLE_PROCESS
    patience: float = math.inf
    """Seconds without a batch after which workers count as hanging."""
    restart: Restart = lambda error: False

    def __post_init__(self) -> None:
        self._batches = in_workers(
            lambda: self.make,
            self._bins,
            self.options.workers,
            ahead=self.options.prefetch,
            patience=self.patience,
            restart=self.restart,
        )

    def _steps(self) -> Iterator[tuple[StepBins, list[RankBatch]]]:
        # With a copy of the order: workers are ahead, and an order remembers one epoch.
        for step in replace(self.order).steps(self.done, self.total):
            if step.done not in self.skipped:
                yield step, rank_batches(step.bins, self.rows, self.world)

    def _bins(self, made: int) -> Iterator[NDArray[np.int64]]:
        return islice((batch.bins for _, own in self._steps() for batch in own), made, None)

    def __enter__(self) -> PaddedFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self._batches.close()

    def __iter__(self) -> Iterator[FedStep]:
        pins = self.options.pin_memory and self.device.type == "cuda"
        for step, own in self._steps():
            began = time.perf_counter()
            padded = [next(self._batches) for _ in own]
            waited = time.perf_counter() - began
            yield FedStep(
                step=step,
                batches=tuple(
                    on_device(*made, batch, self.device, soft=self.soft, pin=pins)
                    for made, batch in zip(padded, own, strict=True)
                ),
                made_seconds=waited if self.options.workers == 0 else None,
            )


def on_device(
    made: BatchArrays,
    counts: BatchCounts,
    rank_batch: RankBatch,
    device: torch.device,
    *,
    soft: bool,
    pin: bool = False,
) -> Batch:
    """A padded batch on the device; its rows, including the padding, count as documents."""
    rows, width = made.shape.rows, made.shape.length
    if rank_batch.filler:
        made.clear_labels()
        counts = BatchCounts()
    edges = np.arange(0, rows * width + 1, width, dtype=np.int32)

    def sent(array: NDArray[Any], *shape: int) -> Tensor:
        part = torch.from_numpy(array)
        return (part.pin_memory() if pin else part).view(shape).to(device, non_blocking=True)

    return Batch(
        tokens=sent(made.tokens, rows, width),
        labels=sent(made.labels, rows, width),
        positions=sent(made.positions, rows, width),
        boundaries=sent(edges, rows + 1),
        soft_mask=sent(made.soft_mask, rows, width) if soft else None,
        target_places=sent(made.target_places, rows * width),
        counts=counts,
        longest=width,
        whole_rows=True,
        bins=tuple(rank_batch.bins.tolist()),
    )


def padded_rows(
    index: PackIndex, some: RankBatch, store: FlatDocuments, device: torch.device
) -> Batch:
    """The documents of some bins on the device, one per row."""
    return on_device(
        *padded_batch(index, some.bins, store), some, device, soft=index.soft_tokens > 0
    )

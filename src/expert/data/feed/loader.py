"""Padded batches from torch's DataLoader: one document per row, grouped by length or not.

Also the usual approach, kept as a fair baseline: rows are tokenised one by one when a batch needs
them, and nothing is prepared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from expert.core.world import SINGLE_PROCESS, World
from expert.data.feed.batches import IGNORED, BatchCounts, PaddedBatch, padded_batch
from expert.data.feed.feed import Batch, FedStep
from expert.data.feed.order import DataOrder, RankBatch, StepBins, rank_batches
from expert.data.feed.workers import Loader, Restart, WaitLimits, data_loader, load_items
from expert.data.pack.pack import pack_none
from expert.data.pack.pack_index import PackIndex
from expert.data.records import Row
from expert.data.tokens.documents import DocumentStore, FlatDocuments, shard_of
from expert.data.tokens.encoder import EncodedBatch, Encoder
from expert.planning.run_plan import LoaderPlan


class PreparedBins(Dataset[Any]):
    """Prepared documents as padded batches; every worker maps the files itself."""

    def __init__(self, folders: Sequence[Path], index_file: Path) -> None:
        self._folders = tuple(folders)
        self._index_file = index_file
        self._opened: tuple[PackIndex, DocumentStore] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}  # memory maps cannot be pickled

    def __getitems__(self, bins: list[int]) -> PaddedBatch:
        if self._opened is None:
            self._opened = PackIndex.open(self._index_file), DocumentStore(*self._folders)
        index, store = self._opened
        return padded_batch(index, bins, store)


@dataclass(eq=False, kw_only=True)
class RowsTokenisedLate(Dataset[Any]):
    """Rows as text, tokenised one by one on demand: the slow way, for comparison. Overlong rows are
    always cut, even where preparing would split them."""

    rows: Sequence[Row]
    segments_of: Callable[[Row], Any]
    encoder: Encoder
    length: int
    soft_tokens: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> EncodedBatch:
        return self.encoder.encode([self.segments_of(self.rows[number])])

    def together(self, documents: list[EncodedBatch]) -> PaddedBatch:
        """The collate function: pads rows to the longest of the batch."""
        store = FlatDocuments([shard_of(document) for document in documents])
        index = pack_none(store.lengths, self.length, overlong="cut", soft_tokens=self.soft_tokens)
        return padded_batch(index, range(index.bins), store)


def return_batch(batch: Any) -> Any:
    """The collate function for a dataset that returns whole batches."""
    return batch


class MicroBatches(Sampler[list[int]]):
    """The bins of each batch of one epoch; `steps` is set before the epoch begins."""

    def __init__(self, rows: int, world: World) -> None:
        super().__init__()
        self._rows, self._world = rows, world
        self.steps: list[StepBins] = []
        self.first = 0
        """Batches of the epoch that were already loaded."""

    def of(self, step: StepBins) -> list[RankBatch]:
        """This rank's batches of a step."""
        return rank_batches(step.bins, self._rows, self._world)

    def __iter__(self) -> Iterator[list[int]]:
        batches = (batch for step in self.steps for batch in self.of(step))
        for batch in islice(batches, self.first, None):
            yield batch.bins.tolist()


@dataclass(eq=False)
class PaddedFeed:
    """The steps of an order, in padded batches of varying width."""

    dataset: Dataset[Any]
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
    """Seconds without a batch after which idle workers count as hanging."""
    restart: Restart = lambda error: False

    def __post_init__(self) -> None:
        self._sampler = MicroBatches(self.rows, self.world)
        self._loader: Loader | None = None

    def _begin(self, first: int) -> Loader:
        """The loader from batch `first` of the epoch on; reused if its workers still run."""
        self._sampler.first = first
        if self._loader is None or self._loader.ended:
            dataset, options = self.dataset, self.options
            self._loader = data_loader(
                dataset,
                options,
                batch_sampler=self._sampler,
                collate_fn=dataset.together
                if isinstance(dataset, RowsTokenisedLate)
                else return_batch,
                persistent_workers=options.persistent_workers and options.workers > 0,
                pin_memory=options.pin_memory and self.device.type == "cuda",
            )
        return self._loader

    def __enter__(self) -> PaddedFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self._sampler.steps = []
        if self._loader is not None:
            self._loader.end()

    def __iter__(self) -> Iterator[FedStep]:
        left = self.order.steps(self.done, self.total)
        for steps in _by_epoch(step for step in left if step.done not in self.skipped):
            self._sampler.steps = steps
            batches = load_items(self._begin, lambda: WaitLimits(self.patience), self.restart)
            for step in steps:
                yield self._taken(step, batches)

    def _taken(self, step: StepBins, batches: Iterator[PaddedBatch]) -> FedStep:
        began = time.perf_counter()
        own = self._sampler.of(step)
        padded = [next(batches) for _ in own]
        waited = time.perf_counter() - began
        sent = tuple(
            on_device(tensors, batch, self.device, soft=self.soft)
            for tensors, batch in zip(padded, own, strict=True)
        )
        return FedStep(
            step=step,
            batches=sent,
            made_seconds=waited if self.options.workers == 0 else None,
        )


def on_device(
    made: PaddedBatch, rank_batch: RankBatch, device: torch.device, *, soft: bool
) -> Batch:
    """A padded batch on the device; its rows, including the padding, count as documents."""
    rows, width = made.tokens.shape
    if rank_batch.filler:
        made.labels[:] = IGNORED
        made.target_places[:] = rows * width - 1
        made = made._replace(counts=BatchCounts())
    edges = torch.arange(0, rows * width + 1, width, dtype=torch.int32)

    def sent(part: Any) -> Tensor:
        return torch.as_tensor(part).to(device, non_blocking=True)

    return Batch(
        tokens=sent(made.tokens),
        labels=sent(made.labels),
        positions=sent(made.positions),
        boundaries=sent(edges),
        soft_mask=sent(made.soft_mask) if soft else None,
        target_places=sent(made.target_places),
        counts=made.counts,
        longest=width,
        whole_rows=True,
        bins=tuple(rank_batch.bins.tolist()),
    )


def padded_rows(
    index: PackIndex,
    some: RankBatch,
    store: FlatDocuments,
    device: torch.device,
    width: int | None = None,
) -> Batch:
    """The documents of some bins on the device, one per row."""
    made = padded_batch(index, some.bins, store, width)
    return on_device(made, some, device, soft=index.soft_tokens > 0)


def _by_epoch(steps: Iterator[StepBins]) -> Iterator[list[StepBins]]:
    """Group steps by epoch: one pass of the DataLoader each."""
    epoch: list[StepBins] = []
    for step in steps:
        if epoch and epoch[-1].epoch != step.epoch:
            yield epoch
            epoch = []
        epoch.append(step)
    if epoch:
        yield epoch

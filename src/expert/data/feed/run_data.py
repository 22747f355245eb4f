"""From prepared or streamed data to the steps and batches of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from expert.core.world import SINGLE_PROCESS, World
from expert.data.feed.batches import BatchShape
from expert.data.feed.feed import Batch, PackedFeed, StepWork, widths_of
from expert.data.feed.loader import MakeBatch, PaddedFeed, from_prepared, padded_rows
from expert.data.feed.order import DataOrder, StepBins, micro_batches, rank_batches
from expert.data.feed.streaming import Stream, StreamPosition
from expert.data.pack.overlong_rows import remark_on_left_out, remarks_on_length
from expert.data.pack.pack import shifted_blocks
from expert.data.pack.pack_index import PackIndex
from expert.data.pipeline import DataPipeline, columns_read, row_remarks
from expert.data.prepared import PreparedData, PreparedSplit
from expert.data.processes import Restart
from expert.data.splits import data_order, late_rows, split_from_files, stream_of
from expert.data.tokens.encoder import Encoder
from expert.planning.memory.workload import CAPTURED_WIDTHS
from expert.planning.run_plan import RunPlan


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The data of a run: a prepared split with its order, or a stream; and evaluation splits."""

    train: PreparedSplit | None
    order: DataOrder | None
    stream: Stream | None
    validation: PreparedSplit | None
    test: PreparedSplit | None
    encoder: Encoder
    soft: bool
    """Every document begins with a soft prompt."""
    late: MakeBatch | None = None
    """Makes batches of text, if training rows are tokenised when a batch needs them."""
    columns: tuple[str, ...] = ()
    """For each source of training rows: which columns are used and which are not."""
    doubts: tuple[str, ...] = ()
    """Warnings about the rows of any split."""

    @property
    def prepared(self) -> tuple[PreparedSplit, DataOrder]:
        """The training rows of a run that does not stream, and their order."""
        assert self.train is not None
        assert self.order is not None
        return self.train, self.order

    def most_rows(self, split: PreparedSplit, plan: RunPlan) -> int | None:
        """How many rows of a split are evaluated at most; None: all."""
        return plan.watch.eval_rows if split is self.validation else None

    def splits(self) -> list[PreparedSplit]:
        splits = (self.train, self.validation, self.test)
        return [split for split in splits if split is not None]


def run_data(pipeline: DataPipeline, made: PreparedData | None) -> RunData:
    """The data of a run: the prepared data, or a stream if there is none."""
    plan, stream = pipeline.plan, None
    if made is None:
        splits = [split_from_files(pipeline, name) for name in ("validation", "test")]
        stream = stream_of(pipeline)
        rows, left_out = stream.first_rows, stream.first_left_out
        remarks = [
            *row_remarks(pipeline),
            *remark_on_left_out(plan, left_out, rows, of=f"the first {rows:,} rows"),
            *remarks_on_length(plan, *splits),
        ]
    else:
        splits, remarks = [made.train, made.validation, made.test], [*made.doubts]
    folders = [each for split in splits if split is not None for each in split.folders]
    unused = {each.folder: each.left_out for each in folders if each.left_out}
    train = made.train if made is not None else None
    return RunData(
        train=train,
        order=data_order(plan, train) if train is not None else None,
        stream=stream,
        validation=splits[-2],
        test=splits[-1],
        encoder=pipeline.encoder,
        soft=bool(plan.adapter.soft_prompts),
        late=late_rows(pipeline, train) if train and plan.data.tokenize == "late" else None,
        columns=columns_read(pipeline),
        doubts=(*unused.values(), *(each.text for each in remarks)),
    )


def training_feed(
    plan: RunPlan,
    data: RunData,
    *,
    done: int,
    place: tuple[int, int, int] | None,
    skipped: Container[int],
    device: torch.device,
    new_event: Callable[[], Any] | None = None,
    world: World = SINGLE_PROCESS,
    restart: Restart = lambda error: False,
) -> AbstractContextManager[Any]:
    """The steps after `done` as batches on the device, for one rank, without those that are
    `skipped`. `place`: epoch, window and step within it from which a stream continues. `restart`
    decides whether failed workers are restarted once."""
    more: dict[str, Any] = {"device": device, "soft": data.soft, "world": world}
    rows, total = plan.batch.micro_batch, plan.length.total_steps
    patience = plan.watch.hang_seconds or math.inf
    widths: tuple[int, ...] = ()
    if data.stream is not None:
        stream = data.stream
        documents = rows * (stream.boundaries_per_bin + 1)
        shape = BatchShape(rows, plan.data.max_seq_length, documents)
        batches, whole_rows = stream.batches_per_step(rows, world), stream.whole_rows
        works = stream.works(
            done=done,
            place=StreamPosition(*(place or ())),
            epochs=plan.length.epochs,
            total=total,
            patience=patience,
            restart=restart,
        )
    else:
        split, order = data.prepared
        assert total is not None, "known once rows are packed"
        if plan.is_padded:
            return PaddedFeed(
                data.late or from_prepared(split.index, split.open()),
                order,
                done=done,
                total=total,
                rows=rows,
                options=plan.loader,
                skipped=skipped,
                patience=patience,
                restart=restart,
                **more,
            )
        shape = BatchShape.for_index(split.index, rows, branches=plan.objective.branches)
        batches = -(-order.bins_per_step // (rows * world.size))
        whole_rows = has_whole_rows(split)
        works = _prepared_works(plan, split, order.steps(done, total))
        if plan.data.flat and plan.kernels.cuda_graphs:
            widths = widths_of(order, split.index, rows, CAPTURED_WIDTHS, world)
    return PackedFeed(
        (work for work in works if work.step.done not in skipped),
        shape,
        batches_per_step=batches,
        whole_rows=whole_rows,
        ready_ahead=plan.loader.prefetch,
        pin=plan.loader.pin_memory,
        trim=plan.data.trim,
        flat=plan.data.flat,
        widths=widths,
        new_event=new_event,
        **more,
    )


def feed_facts(plan: RunPlan, data: RunData) -> dict[str, Any]:
    """How batches are made, for an event."""
    kind = "packed"
    if data.stream is not None:
        kind = "stream"
    elif plan.is_padded:
        kind = "padded" if data.late is None else "late"
    loader = plan.loader
    workers = 0 if kind == "packed" else loader.workers
    return {"kind": kind, "workers": workers, "prefetch": loader.prefetch, "pin": loader.pin_memory}


def _prepared_works(
    plan: RunPlan, split: PreparedSplit, steps: Iterator[StepBins]
) -> Iterator[StepWork]:
    """Steps over prepared tokens; blocks of a corpus are shifted in every epoch."""
    store, epoch, here = split.open(), 0, split.index
    for step in steps:
        if here.rule == "blocks" and step.epoch != epoch:
            epoch = step.epoch
            here = shifted_blocks(split.index, store.lengths, seed=plan.optim.seed, epoch=epoch)
        yield StepWork(step, here, store)


def has_whole_rows(split: PreparedSplit) -> bool:
    """Whether every sequence is one document, so that plain causal attention is correct."""
    return bool(np.diff(split.index.bin_offsets).max(initial=0) <= 1)


def evaluation_shape(
    plan: RunPlan, splits: Sequence[PreparedSplit], *, rows: int, world: World = SINGLE_PROCESS
) -> tuple[BatchShape, bool] | None:
    """A shape for the batches of all these splits, so that blocks are compiled once, and whether
    all their sequences are whole rows; None if each split has its own shape, which is faster
    without compilation. Limited to the size of the first
    split, so that it is not padded to a large batch."""
    if not plan.kernels.compile or plan.is_padded or len(splits) < 2:
        return None
    rows = min(rows, -(-splits[0].index.bins // world.size))
    branches = plan.objective.branches
    shapes = [BatchShape.for_index(split.index, rows, branches=branches) for split in splits]
    most = {
        name: max(getattr(shape, name) for shape in shapes)
        for name in ("length", "max_documents", "answers")
    }
    return BatchShape(rows, branches=branches, **most), all(map(has_whole_rows, splits))


def evaluation_order(plan: RunPlan, index: PackIndex) -> NDArray[np.int64]:
    if plan.is_padded or plan.data.trim or plan.data.flat:
        # Longest first: out of memory shows early, and rows of similar length need little padding.
        return np.argsort(-index.bin_lengths(), kind="stable")
    return np.arange(index.bins)


def evaluated_bins(plan: RunPlan, index: PackIndex, most: int | None) -> NDArray[np.int64]:
    """The sequences that hold `most` rows of a split, spread evenly and always the same, in the
    order of an evaluation; all of them if it has no more rows."""
    order = evaluation_order(plan, index)
    if most is None or index.examples <= most:
        return order
    count = max(1, index.bins * most // index.examples)
    return order[np.isin(order, np.arange(count) * index.bins // count)]


@contextmanager
def split_batches(
    plan: RunPlan,
    split: PreparedSplit,
    *,
    rows: int,
    device: torch.device,
    world: World = SINGLE_PROCESS,
    shape: tuple[BatchShape, bool] | None = None,
    bins: NDArray[np.int64] | None = None,
) -> Iterator[Iterator[Batch]]:
    """All batches of a split once, for one rank; longest first if their width varies. `bins`: only
    these sequences, in this order."""
    index, store = split.index, split.open()
    # A small split is not padded to a large batch.
    rows = shape[0].rows if shape else min(rows, -(-index.bins // world.size))
    bins = evaluation_order(plan, index) if bins is None else bins
    if plan.is_padded:
        yield (padded_rows(index, some, store, device) for some in rank_batches(bins, rows, world))
        return
    together = rows * world.size
    works = (
        StepWork(StepBins(number, 0, number, some), index, store)
        for number, some in enumerate(micro_batches(bins, together))
    )
    feed = PackedFeed(
        works,
        shape[0] if shape else BatchShape.for_index(index, rows, branches=plan.objective.branches),
        batches_per_step=1,
        device=device,
        soft=index.soft_tokens > 0,
        whole_rows=shape[1] if shape else has_whole_rows(split),
        pin=plan.loader.pin_memory,
        trim=plan.data.trim,
        flat=plan.data.flat,
        world=world,
    )
    with feed:
        yield (batch for fed in feed for batch in fed.batches)

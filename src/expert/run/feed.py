"""Prepared or streamed data to the updates and batches of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from expert.data.feed.feed import Batch, UpdateWork
    from expert.data.feed.loader import RowsTokenisedLate
    from expert.data.feed.order import DataOrder, Update
    from expert.data.feed.streaming import Stream
    from expert.data.pack.pack_index import PackIndex
    from expert.data.tokens.documents import DocumentStore
    from expert.data.tokens.encoder import Encoder
    from expert.planning.run_plan import LengthPlan, RunPlan
    from expert.run.prepare import Builder
    from expert.run.prepared import PreparedSplit
    from expert.training.state import TrainState

PAD_ID = 0
"""Padding has no label and is seen by no document, so any token will do."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """What a run reads: a prepared split in its order, or a stream; and what it is judged by."""

    train: PreparedSplit | None
    order: DataOrder | None
    stream: Stream | None
    validation: PreparedSplit | None
    test: PreparedSplit | None
    encoder: Encoder
    soft: bool
    """Every document begins with a soft prompt."""
    late: RowsTokenisedLate | None = None
    """The training rows as text, where they are tokenised only when a batch asks for them."""
    columns: tuple[str, ...] = ()
    """For each source of training rows: which columns are read, and which are not."""
    doubts: tuple[str, ...] = ()
    """Why the rows tell less than they should, those that are learnt or those it is judged by."""


def largest_ids(data: RunData) -> list[int | None]:
    """The largest token of each prepared folder, as far as it is known."""
    splits = [split for split in (data.train, data.validation, data.test) if split is not None]
    return [prepared.statistics.largest_id for split in splits for prepared in split.folders]


def data_order(plan: RunPlan, split: PreparedSplit) -> DataOrder:
    """The order of a split's bins: updates of as many as hold the planned examples on average."""
    from expert.data.feed.order import DataOrder, Grouping
    from expert.data.pack.pack import bins_per_update

    index = split.index
    count = bins_per_update(index, plan.batch.examples_per_update)
    grouping = None
    if plan.data.group_by_length:
        grouping = Grouping(index.bin_lengths(), count)
    return DataOrder(index.bins, count, plan.optim.seed, grouping)


def settled_by_data(plan: RunPlan, order: DataOrder, split: PreparedSplit) -> RunPlan:
    """The plan with the counts that were estimates until the data was prepared."""
    from expert.planning.memory.fitting import most_at_once
    from expert.run.session.memory_watch import known_calibrations

    index, sequences = split.index, order.bins_per_update
    total = order.updates_in(plan.length.epochs)
    plan = _with_remark_on_max_steps(plan, total)
    if plan.length.max_steps:
        total = min(total, plan.length.max_steps)
    values: dict[str, Any] = {
        "data.sequence_length": index.length,
        "length.tokens_per_epoch": index.statistics().tokens,
        "length.steps_per_epoch": order.steps_per_epoch,
        "length.total_steps": total,
    }
    rate = plan.length.tokens_per_second
    if rate is not None:
        tokens = values["length.tokens_per_epoch"] * total / order.steps_per_epoch
        values["length.seconds"] = tokens / rate
    most = plan.batch.micro_batch
    if _source_of(plan, "batch.micro_batch") == "machine":
        as_packed = plan.with_values({"data.sequence_length": index.length}, "", "measurement")
        most = most_at_once(as_packed, known_calibrations(plan.target), sequences)
    values |= _batches_of(plan, sequences, most)
    slices = {name: getattr(plan, name).model_dump() for name in ("batch", "data", "length")}
    changed = {
        path: value
        for path, value in values.items()
        if slices[path.partition(".")[0]][path.partition(".")[2]] != value
    }
    because = f"prepared: {index.examples:,} rows in {index.bins:,} sequences"
    before = plan.length
    plan = plan.with_values(changed, because, "measurement") if changed else plan
    return _with_time_of(plan, before)


def _with_time_of(plan: RunPlan, before: LengthPlan) -> RunPlan:
    """The plan with the time of the tokens that there are, where an earlier count was another."""
    from expert.planning.choose.expected_time import scaled

    old, new = _tokens_of(before), _tokens_of(plan.length)
    parts = plan.length.expected_parts
    if not parts or not old or not new or old == new:
        return plan
    decision = next(each for each in plan.decisions if each.path == "length.expected_seconds")
    now = scaled(parts, new / old)
    values = {
        "length.expected_seconds": [sum(part[side] for part in now.values()) for side in (0, 1)],
        "length.expected_parts": now,
    }
    return plan.with_values(values, decision.because, decision.source)


def _tokens_of(length: LengthPlan) -> float | None:
    if not length.tokens_per_epoch or not length.steps_per_epoch or not length.total_steps:
        return None
    return length.tokens_per_epoch * length.total_steps / length.steps_per_epoch


def _with_remark_on_max_steps(plan: RunPlan, updates: int) -> RunPlan:
    """The plan with what there is to say of max_steps, by the updates that the epochs really make
    instead of an estimate of them."""
    from expert.planning.choose.length import MAX_STEPS, not_reached

    limit, epochs = plan.length.max_steps, plan.length.epochs
    others = tuple(remark for remark in plan.remarks if remark.path != MAX_STEPS)
    if limit and limit > updates:
        others = (*others, not_reached(limit, updates=updates, epochs=epochs))
    return plan.model_copy(update={"remarks": others})


def settled_by_stream(plan: RunPlan, sequences: int) -> RunPlan:
    """The plan with the sequences of an update that the first rows of a stream make: a batch with
    room for more of them would be empty there, and memory is that of the batch there is."""
    from expert.planning.memory.calibration import estimated_again
    from expert.run.session.memory_watch import known_calibrations

    values = _batches_of(plan, sequences, plan.batch.micro_batch)
    plan = plan.with_values(values, "the first rows of the stream", "measurement")
    return estimated_again(plan, known_calibrations(plan.target))


def _batches_of(plan: RunPlan, sequences: int, most: int) -> dict[str, int]:
    """How so many sequences of an update are divided into batches of at most so many; as the
    manifest says where it does, but no batch has room for more than there are."""
    import math

    from expert.planning.memory.fitting import even_split

    micro = min(plan.batch.micro_batch, sequences)
    if _source_of(plan, "batch.micro_batch") != "manifest":
        micro, _ = even_split(sequences, most)
    return {
        "batch.sequences_per_update": sequences,
        "batch.micro_batch": micro,
        "batch.accumulation": math.ceil(sequences / micro),
    }


def _source_of(plan: RunPlan, path: str) -> str:
    """Who settled a value of the plan."""
    return next((each.source for each in plan.decisions if each.path == path), "machine")


def late_rows(builder: Builder, split: PreparedSplit) -> RowsTokenisedLate:
    """The rows of a split as text, one for each of its sequences, all in memory.

    What was prepared says which rows are used and in what order, so that a run learns the same
    from them; their tokens it makes again each time a batch asks for them.
    """
    from expert.data.feed.loader import RowsTokenisedLate
    from expert.data.records import Row

    plan, source = builder.plan, builder.sources.train
    assert source is not None
    texts, store = list(builder.rows_of(source)), split.open()
    rows = [texts[store.row(int(document))] for document in split.index.piece_document]
    segments_of, _ = builder.formatter(source)
    return RowsTokenisedLate(
        [row for row in rows if isinstance(row, Row)],
        segments_of,
        builder.encoder,
        length=plan.data.max_seq_length,
        soft_tokens=sum(prompt["tokens"] for prompt in plan.adapter.soft_prompts),
        pad_id=PAD_ID,
    )


def training_feed(
    plan: RunPlan,
    data: RunData,
    state: TrainState,
    *,
    device: torch.device,
    new_event: Callable[[], Any] | None = None,
) -> AbstractContextManager[Any]:
    """The updates that are left of the run, as batches on the device."""
    from expert.data.feed.loader import LoaderOptions, PaddedFeed, PreparedRows

    total = plan.length.total_steps
    if data.order is not None and is_padded(plan):
        split = data.train
        assert split is not None
        assert total is not None
        folders = [prepared.folder for prepared in split.folders]
        loader, rows = plan.loader, data.late
        return PaddedFeed(
            rows if rows is not None else PreparedRows(folders, split.index_file, pad_id=PAD_ID),
            data.order,
            done=state.done,
            total=total,
            rows=plan.batch.micro_batch,
            device=device,
            options=LoaderOptions(
                workers=loader.workers,
                prefetch=loader.prefetch,
                persistent=loader.persistent_workers,
                pin=loader.pin_memory,
            ),
            soft=data.soft,
            skipped=state.skipped,
        )
    return _packed_feed(plan, data, state, device, new_event)


def feed_facts(plan: RunPlan, data: RunData) -> dict[str, Any]:
    """What an event says of the way batches are made."""
    kind = "packed"
    if data.stream is not None:
        kind = "stream"
    elif is_padded(plan):
        kind = "padded" if data.late is None else "late"
    loader = plan.loader
    workers = 0 if kind == "packed" else loader.workers
    return {"kind": kind, "workers": workers, "prefetch": loader.prefetch, "pin": loader.pin_memory}


def _packed_feed(
    plan: RunPlan,
    data: RunData,
    state: TrainState,
    device: torch.device,
    new_event: Callable[[], Any] | None,
) -> AbstractContextManager[Any]:
    from expert.data.feed.batches import BatchShape
    from expert.data.feed.feed import PackedFeed

    rows = plan.batch.micro_batch
    if data.stream is not None:
        shape = data.stream.shape.batch_shape(rows, plan.data.max_seq_length)
        batches = data.stream.shape.batches_per_update(rows)
        whole_rows = data.stream.shape.whole_rows
    else:
        assert data.order is not None
        assert data.train is not None
        shape = BatchShape.for_index(data.train.index, rows)
        batches = -(-data.order.bins_per_update // rows)
        whole_rows = has_whole_rows(data.train)
    return PackedFeed(
        _works(plan, data, state),
        shape,
        batches_per_update=batches,
        device=device,
        pad_id=PAD_ID,
        soft=data.soft,
        whole_rows=whole_rows,
        ready_ahead=plan.loader.prefetch,
        pin=plan.loader.pin_memory,
        trim=plan.data.trim,
        new_event=new_event,
    )


def _works(plan: RunPlan, data: RunData, state: TrainState) -> Iterator[Any]:
    from expert.data.feed.streaming import Place

    if data.stream is not None:
        found = data.stream.works(
            done=state.done,
            place=Place(*state.place) if state.place else Place(),
            epochs=plan.length.epochs,
            total=plan.length.total_steps,
        )
    else:
        assert data.order is not None
        assert plan.length.total_steps is not None
        split = data.train
        assert split is not None
        store = split.open()
        found = _prepared_works(
            data.order.updates(state.done, plan.length.total_steps),
            split.index,
            store,
            seed=plan.optim.seed,
        )
    return (work for work in found if work.update.done not in state.skipped)


def _prepared_works(
    updates: Iterator[Update], index: PackIndex, store: DocumentStore, *, seed: int
) -> Iterator[UpdateWork]:
    """Updates over prepared tokens; blocks of a corpus are cut anew in every epoch."""
    from expert.data.feed.feed import UpdateWork
    from expert.data.pack.pack import shifted_blocks

    epoch, here = 0, index
    for update in updates:
        if index.rule == "blocks" and update.epoch != epoch:
            epoch = update.epoch
            here = shifted_blocks(index, store.lengths, seed=seed, epoch=epoch)
        yield UpdateWork(update, here, store)


def is_padded(plan: RunPlan) -> bool:
    """Whether rows go alone, padded to the longest; blocks of a corpus are full without padding."""
    from expert.manifest.schema.manifest import CHAR_GPT

    return plan.data.packing == "none" and plan.model.name != CHAR_GPT


def has_whole_rows(split: PreparedSplit) -> bool:
    """Whether every sequence is one document, so that plain causal attention is right."""
    import numpy as np

    return bool(np.diff(split.index.bin_offsets).max(initial=0) <= 1)


@contextmanager
def split_batches(
    plan: RunPlan, split: PreparedSplit, *, rows: int, device: torch.device
) -> Iterator[Iterator[Batch]]:
    """All batches of a split once; those that vary in width longest first."""
    import numpy as np

    from expert.data.feed.batches import BatchShape
    from expert.data.feed.feed import PackedFeed, UpdateWork
    from expert.data.feed.loader import on_device, padded_tensors
    from expert.data.feed.order import Update, micro_batches

    index, store = split.index, split.open()
    rows = min(rows, index.bins)  # a small split is not padded up to a large batch
    bins = np.arange(index.bins)
    if is_padded(plan) or plan.data.trim:
        # Longest first: what does not fit shows at once, and rows of one length pad each other.
        bins = np.argsort(-index.bin_lengths(), kind="stable")
    if is_padded(plan):
        yield (
            on_device(
                padded_tensors(index, some, store, pad_id=PAD_ID),
                some,
                device,
                soft=index.soft_tokens > 0,
            )
            for some in micro_batches(bins, rows)
        )
        return
    works = (
        UpdateWork(Update(number, 0, number, some), index, store)
        for number, some in enumerate(micro_batches(bins, rows))
    )
    feed = PackedFeed(
        works,
        BatchShape.for_index(index, rows),
        batches_per_update=1,
        device=device,
        pad_id=PAD_ID,
        soft=index.soft_tokens > 0,
        whole_rows=has_whole_rows(split),
        pin=plan.loader.pin_memory,
        trim=plan.data.trim,
    )
    with feed:
        yield (batch for fed in feed for batch in fed.batches)

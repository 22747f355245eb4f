"""From tokens to the data of a run: splits, packing, streaming, and tokenisation while training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from expert.core.errors import ExpertError
from expert.core.hashed import file_integrity, put_copy_aside
from expert.core.resources import reporting_disk_full
from expert.core.rundir import waiting_lock
from expert.core.text import counted
from expert.data.feed.order import DataOrder
from expert.data.named_sources import CACHE_KEY
from expert.data.pack.drawing import draw_documents, held_out_warning
from expert.data.pack.overlong_rows import remarks_on_length, require_rows
from expert.data.pack.pack import bins_per_step
from expert.data.pack.pack_index import PackIndex, index_name
from expert.data.pack.packing import packed, packing_for, rows_to_pack
from expert.data.pipeline import DataPipeline, columns_read, reader_for, row_remarks, tokens_of
from expert.data.prepared import PreparedData, PreparedSplit
from expert.data.records import DataError, Row
from expert.data.tokens.documents import DocumentStore, FlatDocuments
from expert.data.tokens.prepare import FREE_SPACE_FIX, PREPARED_DATA, Prepared
from expert.data.tokens.row_keys import RowKeys
from expert.planning.choose.sequences import Packing
from expert.planning.decisions import Remark
from expert.planning.run_plan import RunPlan

if TYPE_CHECKING:  # they load torch
    from expert.data.feed.loader import MakeBatch
    from expert.data.feed.streaming import Stream

Documents = NDArray[np.integer[Any]]


class NothingToPrepare(ExpertError):
    """There is nothing to prepare because rows are tokenised while training."""


def disk_space_for(pipeline: DataPipeline) -> AbstractContextManager[None]:
    """Context for preparing: an error about a full disk includes the space the plan expects."""
    place, needed = pipeline.cache, pipeline.plan.disk.cache_bytes
    return reporting_disk_full(place, PREPARED_DATA, needed, fix=FREE_SPACE_FIX)


def prepare_splits(pipeline: DataPipeline) -> PreparedData | None:
    """Every split, tokenised and packed; None if something is missing in a read-only cache."""
    tokens = all_tokens(pipeline, "train")
    named = [name for name in ("validation", "test") if pipeline.sources_of(name)]
    given = {name: split_from_files(pipeline, name) for name in named}
    if tokens is None or None in given.values():
        return None
    keys = None
    if pipeline.spec.validation_split or given:  # some rows must not be on two sides
        keys = RowKeys.of(DocumentStore(*(prepared.folder for prepared in tokens)))
    counts = [prepared.statistics.documents for prepared in tokens]
    chosen, held_out, repeats = drawn_rows(pipeline, counts, keys)
    train = pack_split(pipeline, "train", tokens, chosen)
    validation, test = given.get("validation"), given.get("test")
    if train is not None and len(held_out):
        validation = pack_split(pipeline, "validation", tokens, held_out, drawn_from=train)
    if train is None or (len(held_out) and validation is None):
        return None

    doubts = [*pipeline.chosen.remarks]
    doubts += [Remark.warning(CACHE_KEY, text) for text in dict.fromkeys(pipeline.damaged)]
    if repeats:
        doubts.append(Remark.warning("training.dataset.validation_split", repeats))
    doubts += row_remarks(pipeline)
    for name, split in given.items():
        if split is not None and keys is not None:
            shared = _shared_rows(pipeline, split, tokens, keys, chosen)
            doubts += [Remark.warning(f"training.dataset.{name}_path", shared)] if shared else []
    return PreparedData(
        train=train,
        validation=validation,
        test=test,
        encoder=pipeline.encoder,
        template=pipeline.template.name if pipeline.template else "characters",
        doubts=(*doubts, *remarks_on_length(pipeline.plan, train, validation, test)),
        columns=columns_read(pipeline),
        notes=tuple(pipeline.chosen.notes()),
    )


def drawn_rows(
    pipeline: DataPipeline, counts: Sequence[int], keys: RowKeys | None
) -> tuple[Documents, Documents, str]:
    """The documents that are trained on, those held out of the same files, and a warning if rows of
    both repeat each other; `counts`: the documents of each source of training rows."""
    has_own = bool(pipeline.sources_of("validation"))
    chosen, held_out = draw_documents(
        counts,
        pipeline.chosen.sources.weights,
        held_out_share=0.0 if has_own else pipeline.spec.validation_split,
        seed=pipeline.plan.optim.seed,
        keys=keys,
    )
    repeats = held_out_warning(keys, chosen, held_out) if keys is not None else ""
    if reader_for(pipeline, pipeline.sources_of("train")[0]).end_held_out:
        chosen, held_out = np.array([0]), np.array([1])  # as in the names of stored indexes
    return chosen, held_out, repeats


def _shared_rows(
    pipeline: DataPipeline,
    split: PreparedSplit,
    train: tuple[Prepared, ...],
    train_keys: RowKeys,
    trained: Documents,
) -> str:
    """A warning about the rows of a file for validation or test whose prompt and answer are also
    trained on, which measures memorisation; "" if there are none. Rows that were split off from the
    training rows never are."""
    keys, known = RowKeys.of(split.open()).whole, train_keys.whole[trained]
    shared = np.flatnonzero(np.isin(keys, known))
    if not len(shared):
        return ""

    def place(document: int, name: str, folders: tuple[Prepared, ...]) -> str:
        """The row number, from 1, and source of a document."""
        for source, prepared in zip(pipeline.sources_of(name), folders, strict=True):
            if document < prepared.statistics.documents:
                return f"row {DocumentStore(prepared.folder).row(document) + 1:,} of {source.name}"
            document -= prepared.statistics.documents
        raise IndexError(document)

    first = int(shared[0])
    twin = int(trained[np.argmax(known == keys[first])])
    verb = "is" if len(shared) == 1 else "are"
    return (
        f"{split.name}: {len(shared):,} of {counted(len(keys), 'row')} {verb} in the training rows "
        f"as well ({place(first, split.name, split.folders)} is {place(twin, 'train', train)}): "
        f"the {split.name} loss is lower than on unseen rows  (remove them from one of the two; "
        f"{pipeline.list_command})"
    )


def all_tokens(pipeline: DataPipeline, split: str) -> tuple[Prepared, ...] | None:
    """The tokens of all sources of a split; None if any are missing."""
    made = [tokens_of(pipeline, source, split) for source in pipeline.sources_of(split)]
    tokens = tuple(each for each in made if each is not None)
    return tokens if len(tokens) == len(made) else None


def split_from_files(pipeline: DataPipeline, name: str) -> PreparedSplit | None:
    """A split with its own files; None if it has none or they are not prepared."""
    tokens = all_tokens(pipeline, name)
    if not tokens:
        return None
    count = sum(prepared.statistics.documents for prepared in tokens)
    return pack_split(pipeline, name, tokens, np.arange(count))


# --- packing -------------------------------------------------------------------------------------


def pack_split(
    pipeline: DataPipeline,
    name: str,
    tokens: tuple[Prepared, ...],
    documents: Documents,
    *,
    drawn_from: PreparedSplit | None = None,
) -> PreparedSplit | None:
    """Documents as a split, by a stored index or a new one; None if missing and read-only."""
    plan, is_text = pipeline.plan, pipeline.is_text
    # Keep only the lengths while packing, which takes the most memory per row of all preparation.
    store = DocumentStore(*(prepared.folder for prepared in tokens))
    rows = rows_to_pack(plan, store, documents, is_text=is_text)
    del store
    packing = packing_for(plan, name, rows, is_text=is_text, streaming=pipeline.spec.streaming)
    file = pipeline.cache / index_name(
        plan,
        name,
        tokens=[prepared.key for prepared in tokens],
        documents=documents,
        packing=packing,
        leaves_out=bool(len(rows.unlearnt)),
    )
    state = file_integrity(file)
    hit, index = state == "sound", None
    if state == "missing" and not pipeline.writes:
        return None
    alone = hit or not pipeline.writes
    with nullcontext() if alone else waiting_lock(file, f"packing {name}", pipeline.waits):
        state = state if alone else file_integrity(file)
        if state != "sound":
            index = packed(plan, name, rows, plan.optim.seed, packing, is_text=is_text)
            del rows
            index = replace(index, piece_document=documents[index.piece_document].astype("int32"))
            if pipeline.writes:
                if state == "damaged":
                    aside = f"the damaged one set aside as {put_copy_aside(file).name}"
                    what = "changed after it was written: packed again"
                    pipeline.damaged.append(f"{file}: {what}, and {aside}")
                index.save(file)
    index = index or PackIndex.open(file)
    split = PreparedSplit(name, tokens, index, file, hit, len(documents))
    return require_rows(plan, split, drawn_from)


def data_order(plan: RunPlan, split: PreparedSplit) -> DataOrder:
    """The order of a split's bins; a step has as many as hold the planned examples on average."""
    index = split.index
    count = bins_per_step(index, plan.batch.examples_per_update)
    grouped = index.bin_lengths() if plan.data.group_by_length else None
    return DataOrder(index.bins, count, plan.optim.seed, grouped)


# --- rows that are tokenised while training ------------------------------------------------------


def stream_of(pipeline: DataPipeline) -> Stream:
    """The training rows, tokenised and packed while they are read."""
    from expert.data.feed.streaming import Stream

    source = pipeline.chosen.sources.train
    if source is None:
        raise DataError("training.dataset.streaming: tasks cannot be streamed  (set it to false)")
    plan, reading, is_text = pipeline.plan, reader_for(pipeline, source), pipeline.is_text
    packing: Packing | None = None

    def pack(store: FlatDocuments, seed: int) -> PackIndex:
        """Windows are packed like the first one, which decides the bins per step."""
        nonlocal packing
        rows = rows_to_pack(plan, store, np.arange(len(store)), is_text=is_text)
        packing = packing or packing_for(plan, "train", rows, is_text=is_text, streaming=True)
        return packed(plan, "train", rows, seed, packing, is_text=is_text)

    return Stream(
        reading.rows,
        reading.formatter,
        pipeline.encoder,
        pack,
        examples_per_update=plan.batch.examples_per_update,
        seed=plan.optim.seed,
        options=plan.loader,
        max_bad_rows=pipeline.spec.max_bad_rows,
    )


def late_rows(pipeline: DataPipeline, split: PreparedSplit) -> MakeBatch:
    """Batches of the rows of a split, which are in memory as text, one per sequence.

    The prepared data decides which rows are used and in what order, so a run trains on the same
    rows; a row is tokenised again each time it is in a batch.
    """
    from expert.data.feed.loader import from_text

    source = pipeline.chosen.sources.train
    assert source is not None
    reading = reader_for(pipeline, source)
    texts, store = list(reading.rows()), split.open()
    rows = [texts[store.row(int(document))] for document in split.index.piece_document]
    return from_text(
        [row for row in rows if isinstance(row, Row)],
        reading.segments_of,
        pipeline.encoder,
        pipeline.plan.data.max_seq_length,
        pipeline.plan.soft_tokens,
    )

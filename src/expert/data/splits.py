"""From tokens to the data of a run: splits, packing, streaming, and tokenisation while training."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from expert.core.errors import ExpertError
from expert.core.files import sha256_of
from expert.core.hashed import keep_hash, state_of, told_aside
from expert.core.room import within_room
from expert.core.rundir import in_turn
from expert.data.feed.order import DataOrder
from expert.data.inspect.shared_rows import SharedRows, SplitRows, find_shared
from expert.data.line import (
    Line,
    columns_read,
    doubtful_texts,
    reading_of,
    recipe_of,
    remarks_on_tokens,
    tokenising,
    tokens_of,
    unread_columns,
)
from expert.data.named_sources import CACHE_KEY
from expert.data.pack.drawing import draw_documents, repeats_held_out
from expert.data.pack.overlong_rows import not_empty, remarks_on_length
from expert.data.pack.pack import bins_per_step
from expert.data.pack.pack_index import IndexName, PackIndex
from expert.data.pack.packing import (
    RowsToPack,
    packed,
    packing_for,
    rows_to_pack,
)
from expert.data.prepared import PartsLeft, PreparedData, PreparedSplit
from expert.data.records import DataError, Row
from expert.data.tokens.documents import DocumentStore
from expert.data.tokens.prepare import (
    MORE_ROOM,
    PREPARED_DATA,
    make_part,
    missing_parts,
    publish_parts,
    refuse_other_parts,
)
from expert.data.tokens.row_keys import RowKeys, kept_keys, saved_keys
from expert.planning.decisions import Remark
from expert.planning.settle import PackedCounts

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from expert.data.feed.loader import RowsTokenisedLate
    from expert.data.feed.streaming import Stream
    from expert.data.tokens.documents import FlatDocuments
    from expert.data.tokens.prepare import Part, Prepared, Recipe
    from expert.data.tokens.shards import Tokenising
    from expert.manifest.schema.dataset import DatasetSpec
    from expert.planning.choose.sequences import Packing
    from expert.planning.run_plan import RunPlan

    Documents = npt.NDArray[np.integer[Any]]


class NothingToPrepare(ExpertError):
    """There is nothing to prepare because rows are tokenised while training."""


def refuse_streaming(spec: DatasetSpec) -> None:
    if spec.streaming:
        raise NothingToPrepare(
            "training.dataset.streaming is true: its rows are tokenised while training, there is "
            "nothing to prepare  (set streaming: false to prepare them once)"
        )


def room_for(line: Line) -> AbstractContextManager[None]:
    """Context for preparing: an error about a full disk includes the space the plan expects."""
    place, needed = line.cache.beside, line.plan.disk.cache_bytes
    return within_room(place, PREPARED_DATA, needed, fix=MORE_ROOM)


def prepare_splits(line: Line) -> PreparedData | None:
    """Every split, tokenised and packed; None if something is missing in a read-only cache."""
    tokens = all_tokens(line, "train")
    given = {
        name: given_split(line, name) for name in ("validation", "test") if line.sources_of(name)
    }
    if tokens is None or None in given.values():
        return None
    share = line.spec.validation_split if "validation" not in given else 0.0
    keys = keys_of(line, tokens) if share else None
    if share and keys is None:
        return None
    chosen, held_out = draw_documents(
        [prepared.statistics.documents for prepared in tokens],
        line.weights,
        held_out_share=share,
        seed=line.plan.optim.seed,
        keys=keys,
    )
    repeats = repeats_held_out(keys, chosen, held_out) if keys is not None else ""
    if reading_of(line, line.sources_of("train")[0]).end_apart:
        chosen, held_out = np.array([0]), np.array([1])
    train = pack_split(line, "train", tokens, chosen)
    validation, test = given.get("validation"), given.get("test")
    if train is not None and len(held_out):
        validation = pack_split(line, "validation", tokens, held_out, drawn_beside=train)
    if train is None or (len(held_out) and validation is None):
        return None
    shared = [_shared(line, split, train, chosen) for split in given.values() if split is not None]
    return PreparedData(
        train=train,
        validation=validation,
        test=test,
        encoder=line.encoder,
        template=line.template.name if line.template else "characters",
        doubts=(
            *remarks_on_tokens(line),
            *(Remark.warning(CACHE_KEY, text) for text in dict.fromkeys(line.damaged)),
            *([Remark.warning("training.dataset.validation_split", repeats)] if repeats else []),
            *unread_columns(line),
            *doubtful_texts(line),
            *(Remark.warning(each.key, each.as_text(line.listed_by)) for each in shared if each),
            *remarks_on_length(line.plan, train, validation, test),
        ),
        shared=tuple(each for each in shared if each is not None),
        columns=columns_read(line),
        notes=tuple(line.chosen.notes()),
    )


def prepare_part(line: Line, part: Part) -> PreparedData | PartsLeft:
    """Tokenise one part of the rows of every split; with the last missing part, prepare the
    rest."""
    # Splits with the same rows share a folder; it is prepared as the first of them.
    folders: dict[Path, tuple[Tokenising, Recipe, Path]] = {}
    for split in ("train", "validation", "test"):
        for source in line.sources_of(split):
            recipe, folder = recipe_of(line, source, split)
            work = tokenising(line, source, split, f"part {part.number}/{part.of}")
            folders.setdefault(folder, (work, recipe, folder))
    for _, recipe, folder in folders.values():
        refuse_other_parts(recipe, folder, part)
    for work, recipe, folder in folders.values():
        make_part(work, recipe, folder, part)
    left = [missing_parts(recipe, folder, part.of) for _, recipe, folder in folders.values()]
    missing = set().union(*left)
    if missing:
        return PartsLeft(tuple(sorted(missing)), part.of)
    for work, recipe, folder in folders.values():
        publish_parts(work, recipe, folder)
    prepared = prepare_splits(line)
    assert prepared is not None
    return prepared


def all_tokens(line: Line, split: str) -> tuple[Prepared, ...] | None:
    """The tokens of all sources of a split; None if any are missing."""
    tokens = []
    for source in line.sources_of(split):
        prepared = tokens_of(line, source, split)
        if prepared is None:
            return None
        tokens.append(prepared)
    return tuple(tokens)


def given_split(line: Line, name: str) -> PreparedSplit | None:
    """A split with its own files; None if it has none or they are not prepared."""
    tokens = all_tokens(line, name)
    if not tokens:
        return None
    count = sum(prepared.statistics.documents for prepared in tokens)
    return pack_split(line, name, tokens, np.arange(count))


def keys_of(line: Line, tokens: tuple[Prepared, ...]) -> RowKeys | None:
    """Keys to recognise the documents of prepared sources; None if they are not stored and the
    cache is read-only, since making them reads every token."""
    beside, saves = line.cache.beside, line.cache.writes
    per_source = [
        saved_keys(each, beside, line.waits, line.damaged.append)
        if saves
        else kept_keys(each, beside)
        for each in tokens
    ]
    known = [keys for keys in per_source if keys is not None]
    return RowKeys.joined(known) if len(known) == len(per_source) else None


def _shared(
    line: Line, split: PreparedSplit, train: PreparedSplit, trained: Documents
) -> SharedRows | None:
    """Rows of a split with its own files that are also trained on."""
    rows = []
    for each in (split, train):
        keys = keys_of(line, each.folders)
        if keys is None:
            return None  # the next run makes the keys and reports shared rows
        names = [source.name for source in line.sources_of(each.name)]
        rows.append(SplitRows(names=names, folders=each.folders, keys=keys))
    return find_shared(split.name, rows[0], rows[1], trained)


# --- packing -------------------------------------------------------------------------------------


def pack_split(
    line: Line,
    name: str,
    tokens: tuple[Prepared, ...],
    documents: Documents,
    *,
    drawn_beside: PreparedSplit | None = None,
) -> PreparedSplit | None:
    """Documents as a split, by a stored index or a new one; None if missing and read-only."""
    plan = line.plan
    # Keep only the lengths while packing, which takes the most memory per row of all preparation.
    store = DocumentStore(*(prepared.folder for prepared in tokens))
    rows = rows_to_pack(plan, store, documents, is_text=line.is_text)
    del store
    packing = _packing(line, name, rows)
    named = IndexName(
        split=name,
        tokens=tuple(prepared.key for prepared in tokens),
        documents=hashlib.sha256(np.ascontiguousarray(documents).data).hexdigest(),
        packing=plan.data.packing,
        length=packing.length,
        overlong=plan.data.overlong,
        soft_tokens=plan.soft_tokens,
        seed=plan.optim.seed,
        most_rows=packing.most_rows,
        leaves_out=bool(len(rows.unlearnt)),
    )
    file, packed_before = _index_file(line, named)
    state = state_of(file)
    hit, index = state == "sound", None
    if state == "missing" and not line.cache.writes:
        return None
    alone = hit or not line.cache.writes
    with nullcontext() if alone else in_turn(file, f"packing {name}", line.waits):
        if not hit and state_of(file) != "sound":
            index = packed(plan, name, rows, plan.optim.seed, packing, is_text=line.is_text)
            del rows
            index = replace(index, piece_document=documents[index.piece_document].astype("int32"))
            if line.cache.writes:
                _save_index(line, index, file)
    index = index or PackIndex.open(file)
    split = PreparedSplit(name, tokens, index, file, hit, len(documents), packed_before)
    return not_empty(plan, split, drawn_beside)


def _save_index(line: Line, index: PackIndex, file: Path) -> None:
    """Write an index. A damaged one is replaced. One without a hash, from an earlier version, may
    stay if the folder is read-only and the content is equal."""
    state = state_of(file)
    if state == "damaged":
        line.damaged.append(told_aside(file, "packed"))
    try:
        index.save(file)
    except OSError:
        if state != "unknown" or not index.equals(PackIndex.open(file)):
            raise


def _index_file(line: Line, named: IndexName) -> tuple[Path, bool]:
    """The file of the index, and whether the run being resumed has its own index of the same rows
    from an earlier version: that one is used, because a run's order must not change."""
    own, beside = line.own_indexes, line.cache.beside
    if named.split != "train" or not own or named.file in own:
        return beside / named.file, False
    most = 2 * line.plan.batch.examples_per_update
    before = named.before(own, longest=line.plan.data.max_seq_length, most=most)
    state = state_of(beside / before) if before is not None else "missing"
    if before is None or state in ("missing", "damaged"):
        return beside / named.file, before is not None
    if state == "unknown":  # it cannot be rebuilt, so its current content counts as correct
        PackIndex.open(beside / before)
        with suppress(OSError):
            keep_hash(beside / before, sha256_of(beside / before))
    return beside / before, True


def _packing(line: Line, name: str, rows: RowsToPack) -> Packing:
    return packing_for(line.plan, name, rows, is_text=line.is_text, streaming=line.spec.streaming)


def data_order(plan: RunPlan, split: PreparedSplit) -> DataOrder:
    """The order of a split's bins; a step has as many as hold the planned examples on average."""
    index = split.index
    count = bins_per_step(index, plan.batch.examples_per_update)
    grouped = index.bin_lengths() if plan.data.group_by_length else None
    return DataOrder(index.bins, count, plan.optim.seed, grouped)


def packed_counts(plan: RunPlan, split: PreparedSplit) -> PackedCounts:
    """Counts of the packed rows, which the plan is settled by."""
    index, order = split.index, data_order(plan, split)
    return PackedCounts(
        rows=index.examples,
        sequences=index.bins,
        length=index.length,
        tokens=index.statistics().tokens,
        sequences_per_step=order.bins_per_step,
        steps_per_epoch=order.steps_per_epoch,
        steps=order.steps_in(plan.length.epochs),
    )


# --- rows that are tokenised while training ------------------------------------------------------


def stream_of(line: Line) -> Stream:
    """The training rows, tokenised and packed while they are read."""
    from expert.data.feed.streaming import Stream, StreamedRows

    source = line.chosen.sources.train
    if source is None:
        raise DataError(
            "training.dataset.streaming: several tasks cannot be streamed together  "
            "(set streaming: false)"
        )
    plan, reading = line.plan, reading_of(line, source)
    packing: Packing | None = None

    def pack(store: FlatDocuments, seed: int) -> PackIndex:
        """Windows are packed like the first one, which decides the bins per step."""
        nonlocal packing
        rows = rows_to_pack(plan, store, np.arange(len(store)), is_text=line.is_text)
        packing = packing or _packing(line, "train", rows)
        return packed(plan, "train", rows, seed, packing, is_text=line.is_text)

    return Stream(
        StreamedRows(reading.rows, reading.formatter, line.encoder),
        pack,
        examples_per_update=plan.batch.examples_per_update,
        seed=plan.optim.seed,
        options=plan.loader,
        max_bad_rows=line.spec.max_bad_rows,
    )


def late_rows(line: Line, split: PreparedSplit) -> RowsTokenisedLate:
    """The rows of a split as text, one per sequence, all in memory.

    The prepared data decides which rows are used and in what order, so a run trains on the same
    rows; a row is tokenised again each time it is in a batch.
    """
    from expert.data.feed.loader import RowsTokenisedLate

    source = line.chosen.sources.train
    assert source is not None
    reading = reading_of(line, source)
    texts, store = list(reading.rows()), split.open()
    rows = [texts[store.row(int(document))] for document in split.index.piece_document]
    return RowsTokenisedLate(
        rows=[row for row in rows if isinstance(row, Row)],
        segments_of=reading.segments_of,
        encoder=line.encoder,
        length=line.plan.data.max_seq_length,
        soft_tokens=line.plan.soft_tokens,
    )

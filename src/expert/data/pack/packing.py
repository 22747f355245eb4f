"""How the rows of a split are packed into sequences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expert.data.pack.pack import (
    Overlong,
    bins_for,
    cut_pieces,
    pack_best_fit,
    pack_blocks,
    pack_concat,
    pack_none,
)
from expert.data.pack.pack_index import PackIndex
from expert.data.tokens.documents import FlatDocuments
from expert.planning.choose.sequences import (
    LENGTH_MULTIPLE,
    PACKED_FILL,
    ROWS_TOLERANCE,
    Packing,
    concatenation_of,
    rows_of_tokens,
)
from expert.planning.run_plan import RunPlan
from expert.planning.survey import sequences_for

TRIED_ROWS = 2048
MORE_SEQUENCES = 4
"""Numbers of sequences that are tried: 16 rows, 7 of which fill one, go into 4 that hold 4 each."""
MOST_ROWS_TRIED = (1.0, 1.25, 1.5, 2.0)
"""Times the mean rows per sequence: one long row may fill a sequence, so others may have more."""


@dataclass(frozen=True, eq=False)
class RowsToPack:
    """What packing needs to know about the rows of a split; not their tokens."""

    lengths: NDArray[np.integer[Any]]
    unlearnt: NDArray[np.integer[Any]]
    """Numbers of the pieces (after cutting) with nothing to train on: they are left out, since they
    would cost as much compute as others."""


def rows_to_pack(
    plan: RunPlan, store: FlatDocuments, documents: NDArray[np.integer[Any]], *, is_text: bool
) -> RowsToPack:
    """The lengths of some documents, and which of their pieces have nothing to train on."""
    lengths = store.lengths[documents]
    nothing = np.zeros(0, np.int64)
    if not is_text or not len(lengths):
        return RowsToPack(lengths, nothing)
    limit, overlong = _cut_as(plan, lengths)
    doubtful = (lengths > limit) | (lengths < 2) | store.without_spans(documents)
    if not doubtful.any():
        return RowsToPack(lengths, nothing)
    pieces = cut_pieces(lengths, limit, overlong)
    at = np.flatnonzero(doubtful[pieces.document])
    trained = store.have_targets(documents[pieces.document[at]], pieces.start[at], pieces.stop[at])
    return RowsToPack(lengths, at[~trained])


def count_untrainable(plan: RunPlan, store: FlatDocuments) -> int:
    """How many of these tokenised rows packing would leave out."""
    rows = rows_to_pack(plan, store, np.arange(len(store)), is_text=True)
    pieces = cut_pieces(rows.lengths, *_cut_as(plan, rows.lengths))
    return pieces.without(rows.unlearnt).overlong.unlearnt


def _cut_as(plan: RunPlan, lengths: NDArray[np.integer[Any]]) -> tuple[int, Overlong]:
    """The most tokens of a row in a sequence, and what happens to longer rows. Concatenated rows
    are only cut at the end of a sequence and continue in the next."""
    if plan.data.packing == "concat":
        return max(1, int(lengths.max(initial=0))), "cut"
    return plan.data.max_seq_length - plan.soft_tokens, plan.data.overlong


def packing_for(
    plan: RunPlan, name: str, rows: RowsToPack, *, is_text: bool, streaming: bool
) -> Packing:
    """How to pack: for training rows, sequences that divide a step well; otherwise of
    `max_seq_length`."""
    data, soft = plan.data, plan.soft_tokens
    length = data.max_seq_length
    if name != "train" or not is_text or data.packing == "none":
        return Packing(1, length, None)
    if data.packing == "concat":
        # What exceeds a sequence continues in the next one as another row.
        parts = -(-rows.lengths // max(1, length - soft))
        mean = float(rows.lengths.sum() / max(1, parts.sum())) + soft
        return concatenation_of(_rows_per_step(plan, mean), mean=mean, length=length)
    every = cut_pieces(rows.lengths, length - soft, data.overlong)
    pieces = every.without(rows.unlearnt)
    if not len(pieces):
        return Packing(1, length, None)
    sizes = pieces.stop - pieces.start + soft
    # All windows of a stream have sequences of the same length, and later rows are unknown. Rows
    # that are left out count here: at another length they would be cut elsewhere.
    shortest = length if streaming else int((every.stop - every.start).max()) + soft
    examples = _rows_per_step(plan, float(sizes.mean()))
    return best_packing(sizes, examples, length, shortest=shortest)


def _rows_per_step(plan: RunPlan, mean: float) -> int:
    """As planned; if given in tokens, derived from the rows, whose lengths are known by now."""
    tokens = plan.batch.tokens_per_step
    return plan.batch.examples_per_update if tokens is None else rows_of_tokens(tokens, mean)


def best_packing(sizes: NDArray[np.int32], examples: int, length: int, *, shortest: int) -> Packing:
    """The packing whose steps come closest to the requested number of rows; among those close
    enough, the one with the fewest empty places.

    Tried on a sample, because the rows per sequence depend on how they fit. Sequences of `length`
    are preferred if they are close enough.
    """
    if len(sizes) > TRIED_ROWS:
        chosen = np.random.default_rng(0).choice(len(sizes), TRIED_ROWS, replace=False)
        sizes = sizes[chosen]
    total = int(sizes.sum(dtype=np.int64))

    def tried(places: int, most: int | None) -> tuple[float, float, Packing]:
        """The relative error in rows per step, the share of empty places, and the packing."""
        bins = bins_for(sizes, places, most_pieces=most)
        sequences = sequences_for(examples, rows=len(sizes), sequences=bins)
        # With few rows the last sequence is seldom full, which says nothing about a step.
        off = min(
            abs(sequences * len(sizes) / each / examples - 1) for each in (bins, bins - 1 or 1)
        )
        return off, 1 - total / (bins * places), Packing(sequences, places, most)

    plain = tried(length, None)
    if plain[0] <= ROWS_TOLERANCE:
        return plain[2]
    tries = [plain]
    for places, most in _candidates(examples, total / len(sizes), length, shortest):
        tries.append(tried(places, most))
    near = [one for one in tries if one[0] <= ROWS_TOLERANCE]
    best = min(near, key=lambda one: one[1:2]) if near else min(tries, key=lambda one: one[:2])
    return best[2]


def _candidates(
    examples: int, mean: float, length: int, shortest: int
) -> Iterator[tuple[int, int | None]]:
    """Sequence lengths, and limits of rows in them, that are worth trying."""
    least = max(1, math.ceil(examples * mean / length))
    tried: set[tuple[int, int | None]] = set()
    for sequences in range(least, least + MORE_SEQUENCES):
        each = examples / sequences
        if each < 1 and sequences > least:
            return
        for room in (each * mean / PACKED_FILL, math.ceil(each) * shortest):
            places = LENGTH_MULTIPLE * math.ceil(max(room, shortest) / LENGTH_MULTIPLE)
            for most in (None, *(max(1, round(share * each)) for share in MOST_ROWS_TRIED)):
                candidate = (min(length, places), most)
                if candidate not in tried:
                    tried.add(candidate)
                    yield candidate


def packed(
    plan: RunPlan, name: str, rows: RowsToPack, seed: int, packing: Packing, *, is_text: bool
) -> PackIndex:
    data, lengths, length = plan.data, rows.lengths, packing.length
    more: dict[str, Any] = {"soft_tokens": plan.soft_tokens, "unlearnt": rows.unlearnt}
    if not is_text:
        if name == "train":
            return pack_blocks(lengths, length)
        return pack_none(lengths, length, overlong="split")
    if data.packing == "concat":
        return pack_concat(lengths, length, seed, **more)
    if data.packing == "none":
        return pack_none(lengths, length, overlong=data.overlong, **more)
    more |= {"overlong": data.overlong, "most_pieces": packing.most_rows}
    return pack_best_fit(lengths, length, seed, **more)

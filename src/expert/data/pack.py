"""From the lengths of documents to an index of bins that they fill. No token is touched.

A piece is a stretch of a document; a bin is a row of at most `length` places that holds pieces.
Where a soft prompt is learnt, each piece takes its places too.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from dataclasses import dataclass, replace
from heapq import heapreplace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from expert.data.order import Draw, shuffled
from expert.data.pack_index import OverlongCounts, PackIndex
from expert.planning.survey import sequences_for

Overlong = Literal["cut", "split", "drop"]
Lengths = NDArray[np.integer[Any]]

WINDOW = 4096
"""Pieces that are fitted together: enough for 99 % fill, few enough to keep the order random."""
_LEVELLED = (0.9, 0.7, 0.0)  # shares of the tokens to level; the short pieces close the gaps
_WORTH_LEVELLING = 3  # pieces to a bin; with fewer there is nothing to spread
_BINS_TO_SPARE = 0.005  # what levelling may cost
_TAKEN_APART = 16  # at most one bin in so many waits for the next window
_FULL = 0.99  # bins that are not taken apart
_TIMES_THE_MEAN = 4  # pieces that a bin may have, against the mean
_FEW_PIECES = 8  # and as many it may have in any case
SHIFTED_FROM_BLOCKS = 8
"""Texts of at least so many blocks are cut anew in every epoch."""
_SORTED_IN = 16
_CHUNK = 65536  # pieces that are Python ints at any one time


@dataclass(frozen=True, eq=False, slots=True)
class Pieces:
    """The stretches of documents that are kept, in the order of the documents."""

    document: NDArray[np.int32]
    start: NDArray[np.int32]
    stop: NDArray[np.int32]
    overlong: OverlongCounts

    def __len__(self) -> int:
        return len(self.document)

    def without(self, unlearnt: Lengths | None) -> Pieces:
        """The pieces but those with these numbers, from which nothing would be learnt."""
        if unlearnt is None or not len(unlearnt):
            return self
        kept = np.ones(len(self), np.bool_)
        kept[unlearnt] = False
        gone = np.setdiff1d(self.document[unlearnt], self.document[kept])
        counts = replace(self.overlong, unlearnt=len(gone))
        return Pieces(self.document[kept], self.start[kept], self.stop[kept], counts)


def cut_pieces(lengths: Lengths, limit: int, overlong: Overlong) -> Pieces:
    """Every document as pieces of at most `limit` tokens; empty documents have none."""
    if limit < 1:
        raise ValueError(f"no room for a token: {limit} places are left for a document")
    longer = lengths > limit
    many, excess = int(longer.sum()), lengths[longer].astype(np.int64)
    if overlong == "split":
        chunks = (lengths + (limit - 1)) // limit
        document = np.repeat(np.arange(len(lengths), dtype=np.int32), chunks)
        first = np.cumsum(chunks) - chunks
        start = (np.arange(len(document)) - np.repeat(first, chunks)) * limit
        stop = np.minimum(start + limit, lengths[document])
        counts = OverlongCounts(split=many)
    else:
        kept = (lengths > 0) & ~longer if overlong == "drop" else lengths > 0
        document = np.arange(len(lengths), dtype=np.int32)[kept]
        stop = np.minimum(lengths[document], limit)
        start = np.zeros_like(stop)
        if overlong == "drop":
            counts = OverlongCounts(dropped=many, tokens_lost=int(excess.sum()))
        else:
            counts = OverlongCounts(cut=many, tokens_lost=int((excess - limit).sum()))
    narrow = [part.astype(np.int32, copy=False) for part in (start, stop)]
    return Pieces(document, narrow[0], narrow[1], counts)


def pack_best_fit(
    lengths: Lengths,
    length: int,
    seed: int,
    *,
    window: int = WINDOW,
    overlong: Overlong = "cut",
    soft_tokens: int = 0,
    most_pieces: int | None = None,
    unlearnt: Lengths | None = None,
) -> PackIndex:
    """Fit pieces into bins, longest first, a window of the shuffled pieces at a time.

    What stands together and what comes first is left to the seed: windows are cut from a shuffled
    order, and the bins are shuffled at the end. `most_pieces` closes a bin that has room left;
    `unlearnt` are the numbers of pieces that are left out.
    """
    pieces = cut_pieces(lengths, length - soft_tokens, overlong).without(unlearnt)
    # 32 bits wherever numbers are kept for every piece, and nothing kept longer than needed: this
    # is where preparation takes most memory a row.
    order = shuffled(len(pieces), seed=seed, draw=Draw.PIECES).astype(np.int32)
    sizes = (pieces.stop - pieces.start + soft_tokens)[order]
    bin_of, bins = _fit_windows(sizes, length, window, most_pieces)
    del sizes
    bin_of = shuffled(bins, seed=seed, draw=Draw.BINS).astype(np.int32)[bin_of]
    by_bin = _by_bin(order, bin_of, bins)
    bin_offsets = _offsets(np.bincount(bin_of, minlength=bins))
    del order, bin_of
    return PackIndex(
        rule="best-fit",
        length=length,
        soft_tokens=soft_tokens,
        examples=len(pieces),
        overlong=pieces.overlong,
        piece_document=pieces.document[by_bin],
        piece_start=pieces.start[by_bin],
        piece_stop=pieces.stop[by_bin],
        bin_offsets=bin_offsets,
    )


def bins_for(sizes: NDArray[np.int32], length: int, *, most_pieces: int | None = None) -> int:
    """How many bins pieces of these sizes fill, in this order."""
    return _fit_windows(sizes, length, WINDOW, most_pieces)[1]


def _by_bin(order: NDArray[np.int32], bin_of: NDArray[np.int32], bins: int) -> NDArray[np.int32]:
    """The pieces of the first bin, of the second, ..., each in their order.

    Sorted some bins at a time: sorting all of them at once would take 16 bytes a piece.
    """
    sorted_pieces = np.empty_like(order)
    end, step = 0, max(1, bins // _SORTED_IN)
    for low in range(0, bins, step):
        here = np.flatnonzero((bin_of >= low) & (bin_of < low + step))
        begin, end = end, end + len(here)
        sorted_pieces[begin:end] = order[here[np.argsort(bin_of[here], kind="stable")]]
    return sorted_pieces


class Room(NamedTuple):
    """What goes into a bin."""

    places: int
    pieces: int
    """Most pieces: every batch has boundaries for the fullest bins there can be, and attention
    is slower for each of them (3.35 ms with 512, 2.57 ms with 128, for the same documents)."""


def _fit_windows(
    sizes: NDArray[np.int32], length: int, window: int, most_pieces: int | None
) -> tuple[NDArray[np.int32], int]:
    """The bin of each piece, and how many bins there are.

    What fills no whole bin at the end of a window goes into the next one, and so do the pieces of
    its emptiest bins, which are taken apart again.
    """
    bin_of = np.empty(len(sizes), dtype=np.int32)
    waiting = np.empty(0, dtype=np.int64)
    bins = 0
    per_bin = length * len(sizes) / max(1, int(sizes.sum(dtype=np.int64)))
    room = Room(length, most_pieces or max(_FEW_PIECES, math.ceil(_TIMES_THE_MEAN * per_bin)))
    for begin in range(0, len(sizes), window):
        last = begin + window >= len(sizes)
        here = np.concatenate([waiting, np.arange(begin, min(begin + window, len(sizes)))])
        ends = np.cumsum(sizes[here], dtype=np.int64)
        whole_bins = int(ends[-1]) if last else int(ends[-1]) // length * length
        here, later = np.split(here, [np.searchsorted(ends, whole_bins, side="right")])
        here = here[np.argsort(-sizes[here], kind="stable")]
        placed, used = _fit(sizes[here].tolist(), room)
        kept = np.ones(used, dtype=np.bool_)
        if not last:
            loads = np.bincount(placed, weights=sizes[here], minlength=used)
            emptiest = np.argsort(loads, kind="stable")[: max(1, used // _TAKEN_APART)]
            kept[emptiest] = loads[emptiest] >= _FULL * length
            if most_pieces is not None:
                full = np.bincount(placed, minlength=used) == most_pieces
                kept[emptiest] |= full[emptiest]
        stays = kept[placed]
        bin_of[here[stays]] = (bins - 1 + np.cumsum(kept))[placed[stays]]
        bins += int(kept.sum())
        waiting = np.concatenate([here[~stays], later])
    return bin_of, bins


def _fit(sizes: list[int], room: Room) -> tuple[NDArray[np.int64], int]:
    """The bin of each piece, and how many bins there are; pieces come longest first.

    Plain best-fit leaves the short pieces for a few bins that hold nothing else. Levelling the
    bins first spreads them, so that every update has about as many examples; where that costs
    bins, less is levelled or nothing.
    """
    total = sum(sizes)
    least = max(-(-total // room.places), -(-len(sizes) // room.pieces))
    tried = []
    for share in _LEVELLED if len(sizes) >= _WORTH_LEVELLING * least else _LEVELLED[-1:]:
        tried.append(_level_then_best_fit(sizes, room, least if share else 0, share * total))
        if tried[-1][1] <= least * (1 + _BINS_TO_SPARE):
            return tried[-1]
    return min(tried, key=lambda result: result[1])


def _level_then_best_fit(
    sizes: list[int], room: Room, bins: int, levelled: float
) -> tuple[NDArray[np.int64], int]:
    """Give the first `levelled` tokens to the emptiest of `bins` bins, the rest to the fullest
    that has room."""
    heap = [(-room.places, name) for name in range(bins)]  # free places, negative: emptiest first
    counts = [0] * bins
    placed: list[int] = []
    done = 0
    for size in sizes if bins else ():
        negative, name = heap[0]
        if done >= levelled or size > -negative or counts[name] == room.pieces:
            break
        heapreplace(heap, (negative + size, name))
        counts[name] += 1
        placed.append(name)
        done += size
    heap.sort(reverse=True)
    open_bins = [(-negative, name) for negative, name in heap if counts[name] < room.pieces]
    free = [spare for spare, _ in open_bins]  # fullest first
    names = [name for _, name in open_bins]
    for size in sizes[len(placed) :]:
        at = bisect_left(free, size)
        if at < len(free):
            name, spare = names.pop(at), free.pop(at) - size
        else:
            name, spare = len(counts), room.places - size
            counts.append(0)
        placed.append(name)
        counts[name] += 1
        if spare and counts[name] < room.pieces:
            at = bisect_left(free, spare)
            free.insert(at, spare)
            names.insert(at, name)
    return np.asarray(placed, dtype=np.int64), len(counts)


def pack_concat(
    lengths: Lengths,
    length: int,
    seed: int,
    *,
    overlong: Overlong = "split",
    soft_tokens: int = 0,
    unlearnt: Lengths | None = None,
) -> PackIndex:
    """Lay documents end to end in shuffled order and cut at the borders of the bins.

    A document that is cut goes on in the next bin as a new piece. Every bin but the last is full;
    with a soft prompt a few places may be left, too few for the prompt and a token. `unlearnt`
    are the numbers of the documents with tokens that are left out.
    """
    limit = length - soft_tokens
    pieces = cut_pieces(lengths, limit, overlong)
    examples, overlong_counts = len(pieces), pieces.overlong
    if overlong == "split":  # borders do the splitting
        longest = max(1, int(lengths.max(initial=0)))
        pieces = cut_pieces(lengths, longest, "cut").without(unlearnt)
        examples = int((-(-pieces.stop // limit)).sum(dtype=np.int64))
        overlong_counts = replace(overlong_counts, unlearnt=pieces.overlong.unlearnt)
    order = shuffled(len(pieces), seed=seed, draw=Draw.PIECES)
    document, start, stop, per_bin = array("i"), array("i"), array("i"), array("q")
    room, in_bin = length, 0
    for begin in range(0, len(order), _CHUNK):
        chunk = order[begin : begin + _CHUNK]
        for name, left in zip(
            pieces.document[chunk].tolist(), pieces.stop[chunk].tolist(), strict=True
        ):
            at = 0
            while at < left:
                if room <= soft_tokens:
                    per_bin.append(in_bin)
                    room, in_bin = length, 0
                end = min(left, at + room - soft_tokens)
                document.append(name)
                start.append(at)
                stop.append(end)
                room -= end - at + soft_tokens
                in_bin += 1
                at = end
    if in_bin:
        per_bin.append(in_bin)
    return PackIndex(
        rule="concat",
        length=length,
        soft_tokens=soft_tokens,
        examples=examples,
        overlong=overlong_counts,
        piece_document=np.asarray(document, dtype=np.int32),
        piece_start=np.asarray(start, dtype=np.int32),
        piece_stop=np.asarray(stop, dtype=np.int32),
        bin_offsets=_offsets(np.asarray(per_bin, dtype=np.int64)),
    )


def pack_none(
    lengths: Lengths,
    length: int,
    *,
    overlong: Overlong = "cut",
    soft_tokens: int = 0,
    unlearnt: Lengths | None = None,
) -> PackIndex:
    """One piece to a bin, in the order of the documents; the epoch's order groups by length."""
    pieces = cut_pieces(lengths, length - soft_tokens, overlong).without(unlearnt)
    return PackIndex(
        rule="none",
        length=length,
        soft_tokens=soft_tokens,
        examples=len(pieces),
        overlong=pieces.overlong,
        piece_document=pieces.document,
        piece_start=pieces.start,
        piece_stop=pieces.stop,
        bin_offsets=np.arange(len(pieces) + 1, dtype=np.int64),
    )


def pack_blocks(lengths: Lengths, length: int) -> PackIndex:
    """Full blocks of a corpus, one to a bin, with room to move by up to a block.

    Of a long text the blocks of an epoch begin a little later each time (`shifted_blocks`), so that
    no two epochs are cut alike; for that the last part of it, less than a block, is left out. Of a
    short text nothing is left out, and its blocks stay where they are.
    """
    plain = cut_pieces(lengths, length, "split")
    long = (lengths >= SHIFTED_FROM_BLOCKS * length)[plain.document]
    reach = lengths[plain.document] - length  # a block may begin here after the longest shift
    kept = ~long | (plain.start + length - 1 <= reach)
    document = plain.document[kept]
    return PackIndex(
        rule="blocks",
        length=length,
        soft_tokens=0,
        examples=len(document),
        overlong=plain.overlong,
        piece_document=document,
        piece_start=plain.start[kept],
        piece_stop=plain.stop[kept],
        bin_offsets=np.arange(len(document) + 1, dtype=np.int64),
    )


def shifted_blocks(index: PackIndex, lengths: Lengths, *, seed: int, epoch: int) -> PackIndex:
    """The blocks as one epoch sees them: those of long texts begin later, by less than a block."""
    if epoch == 0:
        return index
    key = np.random.SeedSequence(seed, spawn_key=(int(Draw.SHIFT), epoch))
    shift = int(np.random.Philox(key).random_raw() % index.length)
    long = (lengths >= SHIFTED_FROM_BLOCKS * index.length)[index.piece_document]
    moved = np.where(long, shift, 0).astype(np.int32)
    return replace(
        index, piece_start=index.piece_start + moved, piece_stop=index.piece_stop + moved
    )


def bins_per_update(index: PackIndex, examples_per_update: int) -> int:
    """Bins that hold so many examples on average, at least one."""
    return sequences_for(examples_per_update, rows=index.examples, sequences=index.bins)


def _offsets(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each bin's pieces begin, and the end of the last."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets

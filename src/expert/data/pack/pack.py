"""Packs documents into bins by their lengths, without reading tokens.

A piece is a range of a document; a bin is a row of at most `length` places that holds pieces. With
a soft prompt, each piece also needs places for it.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from expert.data.feed.order import ShufflePurpose, shuffled
from expert.data.pack.pack_index import OverlongCounts, PackIndex, PackRule
from expert.data.tokens.encoder import edges_of
from expert.planning.survey import sequences_for

Overlong = Literal["cut", "split", "drop"]
Lengths = NDArray[np.integer[Any]]

WINDOW = 4096
"""Pieces packed together: enough for 99 % fill, few enough to keep the order random."""
_BEST_FIT_FROM = 1.5  # mean piece sizes: a smaller hole is filled by best fit, not the next piece
_PAIRS_TRIED = 8  # first sizes tried when filling a hole with two pieces
_TIGHT = 512  # a bin with less than 1/512 of its places empty counts as full
_WORTH_MATCHING = 1.01  # longest-first is considered if it needs this much fewer bins
_ALIKE = 0.05  # how much it may increase the correlation of lengths within a bin
_TAKEN_APART = 16  # at most one bin in 16 is emptied into the next window
_FULL = 0.99  # bins filled this much are not emptied
_TIMES_THE_MEAN = 4  # most pieces in a bin, relative to the mean
_FEW_PIECES = 8  # but at least this many
SHIFTED_FROM_BLOCKS = 8
"""Texts of at least this many blocks are cut differently in every epoch."""
_SORTED_IN = 16
_CHUNK = 65536  # pieces converted to Python ints at a time


@dataclass(frozen=True, eq=False, slots=True)
class Pieces:
    """The ranges of documents that are used, in document order."""

    document: NDArray[np.int32]
    start: NDArray[np.int32]
    stop: NDArray[np.int32]
    overlong: OverlongCounts

    def __len__(self) -> int:
        return len(self.document)

    def without(self, unlearnt: Lengths | None) -> Pieces:
        """The pieces without these, which have nothing to train on."""
        if unlearnt is None or not len(unlearnt):
            return self
        kept = np.ones(len(self), np.bool_)
        kept[unlearnt] = False
        gone = np.setdiff1d(self.document[unlearnt], self.document[kept])
        return replace(self[kept], overlong=replace(self.overlong, unlearnt=len(gone)))

    def __getitem__(self, chosen: NDArray[Any]) -> Pieces:
        """Some of the pieces, in this order."""
        return replace(
            self,
            document=self.document[chosen],
            start=self.start[chosen],
            stop=self.stop[chosen],
        )

    def in_bins(
        self,
        bin_offsets: NDArray[np.int64],
        rule: PackRule,
        length: int,
        *,
        soft_tokens: int = 0,
        examples: int | None = None,
    ) -> PackIndex:
        """The index of these pieces, which are in bin order."""
        examples = len(self) if examples is None else examples
        columns = (self.document, self.start, self.stop, bin_offsets)
        return PackIndex(rule, length, soft_tokens, examples, self.overlong, *columns)


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
    """Fit pieces into bins, one window of shuffled pieces at a time.

    The composition and the order of bins stay random: bins take the shuffled pieces as they come,
    only their last holes are filled by best fit, and the bins are shuffled at the end.
    `most_pieces` limits the pieces per bin; `unlearnt`: numbers of pieces to leave out.
    """
    pieces = cut_pieces(lengths, length - soft_tokens, overlong).without(unlearnt)
    # 32 bits for all numbers per piece, and nothing kept longer than needed: this is where
    # preparation needs the most memory per row.
    order = shuffled(len(pieces), seed=seed, draw=ShufflePurpose.PIECES).astype(np.int32)
    sizes = (pieces.stop - pieces.start + soft_tokens)[order]
    bin_of, bins = _fit_windows(sizes, length, window, most_pieces)
    del sizes
    bin_of = shuffled(bins, seed=seed, draw=ShufflePurpose.BINS).astype(np.int32)[bin_of]
    by_bin = _by_bin(order, bin_of, bins)
    bin_offsets = edges_of(np.bincount(bin_of, minlength=bins))
    del order, bin_of
    return pieces[by_bin].in_bins(bin_offsets, "best-fit", length, soft_tokens=soft_tokens)


def bins_for(sizes: NDArray[np.int32], length: int, *, most_pieces: int | None) -> int:
    """How many bins pieces of these sizes fill, in this order."""
    return _fit_windows(sizes, length, WINDOW, most_pieces)[1]


def _by_bin(order: NDArray[np.int32], bin_of: NDArray[np.int32], bins: int) -> NDArray[np.int32]:
    """The pieces sorted by bin, keeping their order.

    Sorted in groups of bins: sorting all together would take 16 bytes per piece.
    """
    sorted_pieces = np.empty_like(order)
    end, step = 0, max(1, bins // _SORTED_IN)
    for low in range(0, bins, step):
        here = np.flatnonzero((bin_of >= low) & (bin_of < low + step))
        begin, end = end, end + len(here)
        sorted_pieces[begin:end] = order[here[np.argsort(bin_of[here], kind="stable")]]
    return sorted_pieces


def _fit_windows(
    sizes: NDArray[np.int32], length: int, window: int, most_pieces: int | None
) -> tuple[NDArray[np.int32], int]:
    """The bin of each piece, and the number of bins.

    Pieces at the end of a window that do not fill a whole bin move to the next window, and so do
    those of its emptiest bins.
    """
    bin_of = np.empty(len(sizes), dtype=np.int32)
    waiting = np.empty(0, dtype=np.int64)
    bins = 0
    per_bin = length * len(sizes) / max(1, int(sizes.sum(dtype=np.int64)))
    # Limited because every batch has boundaries for the fullest bins possible, and each makes
    # attention slower (3.35 ms with 512, 2.57 ms with 128, for the same documents).
    most = most_pieces or max(_FEW_PIECES, math.ceil(_TIMES_THE_MEAN * per_bin))
    for begin in range(0, len(sizes), window):
        last = begin + window >= len(sizes)
        here = np.concatenate([waiting, np.arange(begin, min(begin + window, len(sizes)))])
        ends = np.cumsum(sizes[here], dtype=np.int64)
        whole_bins = int(ends[-1]) if last else int(ends[-1]) // length * length
        here, later = np.split(here, [np.searchsorted(ends, whole_bins, side="right")])
        placed, used = _fit(sizes[here].tolist(), length, most)
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


def _fit(sizes: list[int], length: int, most: int) -> tuple[NDArray[np.int64], int]:
    """The bin of each piece, and the number of bins; pieces come in random order.

    The usual way, longest first, sorts bins by length: of 2,000 rows of 22 to 24 tokens, 109 of 112
    bins held rows of one length, and training on them was 5 to 23 % worse. So bins take pieces as
    they come. Where two or three long pieces fill a bin they need matching: then longest-first is
    used if it needs clearly fewer bins and does not group similar lengths.
    """
    placed, bins = _fit_in_order(sizes, length, most)
    least = -(-sum(sizes) // length)
    if bins <= least * _WORTH_MATCHING:
        return placed, bins
    matched, fewer = _fit_longest_first(sizes, length, most)
    if bins <= fewer * _WORTH_MATCHING:
        return placed, bins
    lengths = np.asarray(sizes, dtype=np.float64)
    before = max(0.0, _length_correlation(lengths, placed, bins))
    alike = _length_correlation(lengths, matched, fewer) > before + _ALIKE
    return (placed, bins) if alike else (matched, fewer)


def _length_correlation(sizes: NDArray[np.float64], placed: NDArray[np.int64], bins: int) -> float:
    """The correlation between the sizes of two pieces in a bin: 0 for random bins, 1 if each bin
    has pieces of one size."""
    away = sizes - sizes.mean()
    counts = np.bincount(placed, minlength=bins)
    pairs, spread = float((counts * (counts - 1)).sum()), float(away.var())
    if not pairs or not spread:
        return 0.0
    sums = np.bincount(placed, weights=away, minlength=bins)
    return float((sums**2).sum() - (away**2).sum()) / pairs / spread


def _fit_in_order(sizes: list[int], length: int, most: int) -> tuple[NDArray[np.int64], int]:
    """Fill one bin after the other with the pieces as they come; when the hole is small, or the
    next piece does not fit, fill it with the best-fitting one or two of the remaining pieces."""
    waiting = _UnplacedPieces(sizes)
    placed = [-1] * len(sizes)
    small, tight = _BEST_FIT_FROM * sum(sizes) / max(1, len(sizes)), length // _TIGHT
    bins = first = 0
    while waiting.sizes:
        free, held, at = length, 0, first
        while held < most and waiting.sizes:
            while placed[at] >= 0:
                at += 1
            if not held:
                first = at
            size = sizes[at]
            if size > free or (held and free <= small):
                break
            placed[at] = bins
            waiting.remove(size)
            free, held = free - size, held + 1
        while free > tight and held < most:
            chosen = waiting.best_for(free, tight, alone=held + 1 == most)
            if not chosen:
                break
            for size in chosen:
                placed[waiting.take(size, placed)] = bins
            free, held = free - sum(chosen), held + len(chosen)
        bins += 1
    return np.asarray(placed, dtype=np.int64), bins


class _UnplacedPieces:
    """Pieces that are not in a bin yet, by size."""

    def __init__(self, sizes: list[int]) -> None:
        self._places: dict[int, list[int]] = {}
        for place in range(len(sizes) - 1, -1, -1):
            self._places.setdefault(sizes[place], []).append(place)  # the next one is last
        self._left = {size: len(places) for size, places in self._places.items()}
        self.sizes = sorted(self._left)
        """Every remaining size, once."""

    def remove(self, size: int) -> None:
        """Count a piece of this size as placed."""
        self._left[size] -= 1
        if not self._left[size]:
            del self.sizes[bisect_left(self.sizes, size)]

    def take(self, size: int, placed: list[int]) -> int:
        """The next unplaced piece of this size, which is then counted as placed."""
        places = self._places[size]
        while placed[places[-1]] >= 0:
            places.pop()
        self.remove(size)
        return places.pop()

    def best_for(self, free: int, tight: int, *, alone: bool) -> tuple[int, ...]:
        """The one or two sizes that fill `free` places best, or up to `tight`; () if nothing
        fits."""
        known = self.sizes
        count = bisect_right(known, free)
        if not count:
            return ()
        best: tuple[int, ...] = (known[count - 1],)
        empty = free - best[0]
        for at in range(0, 0 if alone else count, max(1, count // _PAIRS_TRIED)):
            one = known[at]
            rest = free - one
            behind = bisect_right(known, rest)
            if empty <= tight or not behind:
                break
            other = known[behind - 1]
            if rest - other < empty and (one != other or self._left[one] > 1):
                best, empty = (one, other), rest - other
        return best


def _fit_longest_first(sizes: list[int], length: int, most: int) -> tuple[NDArray[np.int64], int]:
    """Each piece goes into the fullest bin with room, longest pieces first."""
    placed = np.empty(len(sizes), dtype=np.int64)
    counts: list[int] = []
    free: list[int] = []  # free places of the open bins, ascending
    names: list[int] = []
    for piece in np.argsort(-np.asarray(sizes), kind="stable").tolist():
        size = sizes[piece]
        at = bisect_left(free, size)
        if at < len(free):
            name, spare = names.pop(at), free.pop(at) - size
        else:
            name, spare = len(counts), length - size
            counts.append(0)
        placed[piece] = name
        counts[name] += 1
        if spare and counts[name] < most:
            at = bisect_left(free, spare)
            free.insert(at, spare)
            names.insert(at, name)
    return placed, len(counts)


def pack_concat(
    lengths: Lengths,
    length: int,
    seed: int,
    *,
    soft_tokens: int = 0,
    unlearnt: Lengths | None = None,
) -> PackIndex:
    """Concatenate documents in shuffled order and cut them at the ends of bins.

    A document that is cut continues in the next bin as a new piece. Every bin but the last is full;
    with a soft prompt a few places may stay empty, too few for the prompt and a token. `unlearnt`:
    numbers, among the non-empty documents, of those to leave out.
    """
    limit = length - soft_tokens
    split = cut_pieces(lengths, limit, "split").overlong
    pieces = cut_pieces(lengths, max(1, int(lengths.max(initial=0))), "cut").without(unlearnt)
    examples = int((-(-pieces.stop // limit)).sum(dtype=np.int64))
    counts = replace(split, unlearnt=pieces.overlong.unlearnt)
    order = shuffled(len(pieces), seed=seed, draw=ShufflePurpose.PIECES)
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
    narrow = [np.asarray(column, dtype=np.int32) for column in (document, start, stop)]
    cut = Pieces(narrow[0], narrow[1], narrow[2], counts)
    offsets = edges_of(per_bin)
    return cut.in_bins(offsets, "concat", length, soft_tokens=soft_tokens, examples=examples)


def pack_none(
    lengths: Lengths,
    length: int,
    *,
    overlong: Overlong = "cut",
    soft_tokens: int = 0,
    unlearnt: Lengths | None = None,
) -> PackIndex:
    """One piece per bin, in document order; grouping by length is up to the order of the epoch."""
    pieces = cut_pieces(lengths, length - soft_tokens, overlong).without(unlearnt)
    return pieces.in_bins(np.arange(len(pieces) + 1), "none", length, soft_tokens=soft_tokens)


def pack_blocks(lengths: Lengths, length: int) -> PackIndex:
    """Full blocks of a corpus, one per bin, which can be shifted by up to a block.

    In a long text the blocks are shifted in each epoch (`shifted_blocks`), so that no two epochs
    are cut alike; this leaves out its last part, less than a block. A short text is used completely
    and its blocks are not shifted.
    """
    plain = cut_pieces(lengths, length, "split")
    long = (lengths >= SHIFTED_FROM_BLOCKS * length)[plain.document]
    reach = lengths[plain.document] - length  # the last possible start of a shifted block
    kept = ~long | (plain.start + length - 1 <= reach)
    blocks = plain[kept]
    return blocks.in_bins(np.arange(len(blocks) + 1), "blocks", length)


def shifted_blocks(index: PackIndex, lengths: Lengths, *, seed: int, epoch: int) -> PackIndex:
    """The blocks of one epoch: in long texts they start later, by less than a block."""
    if epoch == 0:
        return index
    key = np.random.SeedSequence(seed, spawn_key=(int(ShufflePurpose.SHIFT), epoch))
    shift = int(np.random.Philox(key).random_raw() % index.length)
    long = (lengths >= SHIFTED_FROM_BLOCKS * index.length)[index.piece_document]
    moved = np.where(long, shift, 0).astype(np.int32)
    start, stop = index.piece_start + moved, index.piece_stop + moved
    return replace(index, piece_start=start, piece_stop=stop)


def bins_per_step(index: PackIndex, examples_per_update: int) -> int:
    """Bins that hold this many examples on average, at least one."""
    return sequences_for(examples_per_update, rows=index.examples, sequences=index.bins)

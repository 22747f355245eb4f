"""Bins of documents as the arrays that a model reads, always of the same shape.

Labels are shifted here: the label of a place is the token that follows it in the same document,
if that token is learnt. Nobody downstream shifts them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from expert.data.pack_index import PackIndex

IGNORED = -100
"""The label of a place from which nothing is learnt."""

Bins = Sequence[int] | NDArray[np.integer[Any]]


class Documents(Protocol):
    """Tokens of documents and which of them are learnt."""

    def tokens(self, document: int) -> NDArray[np.int32]:
        """The tokens of a document, without copying them."""
        ...

    def spans(self, document: int) -> NDArray[np.int32]:
        """Pairs of start and stop: the learnt tokens, in order and apart from each other."""
        ...


class FlatDocuments:
    """Documents that lie end to end in flat arrays, in memory or mapped from a file."""

    def __init__(
        self,
        tokens: NDArray[np.int32],
        token_offsets: NDArray[np.integer[Any]],
        spans: NDArray[np.int32],
        span_offsets: NDArray[np.integer[Any]],
    ) -> None:
        self._tokens = tokens
        self._token_offsets = token_offsets
        self._spans = spans
        self._span_offsets = span_offsets

    @classmethod
    def gather(
        cls, tokens: Sequence[Sequence[int]], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> FlatDocuments:
        """Documents from lists: the tokens and the learnt spans of each."""
        return cls(
            np.asarray([token for document in tokens for token in document], dtype=np.int32),
            np.cumsum([0, *map(len, tokens)]),
            np.asarray([span for some in spans for span in some], np.int32).reshape(-1, 2),
            np.cumsum([0, *map(len, spans)]),
        )

    def tokens(self, document: int) -> NDArray[np.int32]:
        offsets = self._token_offsets
        return self._tokens[offsets[document] : offsets[document + 1]]

    def spans(self, document: int) -> NDArray[np.int32]:
        offsets = self._span_offsets
        return self._spans[offsets[document] : offsets[document + 1]]

    @property
    def lengths(self) -> NDArray[np.integer[Any]]:
        """Tokens of every document."""
        return np.diff(self._token_offsets)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The one shape of every batch of a run."""

    rows: int
    length: int
    """Places in a row, and so the longest that a document can be."""
    max_documents: int
    """Documents there are boundaries for, the padding at the end of a row counted as one."""

    @property
    def places(self) -> int:
        return self.rows * self.length

    @classmethod
    def for_index(cls, index: PackIndex, rows: int, *, multiple: int = 8) -> BatchShape:
        """As few boundaries as hold the fullest `rows` bins, each with padding."""
        most = int(np.sort(np.diff(index.bin_offsets))[-rows:].sum()) + rows
        return cls(rows, index.length, -(-most // multiple) * multiple)


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """What a batch holds; the counts of an update are the sum over its batches."""

    targets: int = 0
    """Places with a label: what the loss is divided by."""
    real_tokens: int = 0
    """Tokens of documents: no padding, no soft prompt."""
    examples: int = 0

    def __add__(self, other: BatchCounts) -> BatchCounts:
        return BatchCounts(
            self.targets + other.targets,
            self.real_tokens + other.real_tokens,
            self.examples + other.examples,
        )


@dataclass(frozen=True, eq=False, slots=True)
class BatchArrays:
    """One packed batch, its rows end to end; filled over and over, so it can be pinned memory."""

    shape: BatchShape
    tokens: NDArray[np.int32]
    labels: NDArray[np.int32]
    positions: NDArray[np.int32]
    """Counted from 0 in each document, soft prompt included."""
    boundaries: NDArray[np.int32]
    """Where each document begins, then the number of places up to a constant length."""
    soft_mask: NDArray[np.bool_]
    """Places of the soft prompt."""

    @classmethod
    def allocate(cls, shape: BatchShape) -> BatchArrays:
        """Arrays in ordinary memory."""
        return cls(
            shape,
            tokens=np.empty(shape.places, np.int32),
            labels=np.empty(shape.places, np.int32),
            positions=np.empty(shape.places, np.int32),
            boundaries=np.empty(shape.max_documents + 1, np.int32),
            soft_mask=np.empty(shape.places, np.bool_),
        )


def fill_batch(
    out: BatchArrays, index: PackIndex, bins: Bins, store: Documents, *, pad_id: int
) -> BatchCounts:
    """Fill every array with the documents of `bins`, a bin to a row; rows left over are padding.

    Padding at the end of a row is a document of its own without labels, so no document ever sees
    another one, and none is longer than a row.
    """
    shape = out.shape
    if len(bins) > shape.rows or index.length > shape.length:
        what = f"{len(bins)} bins of {index.length} places"
        raise ValueError(f"{what} do not go into {shape.rows} rows of {shape.length}")
    out.tokens.fill(pad_id)
    out.labels.fill(IGNORED)
    out.soft_mask.fill(False)
    edges, counts = [0], BatchCounts()
    for row in range(shape.rows):
        if row < len(bins):
            counts += _fill_row(out, row * shape.length, index, int(bins[row]), store, edges)
        if edges[-1] < (row + 1) * shape.length:
            edges.append((row + 1) * shape.length)
    if len(edges) > len(out.boundaries):
        what = f"{len(edges) - 1} documents in a batch"
        raise ValueError(f"{what} that has boundaries for {shape.max_documents}")
    out.boundaries.fill(shape.places)
    out.boundaries[: len(edges)] = edges
    _count_positions(out.positions, edges)
    return counts


class _Places(Protocol):
    """The flat arrays that a document is written to."""

    @property
    def tokens(self) -> NDArray[np.int32]: ...
    @property
    def labels(self) -> NDArray[np.int32]: ...
    @property
    def soft_mask(self) -> NDArray[np.bool_]: ...


def _fill_row(
    out: _Places, at: int, index: PackIndex, number: int, store: Documents, edges: list[int]
) -> BatchCounts:
    """Write the documents of a bin from place `at` on, and add to `edges` where each ends."""
    soft = index.soft_tokens
    targets = real = examples = 0
    for document, start, stop in index.pieces(number):
        if soft:
            out.soft_mask[at : at + soft] = True
            at += soft
        end = at + stop - start
        tokens = store.tokens(document)
        out.tokens[at:end] = tokens[start:stop]
        shift = at - start - 1  # a learnt token is the label of the place before it
        for first, last in store.spans(document).tolist():
            first, last = max(first, start + 1), min(last, stop)
            if first < last:
                out.labels[first + shift : last + shift] = tokens[first:last]
                targets += last - first
        real += stop - start
        examples += index.examples_in(start, stop)
        at = end
        edges.append(at)
    return BatchCounts(targets, real, examples)


def _count_positions(positions: NDArray[np.int32], edges: list[int]) -> None:
    """Count from 0 between each two edges: rise by one, and fall back where a document begins."""
    positions.fill(1)
    positions[0] = 0
    lengths = [stop - start for start, stop in pairwise(edges)]
    positions[edges[1:-1]] = [1 - length for length in lengths[:-1]]
    np.cumsum(positions, out=positions)


@dataclass(frozen=True, eq=False, slots=True)
class PaddedArrays:
    """Room for one padded batch of up to `rows` rows; filled over and over."""

    rows: int
    length: int
    tokens: NDArray[np.int32]
    labels: NDArray[np.int32]
    positions: NDArray[np.int32]
    attention_mask: NDArray[np.bool_]
    soft_mask: NDArray[np.bool_]

    @classmethod
    def allocate(cls, rows: int, length: int) -> PaddedArrays:
        """Arrays in ordinary memory."""
        places = rows * length
        return cls(
            rows,
            length,
            tokens=np.empty(places, np.int32),
            labels=np.empty(places, np.int32),
            positions=np.empty(places, np.int32),
            attention_mask=np.empty(places, np.bool_),
            soft_mask=np.empty(places, np.bool_),
        )


class PaddedBatch(NamedTuple):
    """A document to a row, padded on the right. Views of the arrays that were filled."""

    tokens: NDArray[np.int32]
    labels: NDArray[np.int32]
    positions: NDArray[np.int32]
    attention_mask: NDArray[np.bool_]
    """True where a row has a token or its soft prompt."""
    soft_mask: NDArray[np.bool_]
    counts: BatchCounts


def fill_padded_batch(
    out: PaddedArrays,
    index: PackIndex,
    bins: Bins,
    store: Documents,
    *,
    pad_id: int,
    to_longest: bool = True,
) -> PaddedBatch:
    """Rows of one document each, padded to the longest of them or else to the full length."""
    offsets = index.bin_offsets
    if len(bins) > out.rows or index.length > out.length:
        what = f"{len(bins)} bins of {index.length} places"
        raise ValueError(f"{what} do not go into {out.rows} rows of {out.length}")
    numbers = np.asarray(bins, dtype=np.int64)
    if np.any(offsets[numbers + 1] - offsets[numbers] != 1):
        raise ValueError("a padded row holds one document; these bins are packed")
    pieces = offsets[numbers]
    sizes = index.piece_stop[pieces] - index.piece_start[pieces] + index.soft_tokens
    width = int(sizes.max(initial=1)) if to_longest else out.length

    def rows(flat: NDArray[Any]) -> NDArray[Any]:
        return flat[: len(numbers) * width].reshape(len(numbers), width)

    rows(out.tokens).fill(pad_id)
    rows(out.labels).fill(IGNORED)
    rows(out.soft_mask).fill(False)
    counts, edges = BatchCounts(), [0]
    for row, number in enumerate(numbers.tolist()):
        counts += _fill_row(out, row * width, index, number, store, edges)
    rows(out.positions)[:] = np.arange(width)
    np.less(rows(out.positions), sizes[:, None], out=rows(out.attention_mask))
    return PaddedBatch(
        rows(out.tokens),
        rows(out.labels),
        rows(out.positions),
        rows(out.attention_mask),
        rows(out.soft_mask),
        counts,
    )

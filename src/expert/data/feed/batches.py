"""Bins of documents as the arrays that a model reads, always of the same shape.

Labels are shifted here: the label of a place is the next token of the same document, if that token
is trained on. They must not be shifted again later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expert.data.feed.branches import BranchArrays, Branches, counted_from
from expert.data.pack.pack_index import PackIndex
from expert.data.tokens.documents import FlatDocuments
from expert.data.tokens.encoder import edges_of

IGNORED = -100
"""The label of places that are not trained on."""
PAD_ID = 0
"""Padding has no label and no document attends to it, so any token works."""

Numbers = NDArray[np.integer[Any]]
Places = NDArray[np.int32]
Bins = Sequence[int] | Numbers


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The shape of all batches of a run."""

    rows: int
    length: int
    """Places in a row, and the longest possible document."""
    max_documents: int
    """Documents there are boundaries for; padding at the end of a row counts as one, and so does
    every branch of a document but the first."""
    branches: int = 0
    """Answers of every document, if documents branch."""
    answers: int = 0
    """Answers of all documents that a batch has room for."""

    @property
    def places(self) -> int:
        return self.rows * self.length

    @classmethod
    def for_index(
        cls, index: PackIndex, rows: int, *, multiple: int = 8, branches: int = 0
    ) -> BatchShape:
        """The fewest boundaries that fit the `rows` fullest bins, each with padding."""
        documents = int(np.sort(np.diff(index.bin_offsets))[-rows:].sum())
        most = -(-(documents * max(1, branches) + rows) // multiple) * multiple
        return cls(rows, index.length, most, branches, documents * branches)


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Contents of a batch; the counts of a step are the sum over its batches."""

    targets: int = 0
    """Places with a label; the loss is divided by this."""
    real_tokens: int = 0
    """Tokens of documents, without padding and soft prompt."""
    examples: int = 0
    answers: int = 0
    """Preferred and rejected answers, if documents branch."""


@dataclass(frozen=True, eq=False, slots=True)
class BatchArrays:
    """One packed batch with its rows end to end; reusable, so it can be in pinned memory."""

    shape: BatchShape
    tokens: NDArray[np.int32]
    labels: NDArray[np.int32]
    positions: NDArray[np.int32]
    """From 0 in each document, including the soft prompt."""
    boundaries: NDArray[np.int32]
    """The start of each document; the rest is filled with the number of places."""
    soft_mask: NDArray[np.bool_]
    """Places of the soft prompt."""
    target_places: NDArray[np.int32]
    """Places with a label, in order; the rest is the last place, which never has one."""
    branches: BranchArrays | None = None
    """If documents branch into several answers."""

    @classmethod
    def allocate(cls, shape: BatchShape) -> BatchArrays:
        boundaries = np.empty(shape.max_documents + 1, np.int32)
        soft_mask = np.empty(shape.places, np.bool_)
        names = ("tokens", "labels", "positions", "target_places")
        flat = {name: np.empty(shape.places, np.int32) for name in names}
        return cls(shape, boundaries=boundaries, soft_mask=soft_mask, branches=None, **flat)

    def shaped(self, rows: int, length: int) -> BatchArrays:
        """The beginning of the same memory with this number of rows and length."""
        shape = replace(self.shape, rows=rows, length=length)
        flat = {
            name: getattr(self, name)[: shape.places]
            for name in ("tokens", "labels", "positions", "soft_mask", "target_places")
        }
        branches = self.branches and self.branches.shaped(shape.places)
        return BatchArrays(shape, boundaries=self.boundaries, branches=branches, **flat)

    def clear_labels(self) -> None:
        """Remove all labels, so that the batch does not affect training."""
        self.labels.fill(IGNORED)
        self.target_places.fill(self.shape.places - 1)
        if self.branches is not None:
            self.branches.clear()


def fill_batch(
    out: BatchArrays,
    index: PackIndex,
    bins: Bins,
    store: FlatDocuments,
    *,
    flat: bool = False,
) -> BatchCounts:
    """Fill the arrays with the documents of `bins`, one bin per row; unused rows are padding.
    `flat`: all bins end to end in one row.

    Padding at the end of a row is a document of its own without labels, so that no document attends
    to another; flat, it is several if it is longer than a sequence.
    """
    shape = out.shape
    numbers = np.asarray(bins, dtype=np.int64)
    if flat:
        too_long = int(index.lengths_of(numbers).sum()) > shape.length
    else:
        too_long = len(bins) > shape.rows
    if not flat and index.length > shape.length:
        too_long |= int(index.lengths_of(numbers).max(initial=0)) > shape.length
    if too_long:
        what = f"{len(bins)} bins of {index.length} places"
        raise ValueError(f"{what} do not fit into {shape.rows} rows of {shape.length}")
    row_starts = np.arange(shape.rows + 1) * shape.length
    out.tokens.fill(PAD_ID)
    ends, counts, branches = _fill_rows(out, index, numbers, store, flat=flat)
    padding = ends[:0]
    if flat:
        # At most as long as a document: a kernel computes no more, and leaves the rest undefined.
        padding = np.arange(int(ends[-1]) if len(ends) else 0, shape.places, index.length)
    later, shared = branches.later() if branches is not None else (ends[:0], ends[:0])
    edges = np.unique(np.concatenate((row_starts, ends, padding, later)))
    if len(edges) > len(out.boundaries):
        what = f"{len(edges) - 1} documents in a batch"
        raise ValueError(f"{what} that has boundaries for {shape.max_documents}")
    out.boundaries.fill(shape.places)
    out.boundaries[: len(edges)] = edges
    # Positions count from 0 between edges; a later branch continues those that its document shares.
    first = np.zeros(len(edges) - 1, np.int64)
    first[np.searchsorted(edges, later)] = shared
    out.positions[:] = np.arange(shape.places) - np.repeat(edges[:-1] - first, np.diff(edges))
    if branches is not None and out.branches is not None:
        branches.fill(out.branches, edges)
    return counts


def _fill_rows(
    out: BatchArrays,
    index: PackIndex,
    numbers: NDArray[np.int64],
    store: FlatDocuments,
    *,
    flat: bool = False,
) -> tuple[Numbers, BatchCounts, Branches | None]:
    """Write the documents of each bin into its row, or all of them end to end: everything except
    padding and positions. Returns where each document ends, the counts, and its branches."""
    soft, places = index.soft_tokens, out.shape.places
    row_starts = np.arange(len(numbers)) * out.shape.length
    in_bin = index.bin_offsets[numbers + 1] - index.bin_offsets[numbers]
    pieces = counted_from(index.bin_offsets[numbers], in_bin)
    documents, starts, stops = (
        column[pieces] for column in (index.piece_document, index.piece_start, index.piece_stop)
    )
    ends = edges_of(stops - starts + soft)
    before_row = ends[np.cumsum(in_bin) - in_bin]
    shifts = np.repeat((before_row if flat else row_starts) - before_row, in_bin)
    begins = ends[:-1] + shifts + soft
    spans, many = store.gather(documents, starts, stops, out=out.tokens, places=begins)
    # A token to train on is the label of the place before it, if that is in the same piece.
    first = np.maximum(spans[:, 0], np.repeat(starts + 1, many))
    trained = np.maximum(np.minimum(spans[:, 1], np.repeat(stops, many)) - first, 0)
    targets = counted_from(first + np.repeat(begins - starts - 1, many), trained)
    out.target_places[: len(targets)] = targets
    out.target_places[len(targets) : places] = places - 1
    out.labels[:places] = IGNORED
    out.labels[targets] = out.tokens[targets + 1]
    out.soft_mask[:places] = False
    if soft:
        out.soft_mask[counted_from(begins - soft, np.full(len(begins), soft))] = True
    limits: Any = (starts, stops)  # examples_in works for arrays as well as numbers
    examples = int(np.sum(index.examples_in(*limits)))
    real = int(ends[-1]) - soft * len(pieces)
    branches = None
    if out.branches is not None:
        # Two spans for each branch: an empty one where it begins, and its answer.
        pairs = spans.reshape(len(documents), out.branches.count, 2, 2)
        begin = pairs[:, :, 0, 0].astype(np.int64)
        sizes = np.diff(begin, axis=1, append=(stops - starts)[:, None])
        trained = trained.reshape(len(documents), out.branches.count, 2)[:, :, 1]
        known = store.reference
        reference = None if known is None else known[documents]
        branches = Branches(begins, begin, sizes, trained, reference)
    answers = 0 if branches is None else int((branches.trained[:, :2] > 0).sum())
    return ends[1:] + shifts, BatchCounts(len(targets), real, examples, answers), branches


def padded_batch(
    index: PackIndex, bins: Bins, store: FlatDocuments
) -> tuple[BatchArrays, BatchCounts]:
    """One document per row, padded on the right to the longest; its boundaries are not filled."""
    numbers = np.asarray(bins, dtype=np.int64)
    pieces = index.bin_offsets[numbers]
    if np.any(index.bin_offsets[numbers + 1] - pieces != 1):
        raise ValueError("a padded row holds one document; these bins are packed")
    sizes = index.piece_stop[pieces] - index.piece_start[pieces] + index.soft_tokens
    shape = BatchShape(len(numbers), int(sizes.max(initial=1)), len(numbers))
    out = BatchArrays.allocate(shape)
    out.tokens.fill(PAD_ID)
    out.positions[:] = np.tile(np.arange(shape.length, dtype=np.int32), shape.rows)
    _, counts, _ = _fill_rows(out, index, numbers, store)
    return out, counts

"""Batches equal what one document at a time gives, and keep one shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from expert.data.feed.batches import (
    PAD_ID,
    BatchArrays,
    BatchCounts,
    BatchShape,
    fill_batch,
    padded_batch,
)
from expert.data.pack.pack import Overlong, pack_best_fit, pack_concat, pack_none
from expert.data.pack.pack_index import PackIndex
from expert.data.tokens.documents import FlatDocuments
from tests.data.shards import shard_of

ARRAYS = ("tokens", "labels", "positions", "soft_mask", "target_places", "boundaries")
Document = tuple[list[int], list[tuple[int, int]]]


@st.composite
def documents(draw: st.DrawFn) -> Document:
    """Tokens, and spans of them that are trained on: in order, apart, some touching."""
    tokens = draw(st.lists(st.integers(0, 500), max_size=45))
    marks = sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=6)))
    pairs = zip(marks[::2], marks[1::2], strict=False)
    return tokens, [(start, stop) for start, stop in pairs if start < stop]


@dataclass
class Reference:
    """A batch as plain lists, built one document and one token at a time."""

    tokens: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    soft: list[bool] = field(default_factory=list)
    target_places: list[int] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=lambda: [0])
    targets: int = 0
    real: int = 0

    def add_document(self, document: Document, start: int, stop: int, soft: int) -> None:
        tokens, spans = document
        learnt = [any(a <= i < b for a, b in spans) for i in range(len(tokens))]
        for place in range(soft):
            self._add(PAD_ID, -100, place, soft=True)
        for i in range(start, stop):
            follows = i + 1 < stop and learnt[i + 1]
            self._add(tokens[i], tokens[i + 1] if follows else -100, soft + i - start)
            self.targets += follows
            self.real += 1
        self.boundaries.append(len(self.tokens))

    def pad_to(self, places: int) -> None:
        for place in range(places - len(self.tokens)):
            self._add(PAD_ID, -100, place)
        if self.boundaries[-1] < places:
            self.boundaries.append(places)

    def _add(self, token: int, label: int, position: int, *, soft: bool = False) -> None:
        if label != -100:
            self.target_places.append(len(self.tokens))
        self.tokens.append(token)
        self.labels.append(label)
        self.positions.append(position)
        self.soft.append(soft)


def pack(rule: str, store: FlatDocuments, length: int, policy: Overlong, soft: int) -> PackIndex:
    if rule == "none":
        return pack_none(store.lengths, length, overlong=policy, soft_tokens=soft)
    if rule == "concat":
        return pack_concat(store.lengths, length, 5, soft_tokens=soft)
    return pack_best_fit(store.lengths, length, 5, overlong=policy, soft_tokens=soft)


def gather(documents: list[Document], *cuts: int) -> FlatDocuments:
    """Documents in shards that are cut at these places; some are empty."""
    edges = [0, *sorted(min(cut, len(documents)) for cut in cuts), len(documents)]
    shards = [documents[start:stop] for start, stop in pairwise(edges)]
    return FlatDocuments(
        [shard_of([tokens for tokens, _ in some], [spans for _, spans in some]) for some in shards]
    )


settings_of_a_batch = given(
    some=st.lists(documents(), min_size=1, max_size=25),
    rule=st.sampled_from(["best-fit", "concat", "none"]),
    policy=st.sampled_from(["cut", "split", "drop"]),
    length=st.integers(4, 40),
    rows=st.integers(1, 4),
    soft=st.integers(0, 3),
    cut=st.integers(0, 25),
)


def assert_equal(out: BatchArrays, counts: BatchCounts, expected: Reference) -> None:
    """Whatever an earlier batch left in the arrays is gone."""
    places = out.shape.places
    expected.pad_to(places)
    assert out.tokens.tolist() == expected.tokens
    assert out.labels.tolist() == expected.labels
    assert out.positions.tolist() == expected.positions
    assert out.soft_mask.tolist() == expected.soft
    filler = [places] * (len(out.boundaries) - len(expected.boundaries))
    assert out.boundaries.tolist() == expected.boundaries + filler
    assert (counts.targets, counts.real_tokens) == (expected.targets, expected.real)
    no_targets = [places - 1] * (places - counts.targets)
    assert out.target_places.tolist() == expected.target_places + no_targets


@settings_of_a_batch
def test_packed_batches_equal_one_document_at_a_time(some, rule, policy, length, rows, soft, cut):
    """A bin to a row, and all of them end to end in one."""
    store = gather(some, cut, cut // 2)
    index = pack(rule, store, length, policy, soft)
    out = BatchArrays.allocate(BatchShape.for_index(index, rows))
    for name in ARRAYS:  # full of what an earlier batch left
        getattr(out, name).fill(1)
    real_tokens = examples = 0
    for begin in range(0, index.bins, rows):
        bins = np.arange(begin, min(begin + rows, index.bins))
        counts = fill_batch(out, index, bins, store)
        in_rows, flat = Reference(), Reference()
        for row, number in enumerate(bins):
            for document, start, stop in index.pieces(number):
                in_rows.add_document(some[document], start, stop, soft)
                flat.add_document(some[document], start, stop, soft)
            in_rows.pad_to((row + 1) * length)
        for row in range(len(bins), rows):
            in_rows.pad_to((row + 1) * length)
        assert_equal(out, counts, in_rows)
        real_tokens, examples = real_tokens + counts.real_tokens, examples + counts.examples
        used = int(index.lengths_of(bins).sum())
        laid = out.shaped(1, min(used + cut % 4 * length, rows * length))
        counts = fill_batch(laid, index, bins, store, flat=True)
        for end in range(used + length, laid.shape.places, length):
            flat.pad_to(end)  # no document of padding is longer than a sequence
        assert_equal(laid, counts, flat)
    kept = sum(len(tokens) for tokens, _ in some) - index.overlong.tokens_lost
    assert (real_tokens, examples) == (kept, index.examples)


@settings_of_a_batch
def test_padded_batches_equal_one_document_at_a_time(some, rule, policy, length, rows, soft, cut):
    store = gather(some, cut, cut // 2)
    index = pack("none", store, length, policy, soft)
    for begin in range(0, index.bins, rows):
        bins = list(range(begin, min(begin + rows, index.bins)))
        batch, counts = padded_batch(index, bins, store)
        rows_of = [next(index.pieces(number)) for number in bins]
        longest = max(stop - start + soft for _, start, stop in rows_of)
        assert (batch.shape.rows, batch.shape.length) == (len(bins), longest)
        targets: list[int] = []
        for row, (document, start, stop) in enumerate(rows_of):
            expected = Reference()
            expected.add_document(some[document], start, stop, soft)
            end = len(expected.tokens)
            expected.pad_to(longest)
            here = slice(row * longest, (row + 1) * longest)
            assert batch.tokens[here].tolist() == expected.tokens
            assert batch.labels[here].tolist() == expected.labels
            assert batch.positions[here][:end].tolist() == expected.positions[:end]
            assert batch.soft_mask[here].tolist() == expected.soft
            targets += [row * longest + at for at in expected.target_places]
        assert counts.targets == len(targets)
        no_targets = [batch.tokens.size - 1] * (batch.tokens.size - len(targets))
        assert batch.target_places.tolist() == targets + no_targets


def test_the_shape_has_boundaries_for_the_fullest_bins_and_no_more():
    lengths = np.array([2] * 10 + [9] * 3)
    index = pack_best_fit(lengths, 10, 0)
    assert sorted(np.diff(index.bin_offsets)) == [1, 1, 1, 5, 5]
    assert BatchShape.for_index(index, 2, multiple=1).max_documents == 12
    assert BatchShape.for_index(index, 3, multiple=1).max_documents == 14
    assert BatchShape.for_index(index, 3, multiple=8).max_documents == 16
    assert BatchShape.for_index(index, 100, multiple=1).max_documents == 113

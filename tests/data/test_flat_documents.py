"""Documents in shards: the same as one after the other, and nothing of their size is copied."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from expert.data.tokens.documents import FlatDocuments
from tests.data.shards import shard_of

document = st.lists(st.integers(0, 99), max_size=8).flatmap(
    lambda tokens: st.tuples(
        st.just(tokens), st.just([(0, len(tokens))]) if tokens else st.just([])
    )
)
shards = st.lists(st.lists(document, max_size=5), max_size=4)


def flat(some: list[Any]) -> FlatDocuments:
    return FlatDocuments([shard_of([t for t, _ in s], [p for _, p in s]) for s in some])


@given(some=shards)
def test_documents_are_numbered_through_all_shards(some):
    store = flat(some)
    documents = [one for shard in some for one in shard]
    assert len(store) == len(documents)
    assert store.lengths.tolist() == [len(tokens) for tokens, _ in documents]
    for number, (tokens, spans) in enumerate(documents):
        assert store.tokens(number).tolist() == tokens
        assert [tuple(pair) for pair in store.spans(number).tolist()] == spans


def test_tokens_and_spans_of_a_store_are_views():
    shard = shard_of([[0, 1], [2, 3, 4, 5]], [[], [(0, 4)]])
    store = FlatDocuments([shard_of([[9]], [[]]), shard])
    assert np.shares_memory(store.tokens(2), shard.tokens)
    assert np.shares_memory(store.spans(2), shard.spans)
    assert (store.tokens(2).tolist(), store.spans(2).tolist()) == ([2, 3, 4, 5], [[0, 4]])
    assert store.spans(1).tolist() == []


def _with_spans(tokens: list[int], marks: list[bool]) -> tuple[list[int], list[tuple[int, int]]]:
    """A document, and the runs of its tokens that are marked as learnt."""
    spans: list[tuple[int, int]] = []
    for place, mark in enumerate(marks[: len(tokens)]):
        if mark and spans and spans[-1][1] == place:
            spans[-1] = (spans[-1][0], place + 1)
        elif mark:
            spans.append((place, place + 1))
    return tokens, spans


partly_learnt = st.builds(
    _with_spans, st.lists(st.just(7), max_size=8), st.lists(st.booleans(), min_size=8)
)


@given(some=st.lists(st.lists(partly_learnt, max_size=5), max_size=4), data=st.data())
def test_a_stretch_has_targets_where_a_learnt_token_is_not_its_first(some, data):
    store = flat(some)
    documents = [one for shard in some for one in shard]
    if not documents:
        return
    asked = data.draw(st.lists(st.integers(0, len(documents) - 1), max_size=6))
    starts = [data.draw(st.integers(0, len(documents[one][0]))) for one in asked]
    stops = [
        data.draw(st.integers(start, len(documents[one][0])))
        for one, start in zip(asked, starts, strict=True)
    ]
    plain = [
        any(start < place < stop for a, b in documents[one][1] for place in range(a, b))
        for one, start, stop in zip(asked, starts, stops, strict=True)
    ]
    columns = [np.array(column, np.int64) for column in (asked, starts, stops)]
    assert store.have_targets(*columns).tolist() == plain
    assert store.without_spans(columns[0]).tolist() == [not documents[one][1] for one in asked]

"""Prepared documents are mapped: what is opened is what was written, and nothing is copied."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from expert.data.tokens.documents import DocumentStore, dataset_files, write_shard
from expert.data.tokens.encoder import EncodedBatch
from tests.data.test_batches import documents, gather


def encoded(tokens: list[list[int]], spans: list[list[int]]) -> EncodedBatch:
    counts = [[len(some) for some in part] for part in (tokens, spans)]
    flat = [list(chain.from_iterable(part)) for part in (tokens, spans)]
    parts = (flat[0], counts[0], flat[1], counts[1])
    return EncodedBatch(*(np.array(part, np.int32) for part in parts))


def written(folder: Path) -> Path:
    """Two shards of documents and an empty one between them."""
    batches = [
        (encoded([[1, 2, 3], []], [[1, 3], []]), [0, 2]),
        (encoded([], []), []),
        (encoded([[4, 5]], [[0, 1, 1, 2]]), [7]),
    ]
    names = [f"data-{number:05d}.arrow" for number in range(len(batches))]
    for name, (batch, rows) in zip(names, batches, strict=True):
        write_shard(folder / name, batch, np.array(rows, np.int32))
    state = dataset_files(names, "0" * 16)["state.json"]
    (folder / "state.json").write_text(state, encoding="utf-8")
    return folder


def test_documents_of_all_folders_and_shards_are_counted_through(tmp_path):
    folder = written(tmp_path)
    store = DocumentStore(folder, folder)
    assert len(store) == 6
    assert store.lengths.tolist() == [3, 0, 2] * 2
    assert [store.tokens(number).tolist() for number in range(3, 6)] == [[1, 2, 3], [], [4, 5]]
    assert store.spans(5).tolist() == [[0, 1], [1, 2]]
    assert [store.row(number) for number in range(6)] == [0, 2, 7] * 2
    assert not store.tokens(0).flags.owndata, "they lie in the mapped file"
    assert not store.spans(5).flags.owndata
    assert not store.tokens(0).flags.writeable


# --- in shards -----------------------------------------------------------------------------------


@given(some=st.lists(documents(), min_size=1, max_size=12), data=st.data())
def test_a_range_has_targets_if_a_trained_token_is_not_its_first(some, data):
    cuts = data.draw(st.lists(st.integers(0, 12), max_size=3))
    store = gather(some, *cuts)
    asked = data.draw(st.lists(st.integers(0, len(some) - 1), max_size=6))
    starts = [data.draw(st.integers(0, len(some[one][0]))) for one in asked]
    stops = [
        data.draw(st.integers(start, len(some[one][0])))
        for one, start in zip(asked, starts, strict=True)
    ]
    plain = [
        any(start < place < stop for a, b in some[one][1] for place in range(a, b))
        for one, start, stop in zip(asked, starts, stops, strict=True)
    ]
    columns = [np.array(column, np.int64) for column in (asked, starts, stops)]
    assert store.have_targets(*columns).tolist() == plain
    assert store.without_spans(columns[0]).tolist() == [not some[one][1] for one in asked]

"""Prepared documents are mapped: what is opened is what was written, and nothing is copied."""

from __future__ import annotations

import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from expert.data.tokens.documents import DocumentStore, numbers_in, write_dataset_files, write_shard
from expert.data.tokens.encoder import EncodedBatch


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
    write_dataset_files(folder, names, "0" * 16)
    return folder


def test_documents_of_all_folders_and_shards_are_counted_through(tmp_path):
    folder = written(tmp_path)
    store = DocumentStore(folder, folder)
    assert len(store) == 6
    assert store.lengths.tolist() == [3, 0, 2] * 2
    assert [store.tokens(number).tolist() for number in range(3, 6)] == [[1, 2, 3], [], [4, 5]]
    assert store.spans(5).tolist() == [[0, 1], [1, 2]]
    assert [store.row(number) for number in range(6)] == [0, 2, 7] * 2


def test_tokens_lie_in_the_mapped_file(tmp_path):
    tokens = DocumentStore(written(tmp_path)).tokens(0)
    assert not tokens.flags.owndata
    assert not tokens.flags.writeable


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64()])
def test_numbers_of_an_arrow_array_are_seen_through_its_offset(kind):
    column = pa.array([1, 2, 3, 4], kind)
    assert numbers_in(column[1:3]).tolist() == [2, 3]
    assert numbers_in(column).dtype == str(kind)
    assert numbers_in(column[4:]).tolist() == []


def test_opening_documents_does_not_import_pandas(tmp_path):
    pytest.importorskip("pandas")
    code = (
        "import sys; from pathlib import Path\n"
        "from expert.data.tokens.documents import DocumentStore\n"
        f"DocumentStore(Path({str(written(tmp_path))!r}))\n"
        "sys.exit('pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Prepared documents on disk: Arrow stream files that `datasets` opens and that we memory-map."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from expert.data.tokens.encoder import EncodedBatch
from expert.data.tokens.flat_documents import FlatDocuments, Ids, Shard

SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("answer_spans", pa.list_(pa.int32())),
        ("row", pa.int32()),
    ]
)


def write_shard(path: Path, batch: EncodedBatch, rows: Ids) -> None:
    """One shard as an Arrow stream file; the caller renames it when it is whole."""
    columns = [
        _lists(batch.ids, batch.lengths),
        _lists(batch.spans, batch.span_counts),
        pa.array(rows, pa.int32()),
    ]
    record = pa.record_batch(columns, schema=SCHEMA)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(record)


def _lists(values: Ids, lengths: Ids) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def write_dataset_files(folder: Path, shards: Sequence[str], fingerprint: str) -> None:
    """What `datasets.load_from_disk` wants to find beside the shards."""
    for name, text in dataset_files(shards, fingerprint).items():
        (folder / name).write_text(text, encoding="utf-8")


def dataset_files(shards: Sequence[str], fingerprint: str) -> dict[str, str]:
    """The same as texts, by the names of the files."""
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in shards],
        "_fingerprint": fingerprint[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    info: dict[str, Any] = {"citation": "", "description": "", "homepage": "", "license": ""}
    described = {"state.json": state, "dataset_info.json": info}
    return {name: json.dumps(value, indent=2) for name, value in described.items()}


class DocumentStore(FlatDocuments):
    """Documents of prepared folders, one after the other, memory-mapped: no token is read yet."""

    def __init__(self, *folders: Path) -> None:
        opened = [
            shard
            for folder in folders
            for entry in json.loads((folder / "state.json").read_text(encoding="utf-8"))[
                "_data_files"
            ]
            for shard in _open(folder / entry["filename"])
        ]
        super().__init__([shard for shard, _ in opened])
        self._rows = [rows for _, rows in opened]

    def row(self, document: int) -> int:
        """Number of the source row the document was made from, from 0."""
        shard = self._shard(document)
        return int(self._rows[shard][document - self._first[shard]])


def _open(path: Path) -> Iterator[tuple[Shard, Ids]]:
    """The documents of a file, mapped, and the numbers of their rows."""
    for batch in pa.ipc.open_stream(pa.memory_map(str(path))):
        ids, spans, rows = batch.columns
        lists = (ids.values, ids.offsets, spans.values, spans.offsets)
        yield Shard(*map(numbers_in, lists)), numbers_in(rows)


def numbers_in(column: Any) -> npt.NDArray[Any]:
    """The numbers of an Arrow array without nulls, as a view of its memory.

    Arrow's own to_numpy imports pandas where it is installed: 0.3 s, and 37 MB that stay.
    """
    if not len(column):
        return np.zeros(0, str(column.type))
    kind = np.dtype(str(column.type))
    return np.frombuffer(column.buffers()[1], kind, len(column), column.offset * kind.itemsize)

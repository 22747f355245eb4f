"""Prepared documents on disk: Arrow stream files that `datasets` opens and that we memory-map."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from expert.data.encoder import EncodedBatch

Ids = npt.NDArray[np.int32]
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
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in shards],
        "_fingerprint": fingerprint[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
    info: dict[str, Any] = {"citation": "", "description": "", "homepage": "", "license": ""}
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2), encoding="utf-8")


class DocumentStore:
    """Documents of prepared folders, one after the other, memory-mapped: no token is read yet."""

    def __init__(self, *folders: Path) -> None:
        self._maps: list[Any] = []
        self._ids: list[Ids] = []
        self._offsets: list[Ids] = []
        self._spans: list[Ids] = []
        self._span_offsets: list[Ids] = []
        self._rows: list[Ids] = []
        for folder in folders:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            for entry in state["_data_files"]:
                self._open(folder / entry["filename"])
        counts = [len(offsets) - 1 for offsets in self._offsets]
        self._first = [0, *accumulate(counts)]
        self.lengths: Ids = (
            np.concatenate([np.diff(offsets) for offsets in self._offsets])
            if self._offsets
            else np.zeros(0, np.int32)
        )

    def _open(self, path: Path) -> None:
        source = pa.memory_map(str(path))
        self._maps.append(source)
        for batch in pa.ipc.open_stream(source):
            ids, spans, rows = batch.columns
            self._ids.append(ids.values.to_numpy(zero_copy_only=True))
            self._offsets.append(ids.offsets.to_numpy(zero_copy_only=True))
            self._spans.append(spans.values.to_numpy(zero_copy_only=True))
            self._span_offsets.append(spans.offsets.to_numpy(zero_copy_only=True))
            self._rows.append(rows.to_numpy(zero_copy_only=True))

    def __len__(self) -> int:
        return self._first[-1]

    def _place(self, document: int) -> tuple[int, int]:
        # bisect on a list takes a tenth of numpy's searchsorted for one number.
        shard = bisect_right(self._first, document) - 1
        return shard, document - self._first[shard]

    def tokens(self, document: int) -> Ids:
        """The ids of a document, as a view of the mapped file."""
        shard, index = self._place(document)
        offsets = self._offsets[shard]
        return self._ids[shard][offsets[index] : offsets[index + 1]]

    def spans(self, document: int) -> Ids:
        """(start, stop) of each learnt stretch, shape [n, 2]."""
        shard, index = self._place(document)
        offsets = self._span_offsets[shard]
        return self._spans[shard][offsets[index] : offsets[index + 1]].reshape(-1, 2)

    def row(self, document: int) -> int:
        """Number of the source row the document was made from, from 0."""
        shard, index = self._place(document)
        return int(self._rows[shard][index])

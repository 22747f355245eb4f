"""Documents in flat arrays; prepared ones in memory-mapped Arrow files that `datasets` can open."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from expert.core.files import read_json
from expert.data.tokens.encoder import EncodedBatch, edges_of

Ids = NDArray[np.int32]
Numbers = NDArray[np.integer[Any]]


class Shard(NamedTuple):
    """Documents in flat arrays, in memory or memory-mapped."""

    tokens: Ids
    offsets: Numbers
    """Where each document begins in `tokens`, and the end of the last one."""
    spans: Ids
    """Start and stop of each range that is trained on, relative to the document."""
    span_offsets: Numbers
    """Where each document begins in `spans`, and the end of the last one."""


def shard_of(batch: EncodedBatch) -> Shard:
    """Documents as encoded by the tokenizer."""
    return Shard(batch.ids, edges_of(batch.lengths), batch.spans, edges_of(batch.span_counts))


class FlatDocuments:
    """Several shards as one list of documents. Offsets are copied, 12 bytes per document including
    lengths, so that many documents can be looked up together; tokens and spans are not."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._tokens = [shard.tokens for shard in shards]
        self._spans = [shard.spans for shard in shards]
        self._first = [0, *accumulate(len(shard.offsets) - 1 for shard in shards)]
        self._starts = np.array(self._first[1:-1], np.int64)
        # A shard has one more offset than documents: document d of shard s is at d + s.
        self._offsets = _joined([shard.offsets for shard in shards])
        self._span_offsets = _joined([shard.span_offsets for shard in shards])
        self.lengths: Numbers = _joined([np.diff(shard.offsets) for shard in shards])
        self.reference: NDArray[np.float32] | None = None
        """Log-probabilities of the answers of each document under the starting weights."""

    def __len__(self) -> int:
        return self._first[-1]

    def shards(self) -> Iterator[Shard]:
        """The documents shard by shard, as views."""
        for number, (tokens, spans) in enumerate(zip(self._tokens, self._spans, strict=True)):
            here = slice(self._first[number] + number, self._first[number + 1] + number + 1)
            yield Shard(tokens, self._offsets[here], spans, self._span_offsets[here])

    def tokens(self, document: int) -> Ids:
        """The ids of a document, as a view."""
        shard = self._shard(document)
        at = document + shard
        return self._tokens[shard][self._offsets[at] : self._offsets[at + 1]]

    def spans(self, document: int) -> Ids:
        """(start, stop) of each range that is trained on, shape [n, 2]."""
        shard = self._shard(document)
        at = document + shard
        return self._spans[shard][self._span_offsets[at] : self._span_offsets[at + 1]].reshape(
            -1, 2
        )

    def without_spans(self, documents: Numbers) -> NDArray[np.bool_]:
        """Which of the documents have nothing to train on, whatever their length."""
        at = documents + np.searchsorted(self._starts, documents, side="right")
        empty: NDArray[np.bool_] = self._span_offsets[at] == self._span_offsets[at + 1]
        return empty

    def have_targets(
        self, documents: Numbers, starts: Numbers, stops: Numbers
    ) -> NDArray[np.bool_]:
        """Whether each document has a label between `starts` and `stops`: a token to train on that
        is not the first of that range."""
        has_target = np.zeros(len(documents), np.bool_)
        shards = np.searchsorted(self._starts, documents, side="right")
        for number, shard in enumerate(self.shards()):
            here = np.flatnonzero(shards == number)
            if not len(here) or not len(shard.spans):
                continue
            spans = shard.spans.reshape(-1, 2)
            # Counted from the shard's first token, spans are ascending over all documents.
            of_owner = np.repeat(shard.offsets[:-1], np.diff(shard.span_offsets) // 2)
            firsts, ends = spans[:, 0] + of_owner, spans[:, 1] + of_owner
            begins = shard.offsets[documents[here] - self._first[number]]
            second = begins + starts[here] + 1
            at = np.searchsorted(ends, second, side="right")
            there = np.append(firsts, np.iinfo(np.int64).max)[at]
            has_target[here] = np.maximum(there, second) < begins + stops[here]
        return has_target

    def gather(
        self, documents: Numbers, starts: Numbers, stops: Numbers, *, out: Ids, places: Numbers
    ) -> tuple[Ids, Numbers]:
        """Copy tokens `starts` to `stops` of each document to its place in `out`; returns all spans
        in order, shape [n, 2], and the number of spans of each document.

        Per document, Python only makes two slices: 0.6 us, whatever the number of shards. Reading
        all documents of a shard together is faster only with few shards.
        """
        if not len(documents):
            return np.zeros((0, 2), np.int32), np.zeros(0, np.int64)
        shards = np.searchsorted(self._starts, documents, side="right")
        at = documents + shards
        first = self._offsets[at] + starts
        size = stops - starts
        span_start, span_stop = self._span_offsets[at], self._span_offsets[at + 1]
        columns = (shards, first, first + size, places, places + size, span_start, span_stop)
        gathered = []
        tokens, spans = self._tokens, self._spans
        for shard, a, b, to, end, c, d in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            out[to:end] = tokens[shard][a:b]
            gathered.append(spans[shard][c:d])
        return np.concatenate(gathered).reshape(-1, 2), (span_stop - span_start) // 2

    def _shard(self, document: int) -> int:
        # For one number, bisect on a list takes a tenth of the time of numpy's searchsorted.
        return bisect_right(self._first, document) - 1


def _joined(parts: list[Numbers]) -> Numbers:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


# --- on disk -------------------------------------------------------------------------------------

SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("answer_spans", pa.list_(pa.int32())),
        ("row", pa.int32()),
    ]
)


def write_shard(path: Path, batch: EncodedBatch, rows: Ids) -> None:
    """Write one shard as an Arrow stream file; the caller renames it when it is complete."""
    columns = [
        _lists(batch.ids, batch.lengths),
        _lists(batch.spans, batch.span_counts),
        pa.array(rows, pa.int32()),
    ]
    record = pa.record_batch(columns, schema=SCHEMA)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(record)


def _lists(values: Ids, lengths: Ids) -> pa.Array:
    offsets = edges_of(lengths).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def dataset_files(shards: Sequence[str], fingerprint: str) -> dict[str, str]:
    """The files that `datasets.load_from_disk` expects beside the shards, by name."""
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
    """Documents of prepared folders, memory-mapped; tokens are read only when used."""

    def __init__(self, *folders: Path) -> None:
        opened = [
            shard
            for folder in folders
            for entry in read_json(folder / "state.json")["_data_files"]
            for shard in _open_shards(folder / entry["filename"])
        ]
        super().__init__([shard for shard, _ in opened])
        self._rows = [rows for _, rows in opened]

    def row(self, document: int) -> int:
        """The number of the source row of a document, from 0."""
        shard = self._shard(document)
        return int(self._rows[shard][document - self._first[shard]])


def _open_shards(path: Path) -> Iterator[tuple[Shard, Ids]]:
    """The documents of a file, memory-mapped, and their row numbers."""
    for batch in pa.ipc.open_stream(pa.memory_map(str(path))):
        ids, spans, rows = batch.columns
        lists = (ids.values, ids.offsets, spans.values, spans.offsets)
        yield Shard(*map(numbers_in, lists)), numbers_in(rows)


def numbers_in(column: Any) -> NDArray[Any]:
    """The numbers of an Arrow array without nulls, as a view.

    Arrow's to_numpy imports pandas if it is installed, which takes 0.3 s and 37 MB.
    """
    if not len(column):
        return np.zeros(0, str(column.type))
    kind = np.dtype(str(column.type))
    return np.frombuffer(column.buffers()[1], kind, len(column), column.offset * kind.itemsize)

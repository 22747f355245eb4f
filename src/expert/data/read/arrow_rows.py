"""Rows of Parquet and Arrow files in batches; the line of a row is its number in the file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from expert.data.read.row_text import fault_in
from expert.data.read.streams import (
    MAX_ROW_BYTES,
    bad_row,
    check_columns,
    data_error,
    open_seekable,
    refuse_bomb,
    too_long,
)
from expert.data.records import BadRow, Row
from expert.manifest.schema.message_names import TOOL_COLUMNS

_BATCH_ROWS = 1000
_BATCH_BYTES = 2**25
_REPEATED_BYTES = 2**31
_FILE_MAGIC = b"ARROW1"
_INTERVAL = re.compile(r"\b(month|day_time)_interval\b(?!:)")


def read_parquet(path: Path, max_unpacked: int | None = None) -> Iterator[Row | BadRow]:
    """The rows of a Parquet file; holds a page in memory, not a row group."""
    with (
        open_seekable(path, max_unpacked) as stream,
        arrow_errors(path, "Parquet"),
        pq.ParquetFile(stream, buffer_size=2**20) as file,
    ):
        groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
        size = sum(group.total_byte_size for group in groups)
        refuse_bomb(path, max_unpacked, size, path.stat().st_size)
        for number in range(len(groups)):
            # With damaged column metadata, reading a row raises; accessing the metadata would
            # crash.
            next(file.iter_batches(1, row_groups=[number]), None)
        rows = 0

        def batches() -> Iterator[Any]:
            nonlocal rows
            for batch in file.iter_batches(_rows_at_once(groups)):
                rows += batch.num_rows
                yield batch

        yield from rows_of_batches(_up_to(max_unpacked, batches(), path), str(path))
        # Arrow believes one of the two row counts of a file and ignores the other.
        declared = {file.metadata.num_rows, sum(group.num_rows for group in groups)}
    if declared != {rows}:
        counts = " and ".join(map(str, sorted(declared)))
        what = f"its metadata says {counts} rows, but it has {rows}"
        raise data_error(str(path), what, "the file is damaged; write or download it again")


def _rows_at_once(groups: list[Any]) -> int:
    """Rows per batch: fewer if a dictionary page is so large that a thousand of its values might
    not fit into memory."""
    largest = 1.0
    for group in groups:
        for chunk in (group.column(n) for n in range(group.num_columns)):
            start = chunk.dictionary_page_offset
            if start is not None and chunk.total_compressed_size > 0:
                share = (chunk.data_page_offset - start) / chunk.total_compressed_size
                largest = max(largest, share * chunk.total_uncompressed_size)
    return max(1, min(_BATCH_ROWS, int(_BATCH_BYTES / largest)))


def _up_to(most: int | None, batches: Iterable[Any], path: Path) -> Iterator[Any]:
    """The batches up to the limit: a value stored once may be repeated in every row."""
    size, packed = 0, path.stat().st_size
    for batch in batches:
        repeated = [column for column in batch.columns if pa.types.is_dictionary(column.type)]
        largest = max((column.dictionary.nbytes for column in repeated), default=1)
        rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, largest)))
        for start in range(0, batch.num_rows, rows):
            part = batch.slice(start, rows)
            if repeated:
                columns = [
                    column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
                    for column in part.columns
                ]
                part = pa.RecordBatch.from_arrays(columns, names=part.schema.names)
            size += part.nbytes
            refuse_bomb(path, most, size, packed, _REPEATED_BYTES)
            yield part


def read_arrow(path: Path, max_unpacked: int | None = None) -> Iterator[Row | BadRow]:
    """The rows of an Arrow IPC stream (as written by `save_to_disk`) or IPC file."""
    with open_seekable(path, max_unpacked) as stream, arrow_errors(path, "Arrow"):
        is_file = stream.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        stream.seek(0)
        if is_file:
            reader = pa.ipc.open_file(stream)
            batches = (reader.get_batch(n) for n in range(reader.num_record_batches))
        else:
            reader = pa.ipc.open_stream(stream)
            batches = iter(reader)
        for field in reader.schema:
            if _INTERVAL.search(str(field.type)):  # Python has no values for it
                what = f"the column {field.name!r} has the type {field.type}, which cannot be read"
                raise data_error(str(path), what, "leave the column out, or write it as text")
        yield from rows_of_batches(_up_to(max_unpacked, batches, path), str(path))


@contextmanager
def arrow_errors(path: Path, format: str) -> Iterator[None]:
    """Turn Arrow's errors into a DataError with the file and the fix."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError, MemoryError) as error:
        said = str(error).strip() or "a length beyond all memory"
        first_sentence = said.split("\n")[0].split(". ")[0].rstrip(".")
        fix = "the file is cut off, damaged or of another format; write or download it again"
        raise data_error(str(path), f"not a whole {format} file: {first_sentence}", fix) from error


def rows_of_batches(batches: Iterable[Any], file: str) -> Iterator[Row | BadRow]:
    """The rows of Arrow record batches, numbered from 1."""
    number = 0
    for batch in batches:
        check_columns(batch.schema.names, file)
        padded = [field.name for field in batch.schema if _is_padded(field)]
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            part = batch.slice(start, _BATCH_ROWS)
            for values in _values_of(part):
                number += 1
                if isinstance(values, str):
                    yield bad_row(file, number, values)
                elif fault := fault_in(values):
                    yield bad_row(file, number, fault, repr(values))
                else:
                    values.update({name: _unpadded(values[name]) for name in padded})
                    yield Row(values, file, number)


def _is_padded(field: Any) -> bool:
    """Tools and calls: as structs they have the keys of all rows, most of them null."""
    kind = str(field.type)
    return "arguments: struct<" in kind or (field.name in TOOL_COLUMNS and "struct<" in kind)


def _unpadded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unpadded(inner) for key, inner in value.items() if inner is not None}
    return [_unpadded(inner) for inner in value] if isinstance(value, list) else value


def _values_of(batch: Any) -> Iterator[dict[str, Any] | str]:
    """The values of every row, or why it is bad. Validated first, because Arrow checks neither
    offsets nor UTF-8 on opening, and would read past the end of a damaged file."""
    fault = _fault_of(batch) or ("too long" if batch.nbytes > MAX_ROW_BYTES else "")
    if not fault:
        yield from batch.to_pylist()
    elif batch.num_rows > 1:
        for row in range(batch.num_rows):
            yield from _values_of(batch.slice(row, 1))
    elif fault == "too long":
        yield too_long(batch.nbytes)
    else:
        damaged = "invalid UTF-8" if "UTF8" in fault else "damaged values"
        columns = zip(batch.schema.names, batch.columns, strict=True)
        yield f"{damaged} in {next(name for name, column in columns if _fault_of(column))!r}"


def _fault_of(values: Any) -> str:
    try:
        values.validate(full=True)
    except pa.ArrowInvalid as error:
        return str(error)
    return ""

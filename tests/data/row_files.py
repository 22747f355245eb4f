"""Files of rows written for tests, and what is read from them."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from expert.core.errors import EXIT_USAGE
from expert.data.records import BadRow, DataError, Row
from expert.data.rows import read_rows

FILES = Path(__file__).parent / "files"
SHARED = Path(__file__).parents[3] / "shared" / "data"


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def good(path: Path, **options: Any) -> list[dict[str, Any]]:
    """The values of all rows, none of which is bad."""
    found = list(read_rows(path, **options))
    assert [str(row) for row in found if isinstance(row, BadRow)] == []
    return [dict(row.values) for row in found if isinstance(row, Row)]


def outline(path: Path, **options: Any) -> list[tuple[int, Any]]:
    """Line and values of every row, or line and reason."""
    return [
        (row.line, row.reason if isinstance(row, BadRow) else dict(row.values))
        for row in read_rows(path, **options)
    ]


def zst(content: bytes, path: Path) -> Path:
    with pa.output_stream(str(path), compression="zstd") as stream:
        stream.write(content)
    return path


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        list(read_rows(path, **options))
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value).replace(str(path.parent) + os.sep, "")


RIVERS = good(FILES / "rivers.jsonl")


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """The rows in the format that the name tells."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as stream:
            delimiter = "\t" if path.suffix == ".tsv" else ","
            writer = csv.DictWriter(stream, list(rows[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        write_stream(path, pa.Table.from_pylist(rows))


def write_stream(path: Path, table: Any) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)

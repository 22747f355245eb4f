"""Hostile files of rows: endless, huge, of another kind, or two things at once."""

from __future__ import annotations

import gzip
import json
import os
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROW = b'{"instruction": "say one", "response": "one"}\n'
ROWS = ROW * 30
Make = Callable[[Path], object]


def _bytes(content: bytes, more: bytes = b"", times: int = 0) -> Make:
    """`more` comes so many times after it; made only when it is written: there are 300 MB of it."""
    return lambda file: file.write_bytes(content + more * times)


def _socket(file: Path) -> None:
    here = Path.cwd()
    os.chdir(file.parent)  # the name of a socket has at most 100 characters
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(file.name)
    os.chdir(here)


def link_to(target: str) -> Make:
    return lambda file: file.symlink_to(target)


def sparse(size: int, begin: bytes = ROWS) -> Make:
    def make(file: Path) -> None:
        file.write_bytes(begin)
        os.truncate(file, size)

    return make


def _packed(piece: bytes, pieces: int, times: int) -> Make:
    """A .gz of so many equal blocks of pieces."""

    def make(file: Path) -> None:
        block = piece * pieces
        with gzip.open(file, "wb", compresslevel=6) as stream:
            for _ in range(times):
                stream.write(block)

    return make


def _packed_by_zstd(file: Path) -> None:
    import pyarrow

    with pyarrow.output_stream(str(file), compression="zstd") as stream:
        for _ in range(600):
            stream.write(ROW * 20_000)


def _large_cell(file: Path) -> None:
    """A Parquet file whose only row has a cell of 1.2 GB."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.array(["x" * 1_200_000_000], pa.large_string())
    table = pa.table({"instruction": ["say"], "response": text})
    pq.write_table(table, file, compression="zstd")


def _repeated_cells(file: Path) -> None:
    """A value of a megabyte that stands in 100,000 rows, and in the file once."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    once = pa.array(["x" * 10**6])
    places = pa.array([0] * 100_000, pa.int32())
    texts = pa.DictionaryArray.from_arrays(places, once)
    table = pa.table({"instruction": texts, "response": pa.array(["one"] * 100_000)})
    pq.write_table(table, file, compression="zstd")


def _workbook(file: Path) -> None:
    """A spreadsheet whose only sheet unpacks to 3 GB."""
    sheet = b"<row>" + b" " * 10**6 + b"</row>"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as book:
        book.writestr("[Content_Types].xml", "<Types/>")
        with book.open("xl/worksheets/sheet1.xml", "w", force_zip64=True) as stream:
            for _ in range(500):
                stream.write(sheet)


REFUSED: dict[str, tuple[str, Make]] = {
    "a pipe": ("rows.jsonl", os.mkfifo),
    "a pipe with a name of Parquet": ("rows.parquet", os.mkfifo),
    "a pipe with a packed name": ("rows.jsonl.gz", os.mkfifo),
    "a socket": ("rows.jsonl", _socket),
    "a device without end": ("rows.jsonl", link_to("/dev/zero")),
    "a device without end, as text": ("rows.txt", link_to("/dev/zero")),
    "a link to itself": ("rows.jsonl", link_to("rows.jsonl")),
    "ten gigabytes of zeros in 10 MB": ("rows.jsonl.gz", _packed(b"\0", 10**8, 100)),
    "gigabytes of rows in a few megabytes": ("rows.jsonl.gz", _packed(ROW, 200_000, 120)),
    "gigabytes of text in a few megabytes": ("rows.txt.gz", _packed(b"a", 10**7, 300)),
    "gigabytes of CSV in a few megabytes": (
        "rows.csv.gz",
        _packed(b"a," + b"b" * 1000 + b"\n", 10**4, 100),
    ),
    "gigabytes of rows, by zstd": ("rows.jsonl.zst", _packed_by_zstd),
    "a cell of 1.2 GB": ("rows.parquet", _large_cell),
    "a cell of a megabyte, 100,000 times": ("rows.parquet", _repeated_cells),
    "a spreadsheet that is a bomb": ("rows.xlsx", _workbook),
    "a terabyte that was never written": ("rows.jsonl", sparse(2**40)),
    "packed rows that are packed again": (
        "rows.jsonl.gz",
        lambda file: file.write_bytes(gzip.compress(gzip.compress(b"\0" * 10**8))),
    ),
    "a line of 200 MB": ("rows.jsonl", _bytes(b'{"instruction": "', b"x", 200_000_000)),
    "brackets without end": ("rows.json", _bytes(b"", b"[", 3_000_000)),
}
"""What no command may train on, by what is hostile about it: a name, and how it is made."""

FEW = ("a terabyte that was never written",)
"""Those that every test run takes; tests/data/read refuses pipes and bombs without a process."""


def hostile_rows(name: str, folder: Path) -> Path:
    """One of them, and a manifest that names it."""
    file, make = REFUSED[name]
    make(folder / file)
    return write_manifest(folder, {"path": file})


def write_manifest(
    folder: Path, dataset: dict[str, Any], base: str = "tiny", **config: Any
) -> Path:
    """A small expert of one step or two."""
    training = {"max_steps": 2, "batch_size": 4, "max_seq_length": 64, "trackers": []}
    manifest = {
        "name": "hostile",
        "base_model": {"name": base},
        "training": {"dataset": dataset, "config": {**training, **config}},
    }
    path = folder / "manifest.json"
    path.write_text(json.dumps(manifest), encoding="utf-8")
    return path

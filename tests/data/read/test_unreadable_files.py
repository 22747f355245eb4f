"""A file that cannot be read is refused in words that say what it is and what to do."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from expert.data.read.rows import read_rows
from expert.data.records import DataError, Row
from tests.data.read.row_files import FILES, RIVERS, refusal, written, zst
from tests.each import each
from tests.wording import wording


def test_a_file_that_is_not_there_is_refused(tmp_path):
    where = wording("paths-relative-to-folder")
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "a.txt"):
        assert refusal(tmp_path / name) == wording("there-is-no-such-file", name=name, where=where)


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "a.jsonl").mkdir()
    assert refusal(tmp_path / "a.jsonl") == wording("folder-not-file-name")


def test_a_file_that_may_not_be_read_is_refused(tmp_path, monkeypatch):
    def refuse(path: Path) -> Iterator[Any]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("expert.data.read.rows.open_text", refuse)
    assert refusal(tmp_path / "a.jsonl") == wording("may-not-read-give")


def test_an_error_of_the_disk_is_told(tmp_path, monkeypatch):
    def fail(path: Path) -> Iterator[Any]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("expert.data.read.rows.open_text", fail)
    assert refusal(tmp_path / "a.jsonl") == wording("cannot-read-errno-error")


@each("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.parquet", "a.arrow"])
def test_a_packed_file_that_was_cut_off_is_refused(name, tmp_path):
    noise = os.urandom(200_000).hex().encode()
    fix = wording("file-cut-off-damaged")
    packed = gzip.compress(b'{"a": "' + noise + b'"}\n' * 3)
    path = written(tmp_path, f"{name}.gz", packed[: len(packed) // 2])
    assert refusal(path) == wording("gz-cannot-unpacked-compressed", name=name, fix=fix)
    whole = zst(noise, tmp_path / "whole").read_bytes()
    path = written(tmp_path, f"{name}.zst", whole[: len(whole) // 2])
    assert refusal(path) == wording("zst-cannot-unpacked-truncated", name=name, fix=fix)


def test_what_is_not_packed_at_all_is_refused(tmp_path):
    fix = wording("file-cut-off-damaged")
    path = written(tmp_path, "a.jsonl.gz", b'{"a": 1}\n')
    assert refusal(path) == wording("cannot-unpacked-not-gzipped", fix=fix)
    assert refusal(written(tmp_path, "a.jsonl.zst", b'{"a": 1}\n')).startswith(
        wording("cannot-unpacked-zstd-decompress")
    )
    damaged = bytearray(gzip.compress(os.urandom(1000)))
    damaged[12:20] = b"\xff" * 8
    assert refusal(written(tmp_path, "a.jsonl.gz", bytes(damaged))).startswith(
        wording("cannot-unpacked-error-while")
    )


@each(
    ("name", "content", "start"),
    [
        ("a.parquet", b"not parquet at all", wording("not-whole-parquet-file")),
        ("a.parquet", b"", wording("not-whole-parquet-file")),
        ("a.arrow", b"not arrow at all", wording("not-whole-arrow-file")),
        ("a.arrow", b"", wording("not-whole-arrow-file")),
        ("a.arrow", b"ARROW1\0\0and no more", wording("not-whole-arrow-file")),
    ],
)
def test_a_file_of_another_format_is_refused(name, content, start, tmp_path):
    text = refusal(written(tmp_path, name, content))
    assert text.startswith(start)
    assert text.endswith(wording("file-cut-off"))


@pytest.mark.parametrize("name", ["rivers.parquet", "rivers.arrow", "rivers_file.arrow"])
def test_a_table_cut_off_at_any_place_is_refused_or_loses_nothing(name, tmp_path):
    content = (FILES / name).read_bytes()
    for size in range(0, len(content) - 1, max(1, len(content) // 60)):
        path = written(tmp_path, name, content[:size])
        try:
            found = list(read_rows(path))
        except DataError:
            continue
        # Only the mark at the end of an Arrow stream may be missing.
        assert name == "rivers.arrow"
        assert [dict(row.values) for row in found if isinstance(row, Row)] == RIVERS


def test_utf16_without_a_mark_and_lfs_pointers_are_told_for_what_they_are(tmp_path):
    path = written(tmp_path, "a.jsonl", '{"a": 1}\n'.encode("utf-16-le"))
    assert refusal(path) == wording("text-looks-like-without")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    assert refusal(written(tmp_path, "a.csv", pointer)) == wording("only-git-lfs-pointer")


def test_a_format_that_cannot_be_told_or_is_unknown_is_refused(tmp_path):
    formats = "jsonl, json, csv, tsv, txt, parquet, arrow, excel"
    assert refusal(written(tmp_path, "rows", "")) == wording("rows-name-does-not", formats=formats)
    assert refusal(written(tmp_path, "a.jsonl", ""), format="xml") == (
        f"a.jsonl: unknown format 'xml'  (one of {formats})"
    )

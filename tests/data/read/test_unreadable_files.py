"""A file that cannot be read is refused in words that say what it is and what to do."""

from __future__ import annotations

import contextlib
import gzip
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from expert.data.read.rows import read_rows
from expert.data.records import BadRow, DataError, Row
from tests.data import FILES
from tests.data.read.row_files import RIVERS, refusal, written, zst
from tests.each import each
from tests.faults.counting import case


def test_a_file_that_is_not_there_a_folder_and_a_pipe_are_refused(tmp_path):
    where = "paths are relative to the folder of the manifest"
    for name in ("a.jsonl", "a.csv", "a.txt", "a.parquet", "a.arrow", "a.jsonl.gz", "a.jsonl.zst"):
        assert refusal(tmp_path / name) == f"{name}: there is no such file  ({where})"
        os.mkfifo(tmp_path / name)  # nothing is waited for
        assert f"{name}: is a pipe, not a regular file" in refusal(tmp_path / name)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.jsonl").mkdir()
    assert "a.jsonl: this is a folder, not a file" in refusal(tmp_path / "b" / "a.jsonl")


@each("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.parquet", "a.arrow"])
def test_a_packed_file_that_was_cut_off_is_refused(name, tmp_path):
    noise = os.urandom(200_000).hex().encode()
    fix = "the file is cut off or damaged; copy or download it again"
    packed = gzip.compress(b'{"a": "' + noise + b'"}\n' * 3)
    path = written(tmp_path, f"{name}.gz", packed[: len(packed) // 2])
    assert refusal(path).startswith(
        f"{name}.gz: it cannot be unpacked: Compressed file ended before"
    )
    assert refusal(path).endswith(f"  ({fix})")
    whole = zst(noise, tmp_path / "whole").read_bytes()
    path = written(tmp_path, f"{name}.zst", whole[: len(whole) // 2])
    assert f"{name}.zst: it cannot be unpacked: Truncated compressed stream  (" in refusal(path)


@each(
    ("name", "content", "start"),
    [
        ("a.parquet", b"not parquet at all", "a.parquet: not a whole Parquet file: "),
        ("a.parquet", b"", "a.parquet: not a whole Parquet file: "),
        ("a.arrow", b"not arrow at all", "a.arrow: not a whole Arrow file: "),
        ("a.arrow", b"", "a.arrow: not a whole Arrow file: "),
        ("a.arrow", b"ARROW1\0\0and no more", "a.arrow: not a whole Arrow file: "),
    ],
)
def test_a_file_of_another_format_is_refused(name, content, start, tmp_path):
    text = refusal(written(tmp_path, name, content))
    assert text.startswith(start)
    assert text.endswith(
        "  (the file is cut off, damaged or of another format; write or download it again)"
    )


@each("name", ["rivers.parquet", "rivers.arrow", "rivers_file.arrow"])
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


def test_what_is_no_file_of_rows_is_told_for_what_it_is(tmp_path):
    path = written(tmp_path, "a.jsonl", '{"a": 1}\n'.encode("utf-16-le"))
    assert "a.jsonl: the text looks like UTF-16 without its mark  (save" in refusal(path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    told = refusal(written(tmp_path, "a.csv", pointer))
    assert told.startswith("a.csv: only the Git LFS pointer is here, not the data  (run 'git lfs")
    formats = "jsonl, json, csv, tsv, txt, parquet, arrow, excel"
    told = refusal(written(tmp_path, "rows", ""))
    assert told.endswith(f"  (set training.dataset.format to one of {formats})")
    unknown = refusal(written(tmp_path, "a.jsonl", ""), format="xml")
    assert unknown == f"a.jsonl: unknown format 'xml'  (one of {formats})"
    pq.write_table(pa.table([["x"], ["y"]], ["a", "a"]), tmp_path / "a.parquet")
    assert "two columns are named 'a'" in refusal(tmp_path / "a.parquet")


@each("name", ["a.jsonl.gz", "a.jsonl.zst", "a.json.gz", "a.txt.gz", "a.csv.zst"])
def test_a_file_that_unpacks_to_much_more_than_its_size_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.setattr("expert.data.read.streams.MOST_UNPACKED", 2**17)
    path, text = tmp_path / name, b'{"a": "x"}\n' * 40_000
    path = zst(text, path) if name.endswith("zst") else written(tmp_path, name, gzip.compress(text))
    assert ", as a zip bomb would  (if it is sound: unpack it, or --set " in refusal(path)
    assert refusal(path).endswith("max_unpacked_size=1GB)")
    assert next(iter(read_rows(path, max_unpacked=10**9)))


def test_cells_of_many_megabytes_are_bad_rows(tmp_path):
    noise = os.urandom(3_000_000).hex()
    pq.write_table(pa.table({"a": ["x", noise, "y"]}), tmp_path / "a.parquet")
    first, bad, last = read_rows(tmp_path / "a.parquet")
    assert isinstance(first, Row)
    assert isinstance(bad, BadRow)
    assert isinstance(last, Row)
    assert (first.values, last.values) == ({"a": "x"}, {"a": "y"})
    assert (bad.line, bad.reason) == (2, "6.0 MB long, the limit is 5 MB")


def test_a_value_that_stands_in_every_row_counts_in_every_row(tmp_path, monkeypatch):
    monkeypatch.setattr("expert.data.read.arrow_rows._REPEATED_BYTES", 2**20)
    once = pa.DictionaryArray.from_arrays(pa.array([0] * 5000, pa.int32()), ["x" * 10_000])
    pq.write_table(pa.table({"a": once}), tmp_path / "a.parquet")
    assert ", as a zip bomb would  (if it is sound: " in refusal(tmp_path / "a.parquet")


def as_varint(number: int) -> bytes:
    """A number as the footer of a Parquet file has it."""
    left, found = 2 * number, b""
    while left > 127:
        found, left = found + bytes([left & 127 | 128]), left >> 7
    return found + bytes([left])


@pytest.mark.fault(20)
def test_a_parquet_file_that_lies_about_its_rows_is_refused(tmp_path):
    """Arrow would give none, or some, without a word."""
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": [str(n) for n in range(1000)]}), file, use_dictionary=False)
    good, told = file.read_bytes(), as_varint(1000)
    footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    places = [n for n in range(footer, len(good)) if good.startswith(told, n)]
    for place in places:
        for number in (500, 999, 1001, 8000):
            file.write_bytes(good[:place] + as_varint(number) + good[place + len(told) :])
            with case(), contextlib.suppress(DataError):
                rows = [row.values for row in read_rows(file) if isinstance(row, Row)]
                # Nobody relies on what is told in this place.
                assert rows == [{"text": str(n)} for n in range(1000)]
    file.write_bytes(good[: places[0]] + as_varint(999) + good[places[0] + len(told) :])
    with pytest.raises(DataError, match="its metadata says "):
        list(read_rows(file))
    assert len(places) > 2

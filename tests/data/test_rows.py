"""Reading rows: every format, every fault with its file and line, in bounded memory."""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.core.errors import EXIT_USAGE
from expert.data import json_rows
from expert.data.records import BadRow, DataError, Row
from expert.data.rows import FORMATS, file_format, read_rows
from expert.data.streams import MAX_ROW_BYTES, RAW_CHARACTERS

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


# ---- formats


RIVERS = good(FILES / "rivers.jsonl")
TWINS = sorted(FILES.glob("rivers*"))
UNPACKED_TWINS = [path for path in TWINS if path.suffix not in (".gz", ".zst")]


def test_there_is_a_twin_of_every_format():
    assert {file_format(path) for path in FILES.iterdir()} == set(FORMATS)
    assert (len(RIVERS), len(TWINS), len(UNPACKED_TWINS)) == (3, 12, 10)
    assert RIVERS[2]["instruction"] == 'Is there a river called "Þjórsá"?'


@pytest.mark.parametrize("path", TWINS, ids=lambda path: path.name)
def test_the_same_rows_come_out_of_every_format(path: Path):
    assert good(path) == RIVERS


@pytest.mark.parametrize("path", UNPACKED_TWINS, ids=lambda path: path.name)
@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_the_same_rows_come_out_of_every_packed_format(path: Path, packing: str, tmp_path: Path):
    packed = tmp_path / (path.name + packing)
    if packing == ".gz":
        packed.write_bytes(gzip.compress(path.read_bytes()))
    else:
        zst(path.read_bytes(), packed)
    assert good(packed) == RIVERS


@pytest.mark.parametrize("path", sorted(FILES.glob("*.jsonl")), ids=lambda path: path.name)
def test_every_twin_of_a_real_file_reads_without_a_bad_row(path: Path):
    assert len(good(path)) == len(path.read_bytes().splitlines())


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("rivers.jsonl", [1, 2, 3]),
        ("rivers.json", [2, 7, 12]),
        ("rivers_under_data.json", [4, 9, 14]),
        ("rivers.csv", [2, 3, 5]),
        ("rivers.parquet", [1, 2, 3]),
        ("rivers.arrow", [1, 2, 3]),
    ],
)
def test_a_row_knows_its_file_and_the_line_it_starts_on(name: str, lines: list[int]):
    found = list(read_rows(FILES / name))
    assert [row.line for row in found] == lines
    assert {row.file for row in found} == {str(FILES / name)}


def test_plain_text_is_one_row_with_plain_line_ends(tmp_path: Path):
    path = written(tmp_path, "a.txt", b"\xef\xbb\xbfone\r\ntwo\n\nthree")
    assert good(path) == [{"text": "one\ntwo\n\nthree"}]
    assert good(path, max_chars=5) == [{"text": "one\nt"}]


def test_the_given_format_wins_over_the_suffix(tmp_path: Path):
    path = written(tmp_path, "rows.txt", '{"a": 1}\n')
    assert good(path, format="jsonl") == [{"a": 1}]
    assert good(written(tmp_path, "rows.data", "a\nx\n"), format="csv") == [{"a": "x"}]
    assert good(written(tmp_path, "rows.tsv", "a\tb\nx\ty\n"), format="csv") == [
        {"a": "x", "b": "y"}
    ]
    assert good(path, format="text") == [{"text": '{"a": 1}\n'}]
    assert good(FILES / "rivers.jsonl", format="huggingface") == RIVERS


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt", "a.jsonl.zst"])
def test_an_empty_text_file_has_no_rows(tmp_path: Path, name: str):
    assert good(written(tmp_path, name, b"")) == []
    if not name.endswith(".zst"):
        assert good(written(tmp_path, name, b"\xef\xbb\xbf")) == []


# ---- faults of rows: reliability row 20


BROKEN_LINES: dict[str, tuple[bytes, str]] = {
    "invalid_utf8": (b'{"a": "\xff"}', "invalid UTF-8: byte 0xff at byte 8"),
    "cut_utf8": (b'{"a": "\xc3', "invalid UTF-8: byte 0xc3 at byte 8"),
    "utf8_surrogate": (b'{"a": "\xed\xa0\x80"}', "invalid UTF-8: byte 0xed at byte 8"),
    "missing_comma": (b'{"a": 1 "b": 2}', "broken JSON: expecting ',' delimiter at column 9"),
    "missing_colon": (b'{"a" 1}', "broken JSON: expecting ':' delimiter at column 6"),
    "cut_off": (b'{"a": "x', "broken JSON: unterminated string starting at column 7"),
    "no_value": (b'{"a": }', "broken JSON: expecting value at column 7"),
    "two_objects": (b'{"a": 1} {"b": 2}', "broken JSON: extra data at column 10"),
    "tab_in_text": (b'{"a": "x\ty"}', "broken JSON: invalid control character at column 9"),
    "bare_word": (b"hello", "broken JSON: expecting value at column 1"),
    "array": (b"[1, 2]", "the line holds an array, not a JSON object"),
    "text": (b'"a"', "the line holds a text, not a JSON object"),
    "number": (b"7", "the line holds a number, not a JSON object"),
    "null": (b"null", "the line holds null, not a JSON object"),
    "true": (b"true", "the line holds true or false, not a JSON object"),
    "nul_byte": (b'{"a": "x\0y"}', "NUL byte at byte 9"),
    "only_nul": (b"\0\0\0", "NUL byte at byte 1"),
    "nul_escape": (rb'{"a": "x\u0000y"}', "NUL character in 'a'"),
    "nested_nul": (rb'{"a": [{"b": "\u0000"}]}', "NUL character in 'a'"),
    "nul_column": (rb'{"\u0000": 1}', "NUL character in the name of a column"),
    "lone_high": (rb'{"a": "\ud83d"}', "lone surrogate \\ud83d in 'a'"),
    "lone_low": (rb'{"a": "ok", "b": "\uDE00x"}', "lone surrogate \\ude00 in 'b'"),
    "swapped_pair": (rb'{"a": {"b": "\ude00\ud83d"}}', "lone surrogate \\ude00 in 'a'"),
    "nan": (b'{"a": NaN}', "NaN is not JSON"),
    "infinity": (b'{"a": [-Infinity]}', "-Infinity is not JSON"),
    "deep": (b'{"a": ' + b"[" * 100_000, "JSON nested too deeply"),
    "digits": (b'{"a": ' + b"9" * 5_000 + b"}", "JSON with a number of too many digits"),
    "over_5_mb": (
        b'{"a": "' + b"x" * MAX_ROW_BYTES + b'"}',
        "5.0 MB long, the limit is 5 MB",
    ),
}


@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("fault", BROKEN_LINES)
def test_a_broken_line_is_a_bad_row_with_file_and_line(fault: str, end: bytes, tmp_path: Path):
    line, reason = BROKEN_LINES[fault]
    lines = [b'{"n": 1}', b"", line, b'{"n": 2}']
    path = written(tmp_path, "rows.jsonl", b"\xef\xbb\xbf" + end.join(lines) + end)
    first, bad, last = read_rows(path)
    assert isinstance(bad, BadRow)
    assert str(bad) == f"{path}:3: {reason}"
    assert bad.raw == line.decode("utf-8", "replace")[:RAW_CHARACTERS].rstrip("\r\n")
    json.dumps(bad.raw).encode()
    assert (first, last) == (Row({"n": 1}, str(path), 1), Row({"n": 2}, str(path), 4))


@pytest.mark.parametrize("fault", sorted(set(BROKEN_LINES) - {"cut_off", "cut_utf8", "over_5_mb"}))
def test_a_broken_last_line_without_an_end_is_told_too(fault: str, tmp_path: Path):
    line, reason = BROKEN_LINES[fault]
    assert outline(written(tmp_path, "rows.jsonl", line)) == [(1, reason)]


@pytest.mark.parametrize(
    "line",
    [
        '{"a": "\\ud83d\\ude00"}',
        '{"a": "😀"}',
        '{"a": "\\\\u0000"}',
        '{"a": "\u2028 \u0085"}',
        ' \t{"a": "indented"}\t ',
        '{"a": null}',
        '{"a": "NaN"}',
        "{}",
        '{"a": "' + "x" * (MAX_ROW_BYTES - 9) + '"}',
    ],
    ids=range(9),
)
def test_an_unusual_line_that_is_json_is_a_row(line: str, tmp_path: Path):
    path = written(tmp_path, "rows.jsonl", line + "\r\n")
    assert good(path) == [json.loads(line)]


def test_a_line_of_exactly_the_limit_is_read_and_one_byte_more_is_not(tmp_path: Path):
    exact = b'{"a": "' + b"x" * (MAX_ROW_BYTES - 9) + b'"}'
    assert len(exact) == MAX_ROW_BYTES
    path = written(tmp_path, "rows.jsonl", exact + b"\r\n" + exact + b" \r\n" + exact)
    found = list(read_rows(path))
    assert [(row.line, type(row)) for row in found] == [(1, Row), (2, BadRow), (3, Row)]


CSV_FAULTS: dict[str, tuple[bytes, str]] = {
    "too_many": (b"1,2,3", "too many columns: 3, the header has 2"),
    "too_few": (b"1", "too few columns: 1, the header has 2"),
    "invalid_utf8": (b"1,\xff", "invalid UTF-8: byte 0xff at character 3"),
    "invalid_and_short": (b"\xff", "invalid UTF-8: byte 0xff at character 1"),
    "nul": (b"1,x\0y", "NUL character in 'b'"),
    "after_quote": (b'1,"x"y', "broken CSV: ',' expected after '\"'"),
    "open_quote": (b'1,"x', "broken CSV: a quoted value is opened and not properly closed"),
    "over_5_mb": (b"1," + b"x" * MAX_ROW_BYTES, "5.0 MB long, the limit is 5 MB"),
}


@pytest.mark.parametrize(
    ("content", "row"),
    [
        ("a;b\n1;2\n", {"a": "1", "b": "2"}),
        ("a\tb\n1\t2\n", {"a": "1", "b": "2"}),
        ("a;b\n1,5;2,5\n3,5;4,5\n", {"a": "1,5", "b": "2,5"}),
        ('a;"b, or c"\n1;2\n3;4\n', {"a": "1", "b, or c": "2"}),
        ('a;b\n"x, y\nand; z";2\n3;4\n', {"a": "x, y\nand; z", "b": "2"}),
        ("a;b\n1;2\n3;4;5\n6;7\n", {"a": "1", "b": "2"}),
        ("a;b (x, y)\n1;2\n3;4\n", {"a": "1", "b (x, y)": "2"}),
        # Commas where they are as good, whatever else there is.
        ("a,b\n1;2,3;4\n5;6,7;8\n", {"a": "1;2", "b": "3;4"}),
        ("a;x,b\n1;y,2\n3;z,4\n", {"a;x": "1;y", "b": "2"}),
        ("a;b\nx\ny\n", {"a;b": "x"}),
        ('"a;b"\n"1;2"\n', {"a;b": "1;2"}),
        ("text\none; two\n", {"text": "one; two"}),
    ],
)
def test_what_separates_the_columns_of_a_csv_is_told_by_its_header_and_rows(
    tmp_path: Path, content: str, row: dict[str, str]
):
    found = list(read_rows(written(tmp_path, "rows.csv", content)))
    assert isinstance(found[0], Row)
    assert found[0].values == row


def test_a_file_of_many_rows_separated_by_semicolons_is_read_to_its_end(tmp_path: Path):
    rows = [f"{n};{'x' * 90}, y" for n in range(2000)]  # longer than what is looked at
    found = good(
        written(tmp_path, "rows.csv.gz", gzip.compress("\n".join(["a;b", *rows]).encode()))
    )
    assert len(found) == 2000
    assert found[-1]["a"] == "1999"


@pytest.mark.parametrize("fault", CSV_FAULTS)
def test_a_broken_record_of_a_csv_is_a_bad_row_with_file_and_line(fault: str, tmp_path: Path):
    line, reason = CSV_FAULTS[fault]
    lines = [b"a,b", b'"x\r\ny",z', b"", line, b'3,"4"', b"5,6"]
    path = written(tmp_path, "rows.csv", b"\xef\xbb\xbf" + b"\r\n".join(lines) + b"\r\n")
    found = list(read_rows(path))
    assert [str(row) for row in found if isinstance(row, BadRow)] == [f"{path}:5: {reason}"]
    assert [(row.line, row.values) for row in found if isinstance(row, Row)] == [
        (2, {"a": "x\r\ny", "b": "z"}),
        (6, {"a": "3", "b": "4"}),
        (7, {"a": "5", "b": "6"}),
    ]


def test_an_open_quote_swallows_nothing_though_no_other_quote_follows(tmp_path: Path):
    rows = "".join(f"{n},x\n" for n in range(1000))
    path = written(tmp_path, "rows.csv", 'a,b\n1,"x\n' + rows)
    reason = "broken CSV: a quoted value is opened and not properly closed"
    found = outline(path)
    assert found[0] == (2, reason)
    assert found[1:] == [(3 + n, {"a": str(n), "b": "x"}) for n in range(1000)]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"a,b,a\n1,2,3\n", "rows.csv:1: the header names 'a' twice  (rename one of the columns)"),
        (
            b"\na,\xff\n",
            "rows.csv:2: the header: invalid UTF-8: byte 0xff at character 3"
            "  (mend the first line)",
        ),
        (
            b"a,\0\n",
            "rows.csv:1: the header: NUL character in the name of a column  (mend the first line)",
        ),
        (
            b'a,"b\n1,2\n',
            "rows.csv:1: the header: broken CSV: a quoted value is opened and not properly closed",
        ),
    ],
    ids=["twice", "utf8", "nul", "quote"],
)
def test_a_csv_without_a_usable_header_is_refused(content: bytes, text: str, tmp_path: Path):
    assert refusal(written(tmp_path, "rows.csv", content)) == text


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b"fine\r\nb\xfad\nfine", 2, "invalid UTF-8: byte 0xfa at byte 2"),
        (b"fine\nfine\nx\0", 3, "NUL character"),
    ],
    ids=["utf8", "nul"],
)
def test_a_text_that_is_no_text_is_one_bad_row(
    content: bytes, line: int, reason: str, tmp_path: Path
):
    assert outline(written(tmp_path, "a.txt", content)) == [(line, reason)]


ROW_FAULTS: dict[str, tuple[bytes, str]] = {
    "invalid_utf8": (b'{"a": "\xff"}', "invalid UTF-8: byte 0xff at character 8 of the row"),
    "missing_comma": (
        b'{"a": 1 "b": 2}',
        "broken JSON: expecting ',' delimiter at character 9 of the row",
    ),
    "two_objects": (b'{"a": 1} {"b": 2}', "broken JSON: extra data at character 10 of the row"),
    "nothing": (b"", "broken JSON: expecting value at character 1 of the row"),
    "array": (b"[1, {}]", "the row is an array, not a JSON object"),
    "number": (b"7", "the row is a number, not a JSON object"),
    "broken_word": (b"nul", "broken JSON: expecting value at character 1 of the row"),
    "nul_byte": (b'{"a": "x\0y"}', "NUL byte at character 9 of the row"),
    "nul_escape": (rb'{"a": "\u0000"}', "NUL character in 'a'"),
    "lone_surrogate": (rb'{"a": "\ud83d"}', "lone surrogate \\ud83d in 'a'"),
    "nan": (b'{"a": NaN}', "NaN is not JSON"),
    "digits": (b'{"a": ' + b"9" * 5_000 + b"}", "JSON with a number of too many digits"),
    "deep": (
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "JSON nested too deeply",
    ),
    "over_5_mb": (
        b'{"a": ["' + b'x,\\"]}' * 1_000_000 + b'"]}',
        "6.0 MB long, the limit is 5 MB",
    ),
}


@pytest.mark.parametrize("wrapper", [b"[\n%s]\n", b'{"v": [1, "]"], "data": [\n%s], "w": 0}'])
@pytest.mark.parametrize("fault", ROW_FAULTS)
def test_a_broken_row_of_an_array_is_a_bad_row_with_file_and_line(
    fault: str, wrapper: bytes, tmp_path: Path
):
    row, reason = ROW_FAULTS[fault]
    rows = b'{"n":\n1},\n' + row + b',\n{"n": "]}\\"["}'
    path = written(tmp_path, "rows.json", wrapper.replace(b"%s", rows))
    found = list(read_rows(path))
    # An empty place begins at the comma that ends it, on the same line.
    assert [str(row) for row in found if isinstance(row, BadRow)] == [f"{path}:4: {reason}"]
    assert [(row.line, row.values) for row in found if isinstance(row, Row)] == [
        (2, {"n": 1}),
        (5, {"n": ']}"['}),
    ]


@pytest.mark.parametrize("block", [1, 2, 7, 64])
def test_the_edge_of_a_block_changes_nothing(
    block: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    rows = [{"a": 'q"\\"]}é😀', "b": [{"c": 12}, []]}, {"n": 1}, {"a": "\\"}, {"é": -1.5e3}]
    text = json.dumps(rows, ensure_ascii=False)
    path = written(tmp_path, "rows.json", f" {text[:-1]} , 12 , nul ]\n ")
    whole = outline(path)
    assert [values for _, values in whole[:4]] == rows
    assert len(whole) == 6
    monkeypatch.setattr(json_rows, "_BLOCK_BYTES", block)
    assert outline(path) == whole


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            '[{"a": 1},\n{"a": 2',
            "a.json:2: the array ends within a row"
            "  (the file is cut off or damaged; write it again)",
        ),
        (
            '[{"a": 1},',
            "a.json:1: the array ends within a row"
            "  (the file is cut off or damaged; write it again)",
        ),
        (
            '[{"a": 1}},\n{"a": 2}]',
            "a.json:1: a bracket too many after the row"
            "  (the file is cut off or damaged; write it again)",
        ),
        (
            '[{"a": 1}]\n[{"a": 2}]',
            "a.json:2: there is more after the array  (one array to a file)",
        ),
        (
            "hello",
            "a.json: neither an array nor an object"
            '  (write an array of objects, {"data": [...]} or one object a line)',
        ),
        (
            '{"train": [],\n "test": []}',
            "a.json: the object has no array under \"data\", only 'train', 'test'"
            '  (write an array of objects, {"data": [...]} or one object a line)',
        ),
        (
            '{"train": [1,\n 2',
            "a.json:2: the file is no whole JSON"
            '  (write an array of objects, {"data": [...]} or one object a line)',
        ),
        ('{"a": "\\u0000"}', "a.json:1: NUL character in 'a'  (mend the row)"),
    ],
    ids=["cut", "cut_after_comma", "bracket", "two", "word", "no_data", "cut_object", "nul"],
)
def test_a_json_file_that_is_no_array_of_rows_is_refused(content: str, text: str, tmp_path: Path):
    assert refusal(written(tmp_path, "a.json", content)) == text


def test_json_lines_and_a_single_object_under_the_name_json_are_read(tmp_path: Path):
    path = written(tmp_path, "a.json", '{"a": 1}\n\n{"a": 2, "data": []}\n{"a" 3}\n')
    reason = "broken JSON: expecting ':' delimiter at column 6"
    assert outline(path) == [(1, {"a": 1}), (3, {"a": 2, "data": []}), (4, reason)]
    assert outline(written(tmp_path, "a.json", '\n{"a": 1}\n')) == [(2, {"a": 1})]
    assert outline(written(tmp_path, "a.json", '{"data": [{"a": 1}]}')) == [(1, {"a": 1})]
    assert outline(written(tmp_path, "a.json", " [ ] \n")) == []


def test_text_that_is_no_utf8_in_a_parquet_column_spoils_its_row_only(tmp_path: Path):
    fine = pa.array(["ok", "abc", "zzz", "x\0y"])
    texts = pa.Array.from_buffers(
        pa.string(), 4, [None, fine.buffers()[1], pa.py_buffer(b"ok\xff\xfeczzzx\0y")]
    )
    table = pa.table({"n": [1, 2, 3, 4], "text": texts})
    pq.write_table(table, tmp_path / "a.parquet")
    write_stream(tmp_path / "a.arrow", table)
    for name in ("a.parquet", "a.arrow"):
        assert outline(tmp_path / name) == [
            (1, {"n": 1, "text": "ok"}),
            (2, "invalid UTF-8 in 'text'"),
            (3, {"n": 3, "text": "zzz"}),
            (4, "NUL character in 'text'"),
        ]


def test_nulls_and_nan_of_a_parquet_file_are_values(tmp_path: Path):
    table = pa.table({"text": ["a", None], "score": [float("nan"), None]})
    pq.write_table(table, tmp_path / "a.parquet")
    first, second = good(tmp_path / "a.parquet")
    assert first["text"] == "a"
    assert first["score"] != first["score"]
    assert second == {"text": None, "score": None}


def test_damaged_offsets_of_an_arrow_file_are_told_and_not_followed(tmp_path: Path):
    table = pa.table({"text": ["aaaa", "bbbb", "cccc"]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content = sink.getvalue().to_pybytes()
    offsets = b"".join(n.to_bytes(4, "little") for n in (0, 4, 8, 12))
    assert content.count(offsets) == 1
    wrong = b"".join(n.to_bytes(4, "little") for n in (0, 10_000_000, 8, 12))
    path = written(tmp_path, "a.arrow", content.replace(offsets, wrong))
    assert outline(path) == [
        (1, "damaged values in 'text'"),
        (2, "damaged values in 'text'"),
        (3, {"text": "cccc"}),
    ]


# ---- files that cannot be read


def test_a_file_that_is_not_there_is_refused(tmp_path: Path):
    where = "paths are relative to the folder of the manifest"
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "a.txt"):
        assert refusal(tmp_path / name) == f"{name}: there is no such file  ({where})"


def test_a_folder_is_no_file(tmp_path: Path):
    (tmp_path / "a.jsonl").mkdir()
    assert refusal(tmp_path / "a.jsonl") == (
        "a.jsonl: this is a folder, not a file  (name a file in it)"
    )


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path) -> Iterator[Any]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("expert.data.rows.open_text", refuse)
    assert refusal(tmp_path / "a.jsonl") == (
        "a.jsonl: it may not be read  (give yourself permission to read it)"
    )


def test_an_error_of_the_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(path: Path) -> Iterator[Any]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("expert.data.rows.open_text", fail)
    assert refusal(tmp_path / "a.jsonl") == (
        "a.jsonl: it cannot be read: [Errno 5] Input/output error"
        "  (check the disk, or copy the file again)"
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.parquet", "a.arrow"])
def test_a_packed_file_that_was_cut_off_is_refused(name: str, tmp_path: Path):
    noise = os.urandom(200_000).hex().encode()
    fix = "the file is cut off or damaged; copy or download it again"
    packed = gzip.compress(b'{"a": "' + noise + b'"}\n' * 3)
    path = written(tmp_path, f"{name}.gz", packed[: len(packed) // 2])
    assert refusal(path) == (
        f"{name}.gz: it cannot be unpacked: Compressed file ended before the end-of-stream "
        f"marker was reached  ({fix})"
    )
    whole = zst(noise, tmp_path / "whole").read_bytes()
    path = written(tmp_path, f"{name}.zst", whole[: len(whole) // 2])
    assert (
        refusal(path) == f"{name}.zst: it cannot be unpacked: Truncated compressed stream  ({fix})"
    )


def test_what_is_not_packed_at_all_is_refused(tmp_path: Path):
    fix = "the file is cut off or damaged; copy or download it again"
    path = written(tmp_path, "a.jsonl.gz", b'{"a": 1}\n')
    assert refusal(path) == (
        f"a.jsonl.gz: it cannot be unpacked: Not a gzipped file (b'{{\"')  ({fix})"
    )
    assert refusal(written(tmp_path, "a.jsonl.zst", b'{"a": 1}\n')).startswith(
        "a.jsonl.zst: it cannot be unpacked: ZSTD decompress failed"
    )
    damaged = bytearray(gzip.compress(os.urandom(1000)))
    damaged[12:20] = b"\xff" * 8
    assert refusal(written(tmp_path, "a.jsonl.gz", bytes(damaged))).startswith(
        "a.jsonl.gz: it cannot be unpacked: Error -3 while decompressing data"
    )


@pytest.mark.parametrize(
    ("name", "content", "start"),
    [
        ("a.parquet", b"not parquet at all", "a.parquet: not a whole Parquet file: "),
        ("a.parquet", b"", "a.parquet: not a whole Parquet file: "),
        ("a.arrow", b"not arrow at all", "a.arrow: not a whole Arrow file: "),
        ("a.arrow", b"", "a.arrow: not a whole Arrow file: "),
        ("a.arrow", b"ARROW1\0\0and no more", "a.arrow: not a whole Arrow file: "),
    ],
)
def test_a_file_of_another_format_is_refused(name: str, content: bytes, start: str, tmp_path: Path):
    text = refusal(written(tmp_path, name, content))
    assert text.startswith(start)
    assert text.endswith(
        "  (the file is cut off, damaged or of another format; write or download it again)"
    )


@pytest.mark.parametrize("name", ["rivers.parquet", "rivers.arrow", "rivers_file.arrow"])
def test_a_table_cut_off_at_any_place_is_refused_or_loses_nothing(name: str, tmp_path: Path):
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


def test_utf16_and_lfs_pointers_are_told_for_what_they_are(tmp_path: Path):
    path = written(tmp_path, "a.jsonl", '{"a": 1}\n'.encode("utf-16"))
    assert refusal(path) == "a.jsonl: the text is UTF-16  (save it as UTF-8)"
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    assert refusal(written(tmp_path, "a.csv", pointer)) == (
        "a.csv: only the Git LFS pointer is here, not the data  (run 'git lfs pull')"
    )


def test_a_format_that_cannot_be_told_or_is_unknown_is_refused(tmp_path: Path):
    formats = "jsonl, json, csv, tsv, txt, parquet, arrow"
    assert refusal(written(tmp_path, "rows", "")) == (
        "rows: the name does not tell the format"
        f"  (set training.dataset.format to one of {formats})"
    )
    assert refusal(written(tmp_path, "a.jsonl", ""), format="xml") == (
        f"a.jsonl: unknown format 'xml'  (one of {formats})"
    )


# ---- memory


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz", "a.json.gz"])
def test_a_line_of_200_mb_is_passed_over_in_bounded_memory(name: str, tmp_path: Path):
    start, end = {
        "a.jsonl.gz": (b'{"a": "', b'"}\n{"a": "x"}\n'),
        "a.csv.gz": (b"a\n", b"\nx\n"),
        "a.json.gz": (b'[{"a": "', b'"},\n{"a": "x"}]'),
    }[name]
    with gzip.open(tmp_path / name, "wb", compresslevel=1) as stream:
        stream.write(start)
        for _ in range(200):
            stream.write(b"y" * 1_000_000)
        stream.write(end)
    found: list[Row | BadRow] = []
    # Measured peaks: 10.3 MB for lines and CSV, 21.6 MB for an array, whose window holds up to
    # twice the limit and, at the moment it grows, its old text beside the new one.
    assert peak_bytes(lambda: found.extend(read_rows(tmp_path / name))) < 30_000_000
    bad, row = found
    assert isinstance(bad, BadRow)
    assert bad.reason == "200.0 MB long, the limit is 5 MB"
    assert isinstance(row, Row)
    assert row.values == {"a": "x"}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.arrow"])
def test_memory_does_not_grow_with_the_rows(name: str, tmp_path: Path):
    small = peak_while_reading(tmp_path, name, 3_000)
    large = peak_while_reading(tmp_path, name, 15_000)
    # 12,000 more rows held as values would be 6 MB; a window or batch more is 0.3 MB.
    assert large < small + 1_000_000


def peak_while_reading(folder: Path, name: str, count: int) -> int:
    path = folder / f"{count}{name}"
    write(path, [{"a": f"{n:0200}"} for n in range(count)])
    return peak_bytes(lambda: sum(1 for _ in read_rows(path)))


# ---- what is written reads back


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


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
text_rows = st.lists(
    st.fixed_dictionaries({"instruction": texts, "input": texts, "output": texts}),
    min_size=1,
    max_size=8,
)
numbers = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(rows=text_rows, name=st.sampled_from(["a.csv", "a.tsv", "a.parquet", "a.arrow"]))
def test_rows_of_text_written_in_any_table_format_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], name: str
):
    path = tmp_path_factory.mktemp("rows") / name
    write(path, rows)
    assert good(path) == rows


@given(
    rows=st.lists(st.dictionaries(texts, json_values, max_size=4), max_size=6),
    name=st.sampled_from(["a.jsonl", "a.json"]),
)
def test_rows_written_as_json_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], name: str
):
    path = tmp_path_factory.mktemp("rows") / name
    write(path, rows)
    assert good(path) == rows


@given(
    content=st.binary(max_size=200), name=st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.txt"])
)
def test_any_bytes_are_rows_bad_rows_or_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str
):
    path = written(tmp_path_factory.mktemp("rows"), name, content)
    try:
        found = list(read_rows(path))
    except DataError:
        return
    lines = content.count(b"\n") + content.count(b"\r") + 1
    assert all(1 <= row.line <= lines for row in found)
    json.dumps([row.raw for row in found if isinstance(row, BadRow)]).encode()


@given(text=st.text(st.sampled_from('[]{}",:\\ \n1an'), max_size=40))
def test_any_array_gives_the_rows_that_json_itself_finds(
    tmp_path_factory: pytest.TempPathFactory, text: str
):
    path = written(tmp_path_factory.mktemp("rows"), "a.json", f"[{text}]")
    try:
        expected = json.loads(f"[{text}]")
    except ValueError:
        return
    found = outline(path)
    assert len(found) == len(expected)
    objects = [values for _, values in found if isinstance(values, dict)]
    assert objects == [value for value in expected if isinstance(value, dict)]


# ---- real files


REAL_ROWS = {
    "json/train.jsonl": 1998,
    "json/test.jsonl": 1997,
    "json/corpus.jsonl": 3998,
    "sql/train.jsonl": 25116,
    "sql/test.jsonl": 1895,
    "cypher/train.jsonl": 5000,
    "cypher/test.jsonl": 400,
    "typescript/handbook_text.jsonl": 1322,
    "shakespeare/train.jsonl": 802,
    "shakespeare/test.jsonl": 43,
    "shakespeare/input.txt": 1,
    "alpaca/alpaca_libre.jsonl": 3095,
}


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real data sets are not beside the checkout")
@pytest.mark.parametrize("name", REAL_ROWS)
def test_a_real_file_reads_without_a_bad_row(name: str):
    assert len(good(SHARED / name)) == REAL_ROWS[name]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real data sets are not beside the checkout")
def test_every_real_file_is_in_the_list():
    rows = {path.relative_to(SHARED).as_posix() for path in SHARED.rglob("*.jsonl")}
    assert rows | {"shakespeare/input.txt"} == set(REAL_ROWS)


def test_reading_json_lines_imports_no_pyarrow():
    code = (
        "import sys\nfrom pathlib import Path\nfrom expert.data.rows import read_rows\n"
        f"list(read_rows(Path({str(FILES / 'rivers.jsonl')!r})))\nprint('pyarrow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr

"""A row that cannot be used is reported with its file and line, and affects no other row."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from expert.data.read.rows import read_rows
from expert.data.read.streams import MAX_ROW_BYTES, RAW_CHARACTERS
from expert.data.records import BadRow, DataError, Row
from tests.data.read.row_files import good, outline, refusal, write, write_stream, written, xlsx
from tests.each import each
from tests.faults.counting import cases

UTF8 = "; save the file as UTF-8, or set training.dataset.encoding"
WIDE = "1,001 columns, the limit is 1,000"
DEEP = b"[" * 100_000 + b"]" * 100_000
FAULTS: dict[str, tuple[bytes, str]] = {
    "invalid_utf8": (b'{"a": "\xff"}', f"invalid UTF-8: byte 0xff at character 8{UTF8}"),
    "utf8_surrogate": (b'{"a": "\xed\xa0\x80"}', f"invalid UTF-8: byte 0xed at character 8{UTF8}"),
    "missing_comma": (b'{"a": 1 "b": 2}', "broken JSON: expecting ',' delimiter at character 9"),
    "two_objects": (b'{"a": 1} {"b": 2}', "broken JSON: extra data at character 10"),
    "tab_in_text": (b'{"a": "x\ty"}', "broken JSON: invalid control character at character 9"),
    "bare_word": (b"hello", "broken JSON: expecting value at character 1"),
    "array": (b"[1, {}]", "the row is an array, not a JSON object"),
    "text": (b'"a"', "the row is a text, not a JSON object"),
    "true": (b"true", "the row is true or false, not a JSON object"),
    "nul_byte": (b'{"a": "x\0y"}', "NUL byte at character 9"),
    "nul_escape": (rb'{"a": "x\u0000y"}', "NUL character in 'a'"),
    "nested_nul": (rb'{"a": [{"b": "\u0000"}]}', "NUL character in 'a'"),
    "nul_column": (rb'{"\u0000": 1}', "NUL character in the name of a column"),
    "lone_high": (rb'{"a": "\ud83d"}', "lone surrogate \\ud83d in 'a'"),
    "nan": (b'{"a": NaN}', "NaN is not JSON"),
    "infinity": (b'{"a": [-Infinity]}', "-Infinity is not JSON"),
    "twice": (b'{"c": [{"a": 1, "a": 2}]}', "the key 'a' occurs more than once"),
    "deep": (b'{"a": ' + DEEP + b"}", "JSON nested too deeply"),
    "digits": (b'{"a": ' + b"9" * 5_000 + b"}", "JSON with a number of too many digits"),
    "long": (
        b'{"a": ["' + (b"x" * 55 + b',\\"]}') * 90_000 + b'"]}',
        "5.4 MB long, the limit is 5 MB",
    ),
}
SYNTAX = frozenset(
    {
        *("missing_comma", "two_objects", "tab_in_text", "bare_word", "nul_byte", "deep"),
        "digits",
    }
)
"""Faults after which nobody can tell where the next row of an array begins."""
OF_LINES: dict[str, tuple[bytes, str]] = {
    "cut_utf8": (b'{"a": "\xc3', f"invalid UTF-8: byte 0xc3 at character 8{UTF8}"),
    "cut_off": (b'{"a": "x', "broken JSON: unterminated string starting at character 7"),
    "only_nul": (b"\0\0\0", "NUL byte at character 1"),
}
ARRAYS = [b"[\n%s]\n", b'{"v": [1, "]"], "data": [\n%s], "w": 0}']


@each("end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
@each("fault", [*FAULTS, *OF_LINES])
def test_a_broken_line_is_a_bad_row_with_file_and_line(fault, end, tmp_path):
    line, reason = (FAULTS | OF_LINES)[fault]
    lines = [b'{"n": 1}', b"", line, b'{"n": 2}']
    path = written(tmp_path, "rows.jsonl", b"\xef\xbb\xbf" + end.join(lines) + end)
    first, bad, last = read_rows(path)
    assert isinstance(bad, BadRow)
    assert str(bad) == f"{path}:3: {reason}"
    assert bad.raw == line.decode("utf-8", "replace")[:RAW_CHARACTERS].rstrip("\r\n")
    json.dumps(bad.raw).encode()
    assert (first, last) == (Row({"n": 1}, str(path), 1), Row({"n": 2}, str(path), 4))


@each("wrapper", ARRAYS)
@each("fault", FAULTS)
def test_a_broken_row_of_an_array_is_a_bad_row_or_refused_with_file_and_line(
    fault, wrapper, tmp_path
):
    row, reason = FAULTS[fault]
    rows = b'{"n":\n1},\n' + row + b',\n{"n": "]}\\"["}'
    path = written(tmp_path, "rows.json", wrapper.replace(b"%s", rows))
    if fault in SYNTAX:
        with pytest.raises(DataError, match=r"rows\.json:\d+: .*  \(correct it there; write an"):
            list(read_rows(path))
        return
    found = list(read_rows(path))
    assert [str(row) for row in found if isinstance(row, BadRow)] == [f"{path}:4: {reason}"]
    assert [(row.line, row.values) for row in found if isinstance(row, Row)] == [
        (2, {"n": 1}),
        (5, {"n": ']}"['}),
    ]


@each(
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
    ],
)
def test_an_unusual_line_that_is_json_is_a_row(line, tmp_path):
    path = written(tmp_path, "rows.jsonl", line + "\r\n")
    assert good(path) == [json.loads(line)]


def test_a_line_of_exactly_the_limit_is_read_and_one_byte_more_is_not(tmp_path):
    exact = b'{"a": "' + b"x" * (MAX_ROW_BYTES - 9) + b'"}'
    path = written(tmp_path, "rows.jsonl", exact + b"\r\n" + exact + b" \r\n" + exact)
    found = list(read_rows(path))
    assert [(row.line, type(row)) for row in found] == [(1, Row), (2, BadRow), (3, Row)]


CSV_FAULTS: dict[str, tuple[bytes, str]] = {
    "too_many": (b"1,2,3", "too many columns: 3, the header has 2"),
    "too_few": (b"1", "too few columns: 1, the header has 2"),
    "invalid_utf8": (
        b"1,\xff",
        f"invalid UTF-8: byte 0xff at character 3{UTF8}",
    ),
    "nul": (b"1,x\0y", "NUL character in 'b'"),
    "after_quote": (b'1,"x"y', "broken CSV: ',' expected after '\"'"),
    "open_quote": (b'1,"x', "broken CSV: a quoted value is opened and not properly closed"),
    "over_5_mb": (b"1," + b"x" * MAX_ROW_BYTES, "5.0 MB long, the limit is 5 MB"),
}


@each(
    ("content", "row"),
    [
        ("a;b\n1;2\n", {"a": "1", "b": "2"}),
        ("a;b\n1,5;2,5\n3,5;4,5\n", {"a": "1,5", "b": "2,5"}),
        ('a;b\n"x, y\nand; z";2\n3;4\n', {"a": "x, y\nand; z", "b": "2"}),
        # Commas where they are as good, whatever else there is.
        ("a,b\n1;2,3;4\n5;6,7;8\n", {"a": "1;2", "b": "3;4"}),
        ('"a;b"\n"1;2"\n', {"a;b": "1;2"}),
    ],
)
def test_what_separates_the_columns_of_a_csv_is_told_by_its_header_and_rows(tmp_path, content, row):
    found = list(read_rows(written(tmp_path, "rows.csv", content)))
    assert isinstance(found[0], Row)
    assert found[0].values == row


@each("fault", CSV_FAULTS)
def test_a_broken_record_of_a_csv_is_a_bad_row_with_file_and_line(fault, tmp_path):
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


WESTERN = "".join(f"Straße {n},größer beim früher\n" for n in range(9))
CYRILLIC = "".join(f"улица {n},шире чем раньше\n" for n in range(9))


@each(
    ("content", "encoding", "probable"),
    [
        (
            WESTERN,
            "cp1252",
            "it is not UTF-8, probably cp1252  (--set training.dataset.encoding=cp1252)",
        ),
        (CYRILLIC, "cp1251", "it is not UTF-8  (--set training.dataset.encoding=NAME)"),
    ],
)
def test_a_file_in_another_encoding_is_refused_once_and_read_when_it_is_named(
    content, encoding, probable, tmp_path
):
    path = written(tmp_path, "rows.csv", ("a,b\n" + content).encode(encoding))
    assert refusal(path) == f"rows.csv: {probable}"
    rows = good(path, encoding=encoding)
    assert [row["b"] for row in rows] == [line.split(",")[1] for line in content.splitlines()]
    damaged = content.encode().replace(b" ", b"\xff", 18)  # UTF-8, but for a few places
    found = list(read_rows(written(tmp_path, "damaged.csv", b"a,b\n" + damaged)))
    assert sum(isinstance(row, BadRow) for row in found) > 5


def test_an_encoding_that_nobody_knows_or_that_is_not_used_is_refused(tmp_path):
    path = written(tmp_path, "rows.csv", "a,b\n1,2\n")
    assert "rows.csv: unknown encoding 'cp9'  (write it as" in refusal(path, encoding="cp9")
    write(tmp_path / "a.parquet", [{"a": "x"}])
    told = refusal(tmp_path / "a.parquet", encoding="cp1252")
    assert "has no encoding  (remove training.dataset" in told


@each("name", ["a.parquet", "a.arrow", "a.xlsx", "a.jsonl", "a.json"])
def test_a_table_of_very_many_columns_is_refused(name, tmp_path):
    columns = {f"c{n}": "x" for n in range(1_001)}
    if name.endswith("xlsx"):
        path = xlsx(tmp_path / name, [list(columns), list(columns.values())])
    else:
        write(path := tmp_path / name, [columns])
    assert WIDE in refusal(path)


@each(
    ("content", "line", "reason"),
    [
        (
            b"fine\r\nb\xfad\nfine",
            2,
            f"invalid UTF-8: byte 0xfa at character 2{UTF8}",
        ),
        (b"fine\nfine\nx\0", 3, "NUL character in 'text'"),
    ],
    ids=["utf8", "nul"],
)
def test_an_undecodable_text_file_is_one_bad_row(content, line, reason, tmp_path):
    assert outline(written(tmp_path, "a.txt", content)) == [(line, reason)]


ENDLESS_QUOTE = b'a,b\n1,"2\n' + b"long row,of a file\n" * (MAX_ROW_BYTES // 19 + 2)


@each(
    ("text", "content"),
    [
        # A CSV without a usable header, and one whose quote megabytes do not close.
        ("a.csv:1: two columns are named 'a'  (name every column once)", b"a,b,a\n1,2,3\n"),
        ("a.csv:1: columns without a name  (name every column once)", b"a,b,,\n1,2,,\n"),
        ("a.csv:1: the header: broken CSV: new-line character", b"a,b\r1,2\r"),
        ("a.csv:2: the header: invalid UTF-8: byte 0xff at character", b"\na,\xff\n"),
        ("a.csv:1: the header: NUL character in the name of a column  (fix", b"a,\0\n"),
        ("a.csv:1: the header: broken CSV: a quoted value is opened and not", b'a,"b\n1,2\n'),
        (f"a.csv:1: {WIDE}", ",".join(f"c{n}" for n in range(1_001))),
        ("a.csv:2: a quoted value is opened and not closed within 5 MB  (", ENDLESS_QUOTE),
        # A JSON file that is no array of rows.
        ("a.json:2: broken JSON: expecting ',' delimiter  (correct", '[{"a": 1},\n{"a": 2'),
        ("a.json:1: broken JSON: expecting value  (correct it there; write", '[{"a": 1},'),
        ("a.json:1: broken JSON: expecting ',' or ']' after the row  (", '[{"a": 1}},\n{"a": 2}]'),
        ("a.json:2: broken JSON: there is more after the array  (", '[{"a": 1}]\n[{"a": 2}]'),
        ("a.json: neither an array nor an object  (write an array of", "hello"),
        (
            "a.json: the object has no array under \"data\", only 'train',",
            '{"train": [],\n "test": []}',
        ),
        (
            "a.json: there are rows under 'test' as well as under \"data\"",
            '{"data": [{"a": 1}], "v": 2,\n "test": [{}]}',
        ),
        ("a.json:2: broken JSON: expecting ',' delimiter  (correct it", '{"train": [1,\n 2'),
    ],
)
def test_a_file_that_gives_no_rows_is_refused_with_its_line(text, content, tmp_path):
    assert refusal(written(tmp_path, text.partition(":")[0], content)).startswith(text)


def test_json_lines_and_a_single_object_under_the_name_json_are_read(tmp_path):
    path = written(tmp_path, "a.json", '{"a": 1}\n\n{"a": 2, "data": []}\n{"a" 3}\n')
    reason = "broken JSON: expecting ':' delimiter at character 6"
    assert outline(path) == [(1, {"a": 1}), (3, {"a": 2, "data": []}), (4, reason)]
    assert outline(written(tmp_path, "a.json", '\n{"a": 1}\n')) == [(2, {"a": 1})]
    assert outline(written(tmp_path, "a.json", '{"data": [\n{"a": 1}]}')) == [(2, {"a": 1})]
    assert outline(written(tmp_path, "a.json", " [ ] \n")) == []


def test_rows_of_an_array_in_one_line_are_told_by_their_number(tmp_path):
    path = written(tmp_path, "a.json", '[{"a": 1}, 2, {"a": 3},\n4, 5]')
    assert [str(row) for row in read_rows(path) if isinstance(row, BadRow)] == [
        f"{path}: row 2: the row is a number, not a JSON object",
        f"{path}:2: the row is a number, not a JSON object",
        f"{path}: row 5: the row is a number, not a JSON object",
    ]
    second = next(row for row in read_rows(path) if isinstance(row, BadRow))
    assert second.to_json() == {"file": str(path), "row": 2, "reason": second.reason, "raw": "2"}


def test_text_that_is_no_utf8_in_a_parquet_column_spoils_its_row_only(tmp_path):
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


def test_damaged_offsets_of_an_arrow_file_are_told_and_not_followed(tmp_path):
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


GOOD = '{"instruction": "say one", "response": "one"}'
BROKEN: list[Callable[[random.Random], bytes]] = [
    lambda chance: GOOD.encode()[: chance.randrange(1, len(GOOD) - 1)],
    lambda chance: GOOD.replace("one", "\0", 1).encode(),
    lambda chance: GOOD.encode().replace(b"one", bytes([chance.randrange(128, 256), 0x20])),
    lambda chance: GOOD.replace("}", ', "response": "two"}').encode(),
    lambda chance: GOOD.replace('"one"', chance.choice(("NaN", "Infinity", "1e999"))).encode(),
    lambda chance: b"[" * chance.randrange(2000, 9000),
    lambda chance: chance.choice((b"null", b"1", b'"text"', b"[1]", b"true", b"{} {}")),
    lambda chance: GOOD.replace(":", chance.choice((" ", "=", "::"))).encode(),
    lambda chance: b'{"instruction": "' + b"x" * chance.randrange(5_000_001, 5_100_000) + b'"}',
    lambda chance: GOOD.replace('"', "'").encode(),
    lambda chance: GOOD.encode().replace(b"one", b"\\ud8" + b"%02x" % chance.randrange(256)),
]
"""Rows that cannot be read, different each time."""


@pytest.mark.fault(20)
@pytest.mark.slow
def test_200_bad_rows_are_found_in_their_lines_and_no_other_row_is_lost(tmp_path):
    chance, file = random.Random(20), tmp_path / "rows.jsonl"
    for number in cases(200):
        lines = [GOOD.encode()] * 20
        bad = sorted(chance.sample(range(20), chance.randint(1, 3)))
        for place in bad:
            lines[place] = BROKEN[(number + place) % len(BROKEN)](chance)
        file.write_bytes(chance.choice((b"\n", b"\r\n")).join(lines))
        found = list(read_rows(file))
        wrong = [row.line - 1 for row in found if isinstance(row, BadRow)]
        assert wrong == bad, [lines[place][:60] for place in bad]
        assert len(found) == 20

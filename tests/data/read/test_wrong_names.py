"""Rows in files that are not what most are: an array under .jsonl, UTF-16, a spreadsheet."""

from __future__ import annotations

import gzip
import json
import sys
from typing import Any

from expert.planning.survey import survey_file
from tests.data.read.row_files import RIVERS, good, outline, refusal, written, xlsx
from tests.each import each

HEADER = list(RIVERS[0])
SHEET: list[list[Any]] = [HEADER, *([row[name] for name in HEADER] for row in RIVERS)]


@each("indent", [None, 2])
@each("name", ["rows.jsonl", "rows.ndjson"])
def test_an_array_in_a_file_of_json_lines_is_read_as_the_rows_it_holds(tmp_path, name, indent):
    path = written(tmp_path, name, json.dumps(RIVERS, indent=indent))
    assert good(path) == RIVERS
    assert survey_file(path).rows is None
    lines = written(tmp_path, name, '[1]\n{"a": 1}\n')  # those are bad rows still
    assert outline(lines) == [(1, "the row is an array, not a JSON object"), (2, {"a": 1})]


@each("encoding", ["utf-16", "utf-32"])
@each("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz"])
def test_rows_of_another_unicode_encoding_are_read_by_its_mark(tmp_path, name, encoding):
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in RIVERS * 500)
    content = lines.encode(encoding)
    path = written(tmp_path, name, gzip.compress(content) if name.endswith("gz") else content)
    assert good(path) == RIVERS * 500


def test_a_text_and_a_csv_in_utf16_are_read(tmp_path):
    text = "Þjórsá\nis long\n"
    assert good(written(tmp_path, "a.txt", text.encode("utf-16"))) == [{"text": text}]
    path = written(tmp_path, "a.csv", "question;answer\r\nwas?;grün\r\n".encode("utf-16"))
    assert good(path) == [{"question": "was?", "answer": "grün"}]
    cut_off = '{"a": "x"}\n'.encode("utf-16")[:-1]
    told = refusal(written(tmp_path, "a.jsonl", cut_off))
    assert told == "a.jsonl: broken UTF-16: truncated data  (save it as UTF-8)"


@each(
    ("name", "content", "ending"),
    [
        ("rows.jsonl", gzip.compress(b'{"a": "x"}'), ".gz"),
        ("rows.csv", b"\x28\xb5\x2f\xfd\x04", ".zst"),
        ("rows.json", b"PAR1\x15\x04", ".parquet"),
    ],
)
def test_a_file_whose_name_hides_what_it_holds_is_refused_with_its_right_ending(
    tmp_path, name, content, ending
):
    told = refusal(written(tmp_path, name, content))
    assert f"{name}: the content is that of a {ending} file  (rename it" in told


@each("name", ["rows.xlsx", "rows.xlsx.gz"])
def test_a_spreadsheet_gives_the_rows_below_its_header(tmp_path, name):
    path = xlsx(tmp_path / "rows.xlsx", SHEET)
    if name.endswith("gz"):
        path = written(tmp_path, name, gzip.compress(path.read_bytes()))
    assert good(path) == RIVERS


def test_cells_of_a_spreadsheet_are_what_a_person_sees(tmp_path):
    header: list[Any] = ["question", "answer", None]
    rows = [header, [None, None, None], ["2+2", 4, "x"], ["1/2", 0.5, None]]
    assert outline(xlsx(tmp_path / "a.xlsx", rows)) == [
        (3, {"question": "2+2", "answer": 4, "column 3": "x"}),
        (4, {"question": "1/2", "answer": 0.5}),
    ]


def test_what_is_not_a_spreadsheet_or_cannot_be_read_here_is_refused(tmp_path, monkeypatch):
    path = written(tmp_path, "a.xlsx", b"PK")
    assert "it cannot be read as a spreadsheet" in refusal(path)
    whole = xlsx(path, SHEET).read_bytes()
    name = whole.index(b"xl/worksheets/sheet1.xml")
    damaged = bytearray(whole)
    damaged[name + 200] ^= 1  # within the sheet: its checksum is wrong
    for content in (whole[: len(whole) // 2], bytes(damaged)):
        assert "it cannot be read as a spreadsheet" in refusal(written(tmp_path, "a.xlsx", content))
    twice = xlsx(tmp_path / "b.xlsx", [["a", "a"], ["x", "y"]])
    assert "two columns are named 'a'" in refusal(twice)
    monkeypatch.setitem(sys.modules, "python_calamine", None)
    assert "needs the package 'python-calamine'" in refusal(twice)

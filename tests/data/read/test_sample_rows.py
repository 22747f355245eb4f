"""Totals are estimated from sampled lines, wherever in the files the long rows are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expert.data.read.sample_rows import SampledRows, sample_rows
from expert.data.records import Row
from expert.planning import survey
from tests.each import each


def jsonl(path: Path, words: list[int]) -> Path:
    lines = [json.dumps({"text": "word " * count}) for count in words]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def words_in(drawn: SampledRows) -> list[int]:
    rows = [line.row for line in drawn.drawn]
    return [str(row.values["text"]).count("word") if isinstance(row, Row) else 0 for row in rows]


def spread(*files: Path, most: int = 300, format: str | None = None) -> SampledRows:
    found = sample_rows(files, format=format, most=most)
    assert found is not None
    return found


def test_few_rows_are_all_taken_and_counted_exactly(tmp_path):
    found = spread(jsonl(tmp_path / "a.jsonl", [3, 1, 40]), jsonl(tmp_path / "b.jsonl", [7]))
    assert words_in(found) == [3, 1, 40, 7]
    assert found.whole
    assert (found.lines, found.total(words_in(found))) == (4, 51)


@each(
    "words",
    [list(range(2000)), list(range(2000, 0, -1)), [1, 100] * 1000, [2] * 1990 + [5000] * 10],
    ids=["sorted", "the longest first", "kinds that take turns", "ten rows that hold most of it"],
)
def test_word_counts_are_estimated_within_three_percent(tmp_path, words):
    found = spread(jsonl(tmp_path / "a.jsonl", words))
    assert not found.whole
    assert found.lines == 2000
    # Of 200 seeds none was off by more than 2.4 %, which was where kinds take turns.
    assert found.total(words_in(found)) == pytest.approx(sum(words), rel=0.03)
    assert spread(tmp_path / "a.jsonl") == found


def test_rows_of_csv_are_read_with_the_header_and_without_counting_it(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("text;n\n" + "".join(f"{'word ' * n};{n}\n" for n in range(1, 900)))
    found = spread(file)
    assert found.lines == 899
    assert found.total(words_in(found)) == pytest.approx(sum(range(1, 900)), rel=0.03)


@each(
    ("name", "text", "format"),
    [
        ("a.csv", "text,n\n" + '"two\nlines",1\n' * 900, None),
        ("a.json", "[]", None),
        ("a.jsonl.gz", "[]", None),
        ("a.jsonl", "[]", "txt"),
        ("a.jsonl", "", None),
    ],
    ids=["cells with line breaks", "an array", "packed", "a text", "empty"],
)
def test_files_without_a_row_a_line_cannot_be_drawn_from(tmp_path, name, text, format):
    (tmp_path / name).write_text(text)
    assert sample_rows([tmp_path / name], format=format, most=300) is None


def test_of_large_files_parts_are_looked_at_that_lie_all_over_them(tmp_path, monkeypatch):
    monkeypatch.setattr(survey, "_COUNTED_BYTES", 40_000)
    short = jsonl(tmp_path / "a.jsonl", [1] * 5000)
    long = jsonl(tmp_path / "b.jsonl", [20] * 5000)
    found = spread(short, long)
    assert found.because == "estimated from the lines of 0 MiB spread over the file"
    # Of 14 % of the bytes, which are short rows, 2 of 16 parts are sampled: 12.5 %.
    assert found.lines == pytest.approx(10_000, rel=0.1)
    assert found.total(words_in(found)) == pytest.approx(105_000, rel=0.05)

"""Runs of different rows are not compared in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from expert.insight.ladder.comparison import doubts_about
from expert.insight.page.html import page_html
from tests.insight.pages import page_of, usual, words_of, write_run
from tests.wording import wording


def trained_on(
    folder: Path,
    path: str,
    rows: int,
    *,
    told: str | None = None,
    base: str = "tiny",
    validation: str = "10% of the training rows",
) -> Path:
    plan = {
        "data": {"dataset": {"path": path}, "validation": validation},
        "length": {"rows": rows},
        "model": {"name": base},
    }
    data: list[dict[str, Any]] = [{"event": "data", "split": "train", "rows": told}] if told else []
    events = usual()
    return write_run(folder, [events[0], *data, *events[1:]], plan=plan)


def doubts(one: Path, other: Path) -> list[str]:
    found = doubts_about(one, other)
    page = page_of(one, other)
    assert all(text in words_of(page) for text in found)  # the page says what the command says
    assert ("different data" in page_html(page)) == any("different data" in t for t in found)
    return found


def test_runs_of_different_files_are_told_apart(tmp_path: Path):
    one = trained_on(tmp_path / "one", "a.jsonl", 1200)
    other = trained_on(tmp_path / "other", "/home/me/b.jsonl", 300)
    [text] = doubts(one, other)
    assert text.startswith(wording("these-runs-trained-on"))


def test_the_rows_decide_and_not_the_name_of_their_file(tmp_path: Path):
    one = trained_on(tmp_path / "one", "a.jsonl", 100, told="aa")
    same = trained_on(tmp_path / "same", "/moved/b.jsonl", 100, told="aa")
    other = trained_on(tmp_path / "other", "a.jsonl", 100, told="bb")
    assert doubts(one, same) == []
    [text] = doubts(one, other)
    assert "different data" in text


def test_the_same_file_with_more_rows_is_other_data(tmp_path: Path):
    one = trained_on(tmp_path / "one", "a.jsonl", 100)
    assert doubts(one, trained_on(tmp_path / "same", "a.jsonl", 100)) == []
    assert len(doubts(one, trained_on(tmp_path / "more", "a.jsonl", 200))) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"validation": "val.jsonl"}, wording("validated-on-different-rows")),
        ({"base": "x"}, "base models"),
    ],
)
def test_other_validation_rows_and_other_bases_are_told(tmp_path: Path, change, words):
    one = trained_on(tmp_path / "one", "a.jsonl", 100, told="aa")
    [text] = doubts(one, trained_on(tmp_path / "other", "a.jsonl", 100, told="aa", **change))
    assert words in text

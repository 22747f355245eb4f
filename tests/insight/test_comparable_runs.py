"""Comparing runs trained on different rows gives a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from expert.insight.page.comparison import not_comparable
from expert.insight.page.render import page_html
from expert.insight.record import read_run
from tests.each import each
from tests.insight.pages import page_of, text_of, usual, write_run


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
    found = not_comparable([read_run(one), read_run(other)], [one.name, other.name])
    page = page_of(one, other)
    assert all(text in text_of(page_html(page)) for text in found)  # the page says the same
    assert ("different data" in page_html(page)) == any("different data" in t for t in found)
    return found


HASHED = {"path": "a.jsonl", "rows": 100, "told": "aa"}


@each(
    ("first", "second", "words"),
    [
        (
            {"rows": 1200},
            {"path": "/me/b.jsonl", "rows": 300},
            "different data (one: a.jsonl; other: b.jsonl)",
        ),
        ({}, {}, None),
        ({}, {"rows": 200}, "different data"),  # the same file with more rows
        # The rows decide, not the name of their file.
        (HASHED, {**HASHED, "path": "/moved/b.jsonl"}, None),
        (HASHED, {**HASHED, "told": "bb"}, "different data"),
        (HASHED, {**HASHED, "validation": "val.jsonl"}, "validated on different rows"),
        (HASHED, {**HASHED, "base": "x"}, "base models"),
    ],
)
def test_incomparable_runs_give_a_warning(tmp_path: Path, first, second, words):
    usual_data = {"path": "a.jsonl", "rows": 100}
    one = trained_on(tmp_path / "one", **{**usual_data, **first})
    found = doubts(one, trained_on(tmp_path / "other", **{**usual_data, **second}))
    assert len(found) == (words is not None)
    assert all(words in text for text in found)

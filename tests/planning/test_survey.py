"""Rows and tokens estimated from the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from expert.manifest.schema.dataset import DatasetSpec, Task
from expert.planning import survey as survey_module
from expert.planning.survey import Survey, local_path, survey_data, survey_file
from tests.each import each


def survey(folder: Path, characters: bool = False, **spec: object) -> Survey:
    return survey_data(DatasetSpec.model_validate(spec), folder, characters=characters)


@each(
    ("name", "text", "rows"),
    [
        ("a.jsonl", '{"a":1}\n{"a":2}\n', 2),
        ("a.jsonl", '{"a":1}\n{"a":2}', 2),
        ("a.csv", "q,a\n1,2\n3,4\n", 2),
        ("a.jsonl", "", 0),
    ],
)
def test_lines_are_counted(tmp_path, name, text, rows):
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert survey_file(tmp_path / name).rows == rows


def test_rows_of_tasks_and_up_to_max_samples_are_counted(tmp_path):
    (tmp_path / "sized.jsonl").write_text(("x" * 379 + "\n") * 100, encoding="utf-8")
    by_size = survey(tmp_path, path="sized.jsonl")
    assert (by_size.tokens, by_size.mean_tokens) == (10_000, 100)
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n" * 100, encoding="utf-8")
    every, some = (survey(tmp_path, path="a.jsonl", max_samples=most) for most in (None, 25))
    assert (some.rows, some.tokens) == (25, round((every.tokens or 0) / 4))
    assert some.because == "max_samples; lines counted"
    assert survey(tmp_path, path="a.jsonl", max_samples=100) == every
    tasks = {"a": Task(train="a.jsonl", weight=0.5), "b": Task(train="b.jsonl", weight=2)}
    assert survey(tmp_path, tasks=tasks).rows == 250
    assert survey(tmp_path, tasks=tasks, max_samples=20).rows == 50
    assert local_path("data\\train.jsonl", tmp_path) == tmp_path / "data" / "train.jsonl"


@each(
    ("spec", "because"),
    [
        ({"path": "train.jsonl"}, "train.jsonl is not there"),
        ({"path": "data/train.tsv"}, "is not there"),
        ({"path": "b-mc2/sql-create-context"}, "is a hub id, not downloaded yet"),
        ({"path": "shakespeare"}, "the corpus shakespeare has not been read yet"),
        ({"path": "a.jsonl", "streaming": True}, "streamed rows are not counted in advance"),
        ({"tasks": {"a": {"train": "a.jsonl"}}}, "a.jsonl is not there"),
        ({"path": "rows"}, "a folder"),
        ({"path": "~nosuchuser/a.jsonl"}, "is not there"),
        ({"path": "x" * 400 + ".jsonl"}, "cannot be read"),
    ],
)
def test_what_cannot_be_counted_says_why(tmp_path, spec, because):
    (tmp_path / "rows").mkdir()
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    found = survey(tmp_path, **spec)
    assert found.rows is None
    assert because in found.because


def test_characters_of_a_corpus_are_its_bytes_up_to_the_limit(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 1000, encoding="utf-8")
    assert survey(tmp_path, True, path="a.txt").tokens == 1000
    assert survey(tmp_path, True, path="a.txt", max_chars=300).tokens == 300


def test_rows_of_a_large_file_are_counted_by_parts_all_over_it(tmp_path, monkeypatch):
    monkeypatch.setattr(survey_module, "_COUNTED_BYTES", 16_000)
    lines = ["x" * 9] * 5000 + ["x" * 99] * 5000  # its first part alone would give 55,000
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    found = survey_file(tmp_path / "a.jsonl")
    # 9 % of the bytes are short lines, sampled by 1 of 16 parts and a piece of another.
    assert found.rows == pytest.approx(10_000, rel=0.2)
    assert found.because == "estimated from the lines of 0 MiB spread over the file"
    monkeypatch.setattr(survey_module, "_COUNTED_BYTES", 1600)
    (tmp_path / "a.jsonl").write_text(("x" * 999 + "\n") * 5)  # too long for the parts
    assert survey_file(tmp_path / "a.jsonl").rows is None

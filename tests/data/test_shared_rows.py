"""Files for validation and test that hold rows of the training file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from expert.run.open import prepare
from tests.each import each
from tests.jobs.runs import ROWS, write_expert

NEW = [{"instruction": f"spell {n}", "response": "letters " * n} for n in range(1, 6)]
SPLITS = ("validation", "test")


def an_expert(folder: Path, *, base: Any = "tiny", **files: Any) -> Path:
    """An expert with files of its own for the splits that are named."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        text = "\n".join(map(json.dumps, rows))
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    paths = {f"{name}_path": f"{name}.jsonl" for name in files}
    return write_expert(folder, base, {"epochs": 1}, dataset=paths)


@each("split", SPLITS)
def test_evaluation_rows_that_are_trained_on_are_counted(tmp_path, split):
    file = an_expert(tmp_path, **{split: [NEW[0], NEW[1], ROWS[6], ROWS[3]]})
    made = prepare(file, overrides=("training.dataset.validation_split=0",))
    (doubt,) = made.doubts
    assert doubt.path == f"training.dataset.{split}_path"
    where = f"(row 3 of {split}.jsonl is row 7 of train.jsonl)"
    assert f"{split}: 2 of 4 rows are in the training rows as well {where}" in doubt.text
    assert f"expert dataset check --manifest {file} " in doubt.text


def test_rows_that_are_new_or_answer_the_same_otherwise_are_not_told(tmp_path):
    others = [{**row, "response": f"{row['response']}!"} for row in ROWS[:4]]
    rows = {split: [*NEW, *others] for split in SPLITS}
    assert prepare(an_expert(tmp_path, **rows)).doubts == ()


def test_rows_of_several_tasks_are_named_by_the_file_they_stand_in(tmp_path):
    tasks = {}
    for name, rows, judged in (("a", ROWS[:9], NEW[:2]), ("b", ROWS[9:], [NEW[2], ROWS[10]])):
        for kind, lines in (("t", rows), ("v", judged)):
            text = "\n".join(map(json.dumps, lines))
            (tmp_path / f"{name}-{kind}.jsonl").write_text(text, encoding="utf-8")
        tasks[name] = {"train": f"{name}-t.jsonl", "valid": f"{name}-v.jsonl"}
    dataset = {"path": None, "tasks": tasks}
    (doubt,) = prepare(write_expert(tmp_path, "tiny", {}, dataset=dataset)).doubts
    told = "1 of 4 rows is in the training rows as well (row 2 of b-v.jsonl is row 2 of b-t.jsonl)"
    assert told in doubt.text

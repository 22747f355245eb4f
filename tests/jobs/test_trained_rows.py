"""Test rows that a run or its baseline may have been trained on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from expert.cli.validate import gate_lines
from expert.core.errors import ExpertError
from expert.jobs.validate.validate import validate
from tests.jobs.runs import run, write_expert
from tests.jobs.validated_runs import ROWS, YES, own_run, written


def append_a_row(folder: Path) -> None:
    with (folder / "train.jsonl").open("a", encoding="utf-8") as stream:
        stream.write("\n" + json.dumps({"instruction": "say more", "response": "more"}))


def test_rows_are_not_held_out_of_data_that_changed_since_the_run(tmp_path):
    folder = own_run(tmp_path)
    assert validate(folder, device="cpu", min_accuracy=0.0).result.rows.examples == 5
    append_a_row(tmp_path)
    words = r"held out of train.jsonl.*: the data, or how its .* changed since .*--test-set FILE"
    with pytest.raises(ExpertError, match=words):
        validate(folder, device="cpu")
    (tmp_path / "datasets_optimized").rename(tmp_path / "elsewhere")
    with pytest.raises(ExpertError, match="the data, or how its rows are read, changed since"):
        validate(folder, device="cpu")
    # The refusal comes before anything is prepared from the other rows.
    assert not list(tmp_path.glob("datasets_optimized/tokens-*"))
    # Rows given by the user may be used even if the training rows have changed.
    named = tmp_path / "test.jsonl"
    done = validate(folder, test_set=named, device="cpu", min_accuracy=0.0, limit=2)
    assert done.result.rows.examples == 2


def test_a_run_resumed_with_other_rows_has_no_held_out_rows(tmp_path):
    folder = own_run(tmp_path)
    append_a_row(tmp_path)
    manifest = tmp_path / "manifest.json"
    text = manifest.read_text(encoding="utf-8").replace('"max_steps": 2', '"max_steps": 4')
    manifest.write_text(text, encoding="utf-8")
    run(manifest, resume=str(folder), allow_changed=True)
    with pytest.raises(ExpertError, match="was resumed with other rows than it started with"):
        validate(folder, device="cpu")


@pytest.mark.parametrize("kept", ["events", "checkpoints", "neither"])
def test_trained_rows_are_known_from_events_or_checkpoints(tmp_path, kept):
    folder = own_run(tmp_path)
    if kept != "checkpoints":
        shutil.rmtree(folder / "checkpoints")
    if kept != "events":
        lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
        others = [line for line in lines if '"event": "data"' not in line]
        assert len(others) < len(lines)
        (folder / "events.jsonl").write_text("\n".join(others) + "\n", encoding="utf-8")
    if kept == "neither":
        with pytest.raises(ExpertError, match="does not record which rows it was trained on"):
            validate(folder, device="cpu")
    else:
        done = validate(folder, device="cpu", min_accuracy=0.0)
        assert done.test_set == "rows held out of train.jsonl"


# --- rows that a baseline may have been trained on -----------------------------------------------


def test_a_baseline_trained_on_test_rows_or_on_rows_since_changed_is_refused(tmp_path):
    folder, other = own_run(tmp_path / "a"), own_run(tmp_path / "b", seed=7)
    everything = own_run(tmp_path / "c", validation_split=0)
    with pytest.raises(ExpertError, match="trained on 5 of the 5 rows"):
        validate(folder, baseline=everything, device="cpu")
    words = r"b.*: the baseline was trained on (\d) of the 5 rows it would be .*--test-set"
    with pytest.raises(ExpertError, match=words):
        validate(folder, baseline=other, device="cpu")
    named = tmp_path / "a" / "test.jsonl"
    done = validate(folder, test_set=named, baseline=other, device="cpu", min_accuracy=0.0, limit=2)
    assert done.baseline is not None
    # One whose rows are not as they were any more is refused as the run itself would be.
    append_a_row(tmp_path / "b")
    words = "b.*: the baseline may have been trained on .*, changed since .*, or restore the data"
    with pytest.raises(ExpertError, match=words):
        validate(folder, baseline=other, device="cpu")
    (tmp_path / "b").rename(tmp_path / "d")
    (tmp_path / "d" / "train.jsonl").unlink()
    (moved,) = (tmp_path / "d" / "runs").iterdir()
    with pytest.raises(ExpertError, match=r"may have been trained on .*data was moved or deleted"):
        validate(folder, baseline=moved, device="cpu")


# --- cases that the run itself was trained on ----------------------------------------------------


def judged_by(run_folder: Path, rows: list[dict[str, Any]]) -> Any:
    file = run_folder.parents[1] / "judged.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return validate(run_folder, test_set=file, device="cpu", min_accuracy=0.0)


NEW = [{"instruction": f"sing {n}", "output": YES} for n in range(10)]


def test_cases_trained_on_are_reported_and_left_out_of_the_gate(tmp_path):
    folder = own_run(tmp_path, rows=ROWS, validation_split=0)
    done = judged_by(folder, [*ROWS[:12], *NEW])
    assert [each.learnt for each in done.result.cases] == [True] * 12 + [False] * 10
    assert done.result.standing.score.cases == 10
    [(words, style)] = [line for line in gate_lines(done) if "training rows" in line[0]]
    assert words.startswith(
        "⚠ 12 of 22 cases were also in the training rows; accuracy without them "
    )
    assert words.endswith(" of 10), which the gate counts")
    assert style == "yellow"
    found = written(folder)
    assert (found["learnt"]["cases"], found["learnt"]["others"]) == (12, 10)
    assert found["learnt"]["left_out_at_the_gate"] is True
    assert [case["learnt"] for case in found["cases"]] == [True] * 12 + [False] * 10


def test_a_note_says_why_it_is_unknown_which_cases_were_trained_on(tmp_path):
    folder = own_run(tmp_path, rows=ROWS, validation_split=0)
    append_a_row(tmp_path)
    notes = judged_by(folder, NEW[:2]).notes
    assert any(
        note.startswith(
            "unknown whether the run was trained on these cases: the data, or how its rows are read"
        )
        for note in notes
    )
    write_expert(tmp_path, "unused", {}, rows=ROWS)
    shutil.rmtree(tmp_path / "datasets_optimized")
    notes = judged_by(folder, NEW[:2]).notes
    assert any("these cases: the prepared rows are gone" in note for note in notes)
    assert not list(tmp_path.glob("datasets_optimized/tokens-*"))

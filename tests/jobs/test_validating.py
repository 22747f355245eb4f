"""`expert.validate` on real runs: rows, answers, the gate, and what is written."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import expert
from expert.core.rundir import RunFolderError
from expert.data.records import DataError
from expert.jobs.choosing import NothingTrained
from expert.jobs.export_checks import CannotExport
from expert.jobs.exporting import export
from expert.jobs.test_sets import NoTestSet
from expert.jobs.validating import CannotValidate, validate
from expert.judging.oracle import UnknownDomain
from tests.jobs.runs import ROWS as RUN_ROWS
from tests.jobs.runs import WORDS, base_model, events_of, run, write_expert
from tests.jobs.trained_runs import finished, finished_characters, place

YES = '{"ok": true}'
ROWS = [{"instruction": f"say {word} {n}", "output": YES} for n in range(6) for word in WORDS]
TESTS = [
    {
        "id": f"{word}-{n}",
        "task": word,
        "instruction": f"say {word} {n}",
        "output": '{ "ok" : true }',
    }
    for n in range(6, 8)
    for word in WORDS
]


@pytest.fixture(autouse=True)
def as_it_was():
    """Runs that other tests look at too keep no verdict of these."""
    yield
    for run_folder in place().glob("*/runs/*/"):
        (run_folder / "validation.json").unlink(missing_ok=True)


@cache
def learnt() -> Path:
    """The run of an expert that has learnt to answer one JSON object, whatever it is asked."""
    config = {
        "epochs": 6,
        "adapter_type": "full",
        "learning_rate": 3e-3,
        "save_steps": 6,
        "save_total_limit": None,
    }
    folder = place() / "yes"
    path = write_expert(
        folder,
        base_model(place() / "models"),
        config,
        rows=ROWS,
        dataset={"test_path": "test.jsonl"},
        capabilities=["format:json"],
    )
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, TESTS)), encoding="utf-8")
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["training"]["decoding"] = {"max_new_tokens": 12}
    path.write_text(json.dumps(manifest), encoding="utf-8")
    return run(path).folder


def written(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "validation.json").read_text(encoding="utf-8")))


def test_an_expert_that_learnt_its_task_passes_and_its_base_does_not():
    done = validate(learnt(), baseline="base", device="cpu")
    assert done.domain == "json"
    assert done.gate.passed
    assert done.reached.score.accuracy == 1.0
    # Blanks differ, so that only the parser can tell that it is right.
    assert sum(each.exact for each in done.reached.cases) == 0
    assert done.baseline is not None
    assert done.baseline.score.accuracy == 0.0
    assert done.baseline.rows.loss > done.reached.rows.loss
    assert done.comparison is not None
    assert len(done.comparison.wins) == len(TESTS)
    found = written(learnt())
    assert found["version"] == 1
    assert (found["accuracy"], found["passed"], found["failed"]) == (1.0, 16, 0)
    assert found["gate"] == {"passed": True, "reasons": []}
    assert found["wins"] == [row["id"] for row in TESTS]
    assert found["baseline"]["checkpoint"] == "base"
    assert found["tasks"]["cat"] == {"accuracy": 1.0, "passed": 2, "cases": 2}
    assert found["cases"][0]["prompt"] == TESTS[0]["instruction"]
    assert {"decoding", "seed", "min_accuracy", "max_regression"} <= set(found["settings"])


def test_the_loss_is_the_one_that_the_run_itself_found_on_its_test_rows():
    [finished_event] = events_of(learnt(), "finished")
    done = validate(learnt(), device="cpu")
    # Rows are padded to other widths, so that sums are rounded otherwise: 1e-7 of float32 a few
    # times over.
    assert done.reached.rows.loss == pytest.approx(finished_event["test_loss"], rel=1e-5)
    assert done.reached.rows.examples == len(TESTS)


def test_a_gate_that_fails_says_why_and_the_answers_are_kept():
    done = validate(finished("lora"), device="cpu", limit=3)
    assert not done.gate.passed
    assert done.gate.reasons == ("accuracy 0.0% is below 95.0%",)
    assert done.domain == "text"
    assert done.test_set.startswith("3 of 5 of ")
    found = written(finished("lora"))
    assert found["gate"]["passed"] is False
    assert len(found["cases"]) == 3
    assert found["cases"][0]["reason"].startswith("the text is another one")


def test_rows_that_a_run_held_out_are_found_again_and_were_not_learnt():
    done = validate(finished("lora"), device="cpu", min_accuracy=0.0)
    assert done.test_set == "rows held out of train.jsonl"
    [last] = events_of(finished("lora"), "eval")[-1:]
    assert done.reached.rows.examples == 5
    # The same rows as the run's own evaluation: the loss of its last update agrees.
    assert done.reached.rows.loss == pytest.approx(last["loss"], rel=1e-5)


def test_all_checkpoints_are_compared_and_the_best_is_named():
    done = validate(learnt(), checkpoints="all", device="cpu", limit=6)
    names = [each.name for each in done.checkpoints]
    assert names[-1] == "final"
    assert names[:-1] == sorted(path.name for path in (learnt() / "checkpoints").iterdir())
    assert done.best is not None
    found = written(learnt())
    assert [each["checkpoint"] for each in found["checkpoints"]] == names
    assert found["best_checkpoint"] == done.best.name
    accuracies = [each.score.accuracy or 0.0 for each in done.checkpoints]
    assert done.best.score.accuracy == max(accuracies)
    assert len({each.rows.loss for each in done.checkpoints}) > 1


def test_another_run_is_a_baseline():
    done = validate(
        finished("lora"), baseline=finished("dora"), device="cpu", min_accuracy=0.0, limit=3
    )
    assert done.baseline is not None
    assert done.baseline.run == str(finished("dora"))
    assert done.gate.passed


def test_an_expert_is_named_by_the_folder_of_its_manifest(tmp_path):
    done = validate(learnt().parents[1], device="cpu", limit=4)
    assert done.folder == learnt()
    with pytest.raises(RunFolderError, match="there is no run of demo under"):
        validate(write_expert(tmp_path, "tiny", {}).parent)


def test_cases_of_a_file_are_asked_as_rows_are_learnt(tmp_path):
    cases = [
        {"id": "a", "instruction": "say", "input": "cat 9", "expected": {"ok": True}},
        {"id": "b", "instruction": "say dog", "expected": "no", "domain": "text"},
    ]
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"domain": "json", "cases": cases}), encoding="utf-8")
    done = validate(learnt(), test_set=path, device="cpu")
    first, second = done.reached.cases
    assert first.case.prompt == "say\n\nInput:\ncat 9"
    assert first.judgement.passed is True
    assert (second.judgement.passed, second.case.expected) == (False, "no")


def test_the_check_of_a_row_reaches_the_judge(tmp_path):
    rows = [
        {"instruction": "say cat", "output": "{}", "check": {"schema": {"required": ["ok"]}}},
        {"instruction": "say cat", "output": "{}", "check": {"schema": {"required": ["no"]}}},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    done = validate(learnt(), test_set=path, device="cpu")
    assert [each.judgement.passed for each in done.reached.cases] == [True, False]
    assert done.test_set == str(path)


def test_a_corpus_has_a_loss_and_nothing_to_answer():
    done = validate(finished_characters(), device="cpu", min_accuracy=0.0)
    assert done.reached.cases == ()
    assert done.reached.rows.token_accuracy > 0.5
    assert done.gate.passed
    assert any("plain text" in note for note in done.notes)
    refused = validate(finished_characters(), device="cpu")
    assert refused.gate.reasons == ("no answer was judged, so that no accuracy is known",)


def test_packages_that_are_missing_are_told(monkeypatch):
    from expert.judging import oracle

    monkeypatch.setitem(oracle.PACKAGES, "json", ("no_such_package",))
    done = validate(learnt(), device="cpu", limit=2)
    assert any("no-such-package not installed" in note for note in done.notes)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"test_set": "nothing.jsonl"}, NoTestSet, "--test-set nothing.jsonl: there is no such"),
        ({"domain": "cobol"}, UnknownDomain, "--domain cobol: is not known"),
        ({"checkpoint": "99"}, NothingTrained, "there is no checkpoint of update 99"),
        ({"checkpoints": "some"}, CannotValidate, "write --checkpoints all"),
        ({"baseline": "nowhere", "limit": 1}, RunFolderError, "nowhere: there is no such folder"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(given, error, text):
    with pytest.raises(error) as raised:
        validate(learnt(), device="cpu", **given)
    assert text in str(raised.value)


def test_rows_that_cannot_be_read_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"instruction": "a", "output": ""}', encoding="utf-8")
    with pytest.raises(DataError, match="the answer is empty"):
        validate(learnt(), test_set=path, device="cpu")
    path.write_text('{"instruction": "a", "output": "b", "check": 3}', encoding="utf-8")
    with pytest.raises(DataError, match="column 'check' is no JSON object"):
        validate(learnt(), test_set=path, device="cpu")


def test_a_test_set_with_other_columns_is_named(tmp_path):
    path = tmp_path / "ok.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(NoTestSet) as raised:
        validate(learnt(), test_set=path, device="cpu")
    assert str(raised.value).startswith(f"--test-set {path}: no column holds the request")
    assert str(raised.value).endswith("(name its columns as those of the rows it was trained on)")


def test_a_baseline_that_is_not_there_is_told_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr("expert.jobs.test_sets.find_test_set", None)
    with pytest.raises(RunFolderError, match="nowhere: there is no such folder"):
        validate(learnt(), baseline="nowhere", device="cpu")


def test_data_that_was_moved_is_asked_for(tmp_path):
    copy = tmp_path / "deep" / "runs" / "demo-20260101-000000"
    shutil.copytree(finished("lora"), copy)
    plan = json.loads((copy / "plan.json").read_text(encoding="utf-8"))
    plan["data"]["cache"] = str(tmp_path / "gone" / "datasets_optimized" / "demo")
    plan["watch"]["output_dir"] = str(tmp_path / "gone" / "runs")
    (copy / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    with pytest.raises(NoTestSet, match="the data of the run is not where it was"):
        validate(copy, device="cpu")


def test_the_function_is_offered_by_the_package():
    assert expert.validate is validate


# --- exporting afterwards ------------------------------------------------------------------------


def with_validation(tmp_path: Path, found: object) -> Path:
    copy = tmp_path / "demo-20260101-000000"
    shutil.copytree(finished("lora"), copy)
    text = found if isinstance(found, str) else json.dumps(found)
    (copy / "validation.json").write_text(text, encoding="utf-8")
    return copy


def test_a_run_that_failed_the_gate_is_not_exported_unless_told_otherwise(tmp_path):
    gate = {"passed": False, "reasons": ["accuracy 10.0% is below 95.0%"]}
    copy = with_validation(tmp_path, {"gate": gate, "checkpoint": "final"})
    with pytest.raises(CannotExport) as raised:
        export(copy, tmp_path / "out", device="cpu")
    assert "the gate is not passed: accuracy 10.0% is below 95.0%" in str(raised.value)
    assert "--allow-failed" in str(raised.value)
    assert not (tmp_path / "out").exists()
    done = export(copy, tmp_path / "out", device="cpu", allow_failed=True)
    assert "the gate is not passed" in done.warnings()[0]


def test_a_validation_that_cannot_be_read_is_no_pass(tmp_path):
    with pytest.raises(CannotExport, match="the file cannot be read"):
        export(with_validation(tmp_path, "{"), tmp_path / "out", device="cpu")


def test_another_state_than_the_one_that_passed_is_exported_with_a_warning(tmp_path):
    passed = {"gate": {"passed": True, "reasons": []}, "checkpoint": "final"}
    copy = with_validation(tmp_path, passed)
    assert export(copy, tmp_path / "one", device="cpu").warnings() == []
    done = export(copy, tmp_path / "two", device="cpu", checkpoint="3")
    assert "the gate was passed by final, and step-000003 is exported" in done.warnings()[0]


def test_a_few_of_the_rows_do_not_take_the_place_of_all_of_them():
    from expert.cli.validate_view import gate_lines

    validate(learnt(), device="cpu")
    few = validate(learnt(), device="cpu", limit=4)
    assert len(written(learnt())["cases"]) == len(TESTS)
    kept = learnt() / "validation-partial.json"
    assert len(json.loads(kept.read_text(encoding="utf-8"))["cases"]) == 4
    assert "validation.json, which judged 16 of these cases, is kept" in few.notes
    assert (f"wrote {kept}", "dim") in gate_lines(few)
    kept.unlink()
    # Another state, or another set, was not judged before.
    validate(learnt(), device="cpu", limit=4, checkpoint="6")
    assert written(learnt())["partial"] == {"test_set": "test rows: test.jsonl", "of": 16}
    validate(learnt(), device="cpu", limit=2, checkpoint="6")
    assert len(written(learnt())["cases"]) == 4
    kept.unlink()


def test_a_state_that_learnt_on_since_is_judged_anew_by_a_few_rows():
    validate(learnt(), device="cpu")
    later = time.time() + 60
    os.utime(learnt() / "final" / "DONE", (later, later))
    validate(learnt(), device="cpu", limit=4)
    assert len(written(learnt())["cases"]) == 4


def test_a_gate_that_a_few_of_the_rows_passed_is_not_enough_for_an_export(tmp_path):
    cases = [{"passed": True}] * 5
    passed = {"gate": {"passed": True, "reasons": []}, "checkpoint": "final", "cases": cases}
    copy = with_validation(tmp_path, {**passed, "partial": {"test_set": "rows", "of": 40}})
    with pytest.raises(CannotExport, match=r"is passed by 5 of 40 rows only  \(judge them all"):
        export(copy, tmp_path / "out", device="cpu")
    done = export(copy, tmp_path / "out", device="cpu", allow_failed=True)
    assert "passed by 5 of 40 rows only" in done.warnings()[0]
    many = {**passed, "cases": cases * 10, "partial": {"test_set": "rows", "of": 4000}}
    (copy / "validation.json").write_text(json.dumps(many), encoding="utf-8")
    assert export(copy, tmp_path / "two", device="cpu").judged == "50 cases, a part of 4000 rows"


def test_the_card_and_the_export_say_how_well_it_answers(tmp_path):
    from expert.cli.run_commands import exported_lines

    found = {
        "gate": {"passed": True, "reasons": []},
        "checkpoint": "final",
        "test_set": "rows held out",
        "cases": [{}] * 40,
        "accuracy": 0.975,
        "interval": [0.871, 0.996],
        "learnt": {"cases": 20, "accuracy_of_others": 0.95},
    }
    done = export(with_validation(tmp_path, found), tmp_path / "out", device="cpu")
    words = "accuracy 97.5% of 40 cases (95 % interval 87.1% to 99.6%)"
    assert (f"  validated: {words}", "dim") in exported_lines(done)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    for line in (
        "| answers right | 97.5% |",
        "| 95 % interval | 87.1% to 99.6% |",
        "| cases | 40 (rows held out) |",
        "| cases that were also learnt | 20; answers right without them: 95.0% |",
        "| quality gate | passed (final) |",
    ):
        assert line in card
    without = export(finished("lora"), tmp_path / "two", device="cpu")
    assert "not validated" in exported_lines(without)[2][0]
    card = (tmp_path / "two" / "README.md").read_text(encoding="utf-8")
    assert "| answers | not judged: expert validate was not run |" in card


# --- rows that a run may have learnt -------------------------------------------------------------


def own_run(folder: Path, *, rows: Any = RUN_ROWS, **dataset: Any) -> Path:
    """A short run that nobody else looks at, with its rows beside its manifest."""
    base = base_model(place() / "models")
    config = {"max_steps": 2, "save_steps": 1, "save_total_limit": None}
    config |= {key: dataset.pop(key) for key in ("seed", "max_seq_length") if key in dataset}
    return run(write_expert(folder, base, config, dataset=dataset, rows=rows)).folder


def append_a_row(folder: Path) -> None:
    with (folder / "train.jsonl").open("a", encoding="utf-8") as stream:
        stream.write("\n" + json.dumps({"instruction": "say more", "response": "more"}))


def test_rows_are_not_held_out_of_data_that_changed_since_the_run(tmp_path):
    folder = own_run(tmp_path)
    assert validate(folder, device="cpu", min_accuracy=0.0).reached.rows.examples == 5
    append_a_row(tmp_path)
    words = r"held out of train.jsonl.*: the data changed since the run  \(.*--test-set FILE"
    with pytest.raises(NoTestSet, match=words):
        validate(folder, device="cpu")
    (tmp_path / "datasets_optimized").rename(tmp_path / "elsewhere")
    with pytest.raises(NoTestSet, match="the data, or how its rows are read, changed since"):
        validate(folder, device="cpu")
    # The refusal comes before anything is prepared from the other rows.
    assert not list(tmp_path.glob("datasets_optimized/tokens-*"))


def test_rows_that_are_read_otherwise_than_in_the_run_are_told_from_changed_data(
    tmp_path, monkeypatch
):
    from expert.jobs.preparing import Builder

    folder = own_run(tmp_path)

    recipe_of = Builder.recipe_of

    def with_other_columns(builder: Builder, source: Any, name: str) -> Any:
        recipe, place = recipe_of(builder, source, name)
        return replace(recipe, columns="others"), place

    monkeypatch.setattr(Builder, "recipe_of", with_other_columns)
    with pytest.raises(NoTestSet, match="those it learnt: the columns changed since the run"):
        validate(folder, device="cpu")


def test_test_rows_of_their_own_may_be_used_whatever_became_of_the_training_rows(tmp_path):
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, TESTS)), encoding="utf-8")
    folder = own_run(tmp_path, test_path="test.jsonl")
    append_a_row(tmp_path)
    done = validate(folder, device="cpu", min_accuracy=0.0, limit=2)
    assert done.test_set == "2 of 16 of test rows: test.jsonl"


def test_a_named_test_set_may_be_used_whatever_became_of_the_training_rows(tmp_path):
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, TESTS)), encoding="utf-8")
    folder = own_run(tmp_path)
    append_a_row(tmp_path)
    named = tmp_path / "test.jsonl"
    done = validate(folder, test_set=named, device="cpu", min_accuracy=0.0, limit=2)
    assert done.reached.rows.examples == 2


def test_a_run_that_went_on_with_other_rows_has_held_none_out(tmp_path):
    folder = own_run(tmp_path)
    append_a_row(tmp_path)
    manifest = tmp_path / "manifest.json"
    text = manifest.read_text(encoding="utf-8").replace('"max_steps": 2', '"max_steps": 4')
    manifest.write_text(text, encoding="utf-8")
    run(manifest, resume=str(folder), allow_changed=True)
    with pytest.raises(NoTestSet, match="went on with other rows than it began with"):
        validate(folder, device="cpu")


@pytest.mark.parametrize("kept", ["events", "checkpoints", "neither"])
def test_what_was_learnt_is_known_by_the_events_or_by_the_checkpoints(tmp_path, kept):
    folder = own_run(tmp_path)
    if kept != "checkpoints":
        shutil.rmtree(folder / "checkpoints")
    if kept != "events":
        lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
        others = [line for line in lines if '"event": "data"' not in line]
        assert len(others) < len(lines)
        (folder / "events.jsonl").write_text("\n".join(others) + "\n", encoding="utf-8")
    if kept == "neither":
        with pytest.raises(NoTestSet, match="does not tell which rows were learnt"):
            validate(folder, device="cpu")
    else:
        done = validate(folder, device="cpu", min_accuracy=0.0)
        assert done.test_set == "rows held out of train.jsonl"


def test_a_run_of_an_earlier_version_is_known_by_the_folder_of_its_tokens(tmp_path):
    folder = own_run(tmp_path)
    shutil.rmtree(folder / "checkpoints")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    for event in events:
        if event["event"] == "data":  # such versions said less
            del event["key"], event["index"]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "events.jsonl").write_text(lines, encoding="utf-8")
    done = validate(folder, device="cpu", min_accuracy=0.0)
    assert done.test_set == "rows held out of train.jsonl"
    append_a_row(tmp_path)
    with pytest.raises(NoTestSet, match="the data changed since the run"):
        validate(folder, device="cpu")


# --- rows that a baseline may have learnt --------------------------------------------------------


def test_a_baseline_that_held_out_other_rows_is_refused_with_how_many_it_has_learnt(tmp_path):
    folder, other = own_run(tmp_path / "a"), own_run(tmp_path / "b", seed=7)
    words = (
        r"b.*: the baseline has learnt (\d) of the 5 rows it would be judged by \(rows held out of "
        r"train.jsonl\)  \(name rows that neither run has learnt with --test-set FILE, or compare"
    )
    with pytest.raises(NoTestSet, match=words):
        validate(folder, baseline=other, device="cpu")
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, TESTS)), encoding="utf-8")
    named = tmp_path / "test.jsonl"
    done = validate(folder, test_set=named, baseline=other, device="cpu", min_accuracy=0.0, limit=2)
    assert done.baseline is not None


def test_a_baseline_that_held_nothing_out_has_learnt_them_all(tmp_path):
    folder, other = own_run(tmp_path / "a"), own_run(tmp_path / "b", validation_split=0)
    with pytest.raises(NoTestSet, match="has learnt 5 of the 5 rows"):
        validate(folder, baseline=other, device="cpu")


def test_a_baseline_that_held_out_the_same_rows_may_read_them_otherwise(tmp_path):
    folder, other = own_run(tmp_path / "a"), own_run(tmp_path / "b", max_seq_length=32)
    done = validate(folder, baseline=other, device="cpu", min_accuracy=0.0, max_regression=1.0)
    assert done.baseline is not None
    assert done.baseline.run == str(other)


def test_a_row_that_is_there_twice_is_no_reason_where_the_run_has_learnt_it_too(tmp_path):
    twice = {"rows": [*RUN_ROWS, *RUN_ROWS]}
    folder = own_run(tmp_path / "a", **twice)
    other = own_run(tmp_path / "b", max_seq_length=32, **twice)
    done = validate(folder, baseline=other, device="cpu", min_accuracy=0.0, max_regression=1.0)
    assert done.baseline is not None


def test_a_baseline_whose_rows_are_no_more_as_they_were_is_refused_as_the_run_itself(tmp_path):
    folder, other = own_run(tmp_path / "a"), own_run(tmp_path / "b", seed=7)
    append_a_row(tmp_path / "b")
    words = (
        r"b.*: the baseline may have learnt the rows it would be judged by \(rows held out of "
        r"train.jsonl\): the data changed since the run  \(.*--test-set FILE, or put the data back"
    )
    with pytest.raises(NoTestSet, match=words):
        validate(folder, baseline=other, device="cpu")
    (tmp_path / "b").rename(tmp_path / "c")
    (tmp_path / "c" / "train.jsonl").unlink()
    (moved,) = (tmp_path / "c" / "runs").iterdir()
    with pytest.raises(NoTestSet, match=r"may have learnt .*: its data is not where it was"):
        validate(folder, baseline=moved, device="cpu")


# --- cases that the run itself has learnt --------------------------------------------------------


def own_run_without_validation(folder: Path) -> Path:
    return own_run(folder, rows=ROWS, validation_split=0)


def judged_by(run_folder: Path, rows: list[dict[str, Any]]) -> Any:
    file = run_folder.parents[1] / "judged.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return validate(run_folder, test_set=file, device="cpu", min_accuracy=0.0)


NEW = [{"instruction": f"sing {n}", "output": YES} for n in range(10)]


def test_cases_that_were_learnt_are_told_and_the_gate_is_judged_without_them(tmp_path):
    from expert.cli.validate_view import gate_lines

    folder = own_run_without_validation(tmp_path)
    done = judged_by(folder, [*ROWS[:12], *NEW])
    assert [each.learnt for each in done.reached.cases] == [True] * 12 + [False] * 10
    assert done.reached.standing.score.cases == 10
    [(words, style)] = [line for line in gate_lines(done) if "training rows" in line[0]]
    assert words.startswith(
        "⚠ 12 of 22 cases were also in the training rows; accuracy without them "
    )
    assert words.endswith(" of 10), by which the gate is judged")
    assert style == "yellow"
    found = written(folder)
    assert (found["learnt"]["cases"], found["learnt"]["others"]) == (12, 10)
    assert found["learnt"]["left_out_at_the_gate"] is True
    assert [case["learnt"] for case in found["cases"]] == [True] * 12 + [False] * 10


def test_with_too_few_other_cases_the_gate_is_judged_by_all_and_says_so(tmp_path):
    folder = own_run_without_validation(tmp_path)
    done = judged_by(folder, [*ROWS[:12], *NEW[:3]])
    assert done.reached.standing.score.cases == 15
    assert done.learnt_remark().endswith("too few for the gate, which is judged by all")
    assert judged_by(folder, ROWS[:3]).learnt_remark() == (
        "3 of 3 cases were also in the training rows: what was learnt by heart passes"
    )
    assert judged_by(folder, NEW[:3]).learnt_remark() == ""


def test_where_it_cannot_be_told_which_cases_were_learnt_a_note_says_why(tmp_path):
    folder = own_run_without_validation(tmp_path)
    append_a_row(tmp_path)
    notes = judged_by(folder, NEW[:2]).notes
    assert any(
        note.startswith("whether cases were learnt cannot be told: the data changed")
        for note in notes
    )
    write_expert(tmp_path, "unused", {}, rows=ROWS)
    shutil.rmtree(tmp_path / "datasets_optimized")
    notes = judged_by(folder, NEW[:2]).notes
    assert "whether cases were learnt cannot be told: the prepared rows are gone" in notes
    assert not list(tmp_path.glob("datasets_optimized/tokens-*"))


def test_rows_that_stand_twice_in_the_data_are_not_learnt_and_held_out(tmp_path):
    folder = own_run(tmp_path, rows=[*RUN_ROWS, *RUN_ROWS])
    done = validate(folder, device="cpu", min_accuracy=0.0)
    assert done.learnt is None
    assert len(done.reached.cases) == 10
    assert len({each.case.prompt for each in done.reached.cases}) == 5

"""`expert.validate` on real runs: rows, answers, the gate, and what is written."""

from __future__ import annotations

import json

import pytest

import expert
from expert.core.errors import ExpertError
from expert.data.records import DataError
from expert.jobs.validate.test_sets import NoTestSet
from expert.jobs.validate.validate import CannotValidate, validate
from expert.judging.oracles.oracle import UnknownDomain
from tests.each import each
from tests.jobs.runs import events_of, rewrite_events
from tests.jobs.trained_runs import finished, with_plan
from tests.jobs.validated_runs import TESTS, as_it_was, learnt, rows_file, written

__all__ = ["as_it_was"]  # a fixture for every test here: the runs are looked at by others too


def test_a_trained_expert_passes_and_its_base_does_not():
    done = validate(learnt(), baseline="base", device="cpu", min_accuracy=0.8)
    assert done.domain == "json"
    assert done.gate.passed
    assert done.result.score.accuracy == 1.0
    # Whitespace differs, so that only the parser finds it correct.
    assert not [each for each in done.result.cases if each.answer == each.case.expected]
    assert done.baseline.score.accuracy == 0.0
    assert done.baseline.rows.loss > done.result.rows.loss
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
    [finished_event] = events_of(learnt(), "finished")
    # Rows are padded to other widths, so that sums are rounded otherwise: 1e-7 of float32 a few
    # times over.
    assert done.result.rows.loss == pytest.approx(finished_event["test_loss"], rel=1e-5)
    assert done.result.rows.examples == len(TESTS)
    assert expert.validate is validate


def test_a_gate_that_fails_says_why_and_the_answers_are_kept():
    done = validate(finished("lora"), device="cpu", limit=3)
    assert not done.gate.passed
    assert done.gate.reasons == ("accuracy 0.0% is below 95.0%",)
    assert (done.domain, done.test_set[:8]) == ("text", "3 of 5: ")
    found = written(finished("lora"))
    assert (found["gate"]["passed"], len(found["cases"])) == (False, 3)
    assert found["cases"][0]["reason"].startswith("the text differs from the expected one")


def test_rows_that_a_run_held_out_are_found_again_and_were_not_learnt():
    done = validate(finished("lora"), device="cpu", min_accuracy=0.0)
    assert done.test_set == "rows held out of train.jsonl"
    [last] = events_of(finished("lora"), "eval")[-1:]
    assert done.result.rows.examples == 5
    # The same rows as the run's own evaluation: the loss of its last step agrees.
    assert done.result.rows.loss == pytest.approx(last["loss"], rel=1e-5)


def test_sixteen_right_answers_do_not_show_95_percent():
    from expert.cli.validate import gate_lines

    done = validate(learnt(), device="cpu")
    reason = "16 rows: accuracy 80.6% to 100.0%; to show 95.0% takes 73 rows"
    assert (done.gate.passed, done.gate.reasons) == (None, (reason,))
    assert ("? not enough to tell whether the gate passes", "bold yellow") in gate_lines(done)
    assert written(learnt())["gate"] == {"passed": None, "reasons": [reason]}


def test_all_checkpoints_are_compared_and_the_best_is_named():
    done = validate(learnt(), checkpoints="all", device="cpu", limit=6)
    names = [each.name for each in done.checkpoints]
    assert names[-1] == "final"
    assert names[:-1] == sorted(path.name for path in (learnt() / "checkpoints").iterdir())
    found = written(learnt())
    assert [each["checkpoint"] for each in found["checkpoints"]] == names
    assert found["best_checkpoint"] == done.best.name
    accuracies = [each.score.accuracy or 0.0 for each in done.checkpoints]
    assert done.best.score.accuracy == max(accuracies)
    assert len({each.rows.loss for each in done.checkpoints}) > 1


def test_cases_of_a_file_are_written_like_training_rows(tmp_path):
    cases = [
        {"id": "a", "instruction": "say", "input": "cat 9", "expected": {"ok": True}},
        {"id": "b", "instruction": "say dog", "expected": "no", "domain": "text"},
        {"instruction": "say cat", "expected": {}, "check": {"schema": {"required": ["ok"]}}},
        {"instruction": "say cat", "expected": {}, "check": {"schema": {"required": ["no"]}}},
    ]
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"domain": "json", "cases": cases}), encoding="utf-8")
    done = validate(learnt(), test_set=path, device="cpu")
    first, second, *_ = done.result.cases
    assert first.case.prompt == "say\n\nInput:\ncat 9"
    assert second.case.expected == "no"
    assert [each.judgement.passed for each in done.result.cases] == [True, False, True, False]


@each(
    ("data", "text"),
    [
        ("{", "JSON"),
        (
            {"version": 2, "cases": [{"instruction": "x", "expected": "y"}]},
            "is not a file of cases",
        ),
        ({"cases": []}, "is not a file of cases"),
        ({"cases": [3]}, "is not a file of cases"),
        ({"cases": [{"instruction": "x"}]}, "cases.json:1: "),
        ({"cases": [{"id": "a", "expected": "x"}]}, "case 1 asks nothing"),
        ({"cases": [{"instruction": "x", "expected": "y", "check": 3}]}, "'check' is not a JSON"),
    ],
)
def test_what_is_wrong_with_a_file_of_cases_is_said_with_its_place(data, text, tmp_path):
    path = tmp_path / "cases.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    with pytest.raises(ExpertError) as raised:
        validate(learnt(), test_set=path, device="cpu")
    assert text in str(raised.value)


@each(
    ("given", "error", "text"),
    [
        ({"domain": "cobol"}, UnknownDomain, "--domain cobol: is not known"),
        ({"checkpoints": "some"}, CannotValidate, "write --checkpoints all"),
        ({"limit": 0}, CannotValidate, "limit: got 0"),
        ({"min_accuracy": 95, "min_score": -1}, CannotValidate, "0 to 1\nmin_score: got -1"),
    ],
)
def test_invalid_arguments_are_refused(given, error, text):
    with pytest.raises(error) as raised:
        validate(learnt(), device="cpu", **given)
    assert text in str(raised.value)


def test_rows_and_columns_that_cannot_be_read_are_named(tmp_path):
    row = {"instruction": "a", "output": "b"}
    for bad, text in (
        ({"output": ""}, "the answer is empty"),
        ({"check": 3}, "column 'check' is not a JSON object"),
    ):
        with pytest.raises(DataError, match=text):
            validate(learnt(), test_set=rows_file(tmp_path, [row | bad]), device="cpu")
    path = tmp_path / "ok.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(NoTestSet, match=r"--test-set .*: no column holds the request"):
        validate(learnt(), test_set=path, device="cpu")


def test_data_that_was_moved_is_asked_for(tmp_path):
    gone = {"watch": {"output_dir": str(tmp_path / "gone" / "runs")}}
    gone["data"] = {"cache": str(tmp_path / "gone" / "datasets_optimized" / "demo")}
    copy = tmp_path / "deep" / "runs" / "demo-20260101-000000"
    with_plan(finished("lora"), copy, **gone)
    there = str(finished("lora").parents[1])
    rewrite_events(copy, lambda text: text.replace(there, str(tmp_path / "gone")))
    with pytest.raises(NoTestSet, match="the run's data was moved or deleted"):
        validate(copy, device="cpu")

"""`expert.validate` on real runs: rows, answers, the gate, and what is written."""

from __future__ import annotations

import json
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import expert
from expert.cli.export import exported_lines
from expert.cli.validate import gate_lines, score_sheet
from expert.core.errors import ExpertError
from expert.core.hashed import write_hashed
from expert.core.publish import weights_hash
from expert.data.records import DataError
from expert.jobs.export.export import export
from expert.jobs.report import report
from expert.jobs.validate.validate import validate
from expert.judging.score import wilson
from tests.each import each
from tests.jobs.runs import WORDS, base_model, events_of, place, rewrite_events, run, write_expert
from tests.jobs.trained_runs import finished, finished_characters, with_plan
from tests.jobs.validated_runs import TESTS, YES, as_it_was, learnt, own_run, rows_file, written

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
        ({"domain": "cobol"}, ExpertError, "--domain cobol: is not known"),
        ({"checkpoints": "some"}, ExpertError, "write --checkpoints all"),
        ({"limit": 0}, ExpertError, "limit: got 0"),
        ({"min_accuracy": 95, "min_score": -1}, ExpertError, "0 to 1\nmin_score: got -1"),
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
    with pytest.raises(ExpertError, match=r"--test-set .*: no column holds the request"):
        validate(learnt(), test_set=path, device="cpu")


def test_data_that_was_moved_is_asked_for(tmp_path):
    gone = {"watch": {"output_dir": str(tmp_path / "gone" / "runs")}}
    gone["data"] = {"cache": str(tmp_path / "gone" / "datasets_optimized" / "demo")}
    copy = tmp_path / "deep" / "runs" / "demo-20260101-000000"
    with_plan(finished("lora"), copy, **gone)
    there = str(finished("lora").parents[1])
    rewrite_events(copy, lambda text: text.replace(there, str(tmp_path / "gone")))
    with pytest.raises(ExpertError, match="the run's data was moved or deleted"):
        validate(copy, device="cpu")


# --- conversations of several turns --------------------------------------------------------------


def talk(*said: str, **more: Any) -> dict[str, Any]:
    """A row in which user and assistant take turns."""
    roles = ("user", "assistant")
    turns = [{"role": roles[place % 2], "content": text} for place, text in enumerate(said)]
    return {**more, "messages": turns}


def test_every_answer_of_a_conversation_is_asked_for_with_the_turns_before_it(tmp_path):
    rows = [talk(f"sum {n}", '{"sum": 3}', "Sure?", YES, id=f"row-{n}") for n in range(6)]
    done = validate(learnt(), test_set=rows_file(tmp_path, rows), device="cpu")
    assert (done.result.score.passed, done.result.score.failed) == (6, 6)
    assert done.gate.reasons == ("accuracy 50.0% is below 95.0%",)
    first, second = (each.case for each in done.result.cases[:2])
    assert (first.id, first.turns) == ("row-0, turn 2", (("user", "sum 0"),))
    assert second.turns == (("user", "sum 0"), ("assistant", '{"sum": 3}'), ("user", "Sure?"))
    found = [(case["row"], case["turn"]) for case in written(learnt())["cases"]]
    assert found[:3] == [("row-0", 2), ("row-0", 4), ("row-1", 2)]
    # The loss is that of the rows, whole, as before.
    assert done.result.rows.examples == 6


def test_turns_without_an_answer_or_weight_are_not_cases(tmp_path):
    unlearnt = talk("say cat", "dog", "No, really.", YES)
    unlearnt["messages"][1]["weight"] = 0
    talks = [talk("say cat", YES, "Thanks!"), talk("say dog", YES, "Bye."), unlearnt]
    done = validate(learnt(), test_set=rows_file(tmp_path, talks), device="cpu")
    assert done.result.score.accuracy == 1.0
    prompts = [each.case.prompt for each in done.result.cases]
    assert prompts == ["say cat", "say dog", "No, really."]
    # A row with one answer keeps its name.
    assert [each.case.id for each in done.result.cases[:2]] == ["rows.jsonl:1", "rows.jsonl:2"]
    last = done.result.cases[-1].case
    assert (last.expected, last.turns[1]) == (YES, ("assistant", "dog"))


def test_the_interval_and_the_comparison_count_each_conversation_once(tmp_path):
    rows = rows_file(tmp_path, [talk(f"a {n}", YES, "b", YES, "c", YES) for n in range(4)])
    done = validate(learnt(), test_set=rows, baseline="base", device="cpu")
    assert (done.result.score.judged, done.result.score.rows) == (12, 4)
    assert done.result.score.interval == wilson(4, 4)
    assert (done.comparison.cases, done.comparison.rows) == (12, 4)
    assert done.comparison.p_value == pytest.approx(2 * 0.5**4)  # four rows, not twelve answers
    assert any(note.startswith("every answer of a conversation is a case") for note in done.notes)
    assert "12 cases of 4 rows" in (score_sheet(done).title or "")


def test_a_limit_counts_answers_and_the_part_says_of_how_many(tmp_path):
    rows = rows_file(tmp_path, [talk(f"a {n}", YES, "b", YES) for n in range(6)])
    done = validate(learnt(), test_set=rows, device="cpu", limit=4)
    assert done.test_set.startswith("4 of 12: ")
    assert done.partial == {"test_set": str(rows), "of": 12}
    asked = [(each.row, each.case.turn) for each in done.result.cases]
    assert asked == [(f"rows.jsonl:{row}", turn) for row, turn in ((1, 2), (2, 4), (4, 2), (5, 4))]
    assert done.result.rows.examples == 4
    with pytest.raises(ExpertError, match=r"not enough to tell whether .*: 4 rows: accuracy"):
        export(learnt(), tmp_path / "out", device="cpu")


# --- the export after a validation ---------------------------------------------------------------


def with_validation(tmp_path: Path, found: object) -> Path:
    copy = tmp_path / "demo-20260101-000000"
    shutil.copytree(finished("lora"), copy)
    weights = weights_hash(copy / "final")
    text = json.dumps({"weights": weights, **found}) if isinstance(found, dict) else str(found)
    write_hashed(copy / "validation.json", text)
    return copy


def test_a_run_that_failed_the_gate_is_not_exported_unless_told_otherwise(tmp_path):
    gate = {"passed": False, "reasons": ["accuracy 10.0% is below 95.0%"]}
    copy = with_validation(tmp_path, {"gate": gate, "checkpoint": "final"})
    with pytest.raises(ExpertError) as raised:
        export(copy, tmp_path / "out", device="cpu")
    assert "the quality gate failed: accuracy 10.0% is below 95.0%" in str(raised.value)
    assert "--allow-failed" in str(raised.value)
    assert not (tmp_path / "out").exists()
    done = export(copy, tmp_path / "out", device="cpu", allow_failed=True)
    assert "the quality gate failed" in done.warnings()[0]
    card = (done.folder / "README.md").read_text(encoding="utf-8")
    assert "the quality gate failed" in card


def test_a_validation_that_cannot_be_read_or_is_of_few_rows_is_no_pass(tmp_path):
    passed = {"gate": {"passed": True, "reasons": []}, "checkpoint": "final"}
    few = {
        "gate": {"passed": None, "reasons": ["3 rows: too few"]},
        "cases": [{"passed": True}] * 3,
    }
    for number, (found, words) in enumerate(
        [
            ("{", "the file cannot be read"),
            ({**passed, "settings": {"min_accuracy": "low"}}, "the file cannot be read"),
            (passed | few, r"not enough to tell .* 3 rows: too few  \(score more rows"),
        ]
    ):
        copy = with_validation(tmp_path / str(number), found)
        with pytest.raises(ExpertError, match=words):
            export(copy, tmp_path / "out", device="cpu")


def test_a_partial_validation_does_not_replace_a_full_one():
    validate(learnt(), device="cpu")
    few = validate(learnt(), device="cpu", limit=4)
    assert len(written(learnt())["cases"]) == len(TESTS)
    kept = learnt() / "validation-partial.json"
    assert len(json.loads(kept.read_text(encoding="utf-8"))["cases"]) == 4
    assert "validation.json, which judged 16 of these cases, is kept" in few.notes
    assert (f"wrote {kept}", "dim") in gate_lines(few)
    kept.unlink()
    # Another checkpoint or test set was not judged before.
    validate(learnt(), device="cpu", limit=4, checkpoint="6")
    assert written(learnt())["partial"] == {"test_set": "test rows: test.jsonl", "of": 16}
    validate(learnt(), device="cpu", limit=2, checkpoint="6")
    assert len(written(learnt())["cases"]) == 4
    kept.unlink()


def test_the_card_and_the_export_say_how_well_it_answers(tmp_path):
    found = {
        "gate": {"passed": True, "reasons": []},
        "checkpoint": "final",
        "test_set": "rows held out",
        "cases": [{}] * 40,
        "accuracy": 0.125,
        "interval": [0.055, 0.261],
        "learnt": {"cases": 20, "accuracy_of_others": 0.15},
        "settings": {"min_accuracy": 0.1},
    }
    done = export(with_validation(tmp_path, found), tmp_path / "out", device="cpu")
    words = "accuracy 12.5% of 40 cases (95 % interval 5.5% to 26.1%), asked for at least 10%"
    assert (f"  validated: {words}", "dim") in exported_lines(done)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    for line in (
        f"| answers | {words} |",
        "| rows | rows held out |",
        "| cases also in the training rows | 20; answers right without them: 15.0% |",
        "| quality gate | passed (final) |",
    ):
        assert line in card
    without = export(finished("lora"), tmp_path / "two", device="cpu")
    assert "not validated" in exported_lines(without)[2][0]
    card = (tmp_path / "two" / "README.md").read_text(encoding="utf-8")
    assert "| answers | not judged: expert validate was not run |" in card


def test_a_verdict_on_earlier_weights_does_not_count(tmp_path):
    folder = own_run(tmp_path / "own")
    assert validate(folder, device="cpu", min_accuracy=0.0).gate.passed is True
    assert "gate passes" in report(folder).html.read_text(encoding="utf-8")
    manifest = folder.parents[1] / "manifest.json"
    longer = ["training.config.max_steps=4"]
    run(manifest, resume=str(folder), allow_changed=True, overrides=longer)
    done = export(folder, tmp_path / "out", device="cpu")
    assert "is about earlier weights: the run continued since" in done.warnings()[0]
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| not judged: the validation is about earlier weights: the run" in card
    assert "quality gate" not in card
    after = report(folder).html.read_text(encoding="utf-8")
    assert "Validation, out of date" in after
    assert "gate passes" not in after


# --- open text, judged by its loss or by a judge command, and plain text -------------------------


TALES = [
    {
        "instruction": f"tell of the {word} {n}",
        "output": f"once the {word} went to the old house number {n} and slept there all day long",
    }
    for n in range(10)
    for word in WORDS
]


@cache
def teller() -> Path:
    """A run trained to tell stories, whose answers never match exactly."""
    config = {"epochs": 12, "adapter_type": "full", "learning_rate": 3e-3, "save_steps": 100}
    base, folder = base_model(), place() / "tales"
    split = {"test_path": "test.jsonl"}
    short = {"max_new_tokens": 16}
    path = write_expert(folder, base, config, rows=TALES[40:], dataset=split, decoding=short)
    rows_file(folder, TALES[:40], "test.jsonl")
    return run(path).folder


def judge_file(folder: Path, code: str) -> str:
    file = folder / "judge.py"
    read = "import json, sys\ncases = [json.loads(line) for line in sys.stdin]\n"
    file.write_text(read + code, encoding="utf-8")
    return f"{sys.executable} {file}"


SCORES = "for n, case in enumerate(cases): print(json.dumps({{'id': case['id'], 'score': {}}}))\n"


def test_open_text_whose_loss_is_below_the_bases_passes_and_may_be_exported(tmp_path):
    done = validate(teller(), device="cpu")
    assert done.domain == "open"
    assert done.result.rows.loss < done.base.loss
    assert (done.gate.passed, done.gate.reasons) == (True, ())
    found = written(teller())
    assert len(found["asked"]["for"]) == 3
    assert found["asked"]["because"].startswith("40 of 40 expected answers are longer")
    assert (found["accuracy"], found["without_oracle"], found["open"]) == (None, 0, 40)
    assert found["base"]["loss"] == done.base.loss
    assert found["settings"]["min_accuracy"] is None
    out = export(teller(), tmp_path / "out", device="cpu")
    assert out.warnings() == []
    assert out.judged.startswith(f"open text: loss {done.result.rows.loss:.4f}, the base's ")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| quality gate | passed (final) |" in card
    # The command and the report show the same.
    assert "40 cases, judged as open text (" in score_sheet(done).title
    assert "accuracy" not in {row[0] for rows in score_sheet(done).sections for row in rows}
    lines = [text for text, _ in gate_lines(done)]
    assert "✓ the gate passes by loss and token accuracy against the base" in lines
    report(teller(), to=tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "gate passes" in page
    assert "open text: loss" in page


def test_open_text_that_is_no_better_than_the_base_fails_and_is_not_exported(tmp_path):
    file = rows_file(tmp_path, TALES[:12])
    # A run trained on JSON answers only is worse at stories than its base.
    done = validate(learnt(), device="cpu", test_set=file, domain="open")
    assert done.gate.passed is False
    assert "is not below the base's" in done.gate.reasons[0]
    with pytest.raises(ExpertError, match="is not below the base's"):
        export(learnt(), tmp_path / "out", device="cpu")


def test_three_stories_are_not_enough_to_tell(tmp_path):
    done = validate(teller(), device="cpu", limit=3)
    assert done.gate.undecided
    assert "on 3 rows: too few; at least 30" in done.gate.reasons[0]
    report(teller(), to=tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "not enough to tell" in page
    assert "gate passes." not in page
    with pytest.raises(ExpertError, match="not enough to tell whether the quality gate passes"):
        export(teller(), tmp_path / "out", device="cpu")
    out = export(teller(), tmp_path / "out", device="cpu", allow_failed=True)
    assert "not enough to tell" in out.warnings()[0]
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| quality gate | not enough to tell: loss " in card


def test_cases_that_name_their_own_domain_are_judged_by_it_beside_open_text(tmp_path):
    rows = [{"instruction": "say yes", "output": "{}", "domain": "json"}, *TALES[:3]]
    file = rows_file(tmp_path, rows)
    done = validate(teller(), device="cpu", test_set=file)
    first, *others = done.result.cases
    assert first.judgement.passed is False
    assert all(each.is_open for each in others)
    assert done.result.score.cases == 1
    assert done.gate.reasons == ("accuracy 0.0% is below 95.0%",)
    assert len(done.gate.asked) == 4


def test_a_judge_command_decides(tmp_path):
    command = judge_file(tmp_path, SCORES.format("n % 2"))
    done = validate(teller(), device="cpu", judge_command=command)
    assert done.gate.passed is True
    assert done.gate.asked == ("mean score of at least 0.5 by the judge command",)
    assert done.base is None  # its loss is not needed
    found = written(teller())
    assert found["mean_score"] == 0.5
    assert found["asked"]["judge_command"] == command
    assert [case["score"] for case in found["cases"]] == [0.0, 1.0] * 20
    out = export(teller(), tmp_path / "out", device="cpu")
    assert out.judged == "mean score 0.5 of 40 cases"
    strict = validate(teller(), device="cpu", judge_command=command, min_score=0.6)
    assert strict.gate.reasons == ("mean score 0.5 is below 0.6",)
    # One that fails is reported, and fails the gate.
    command = judge_file(tmp_path, "sys.exit('no key is set')")
    done = validate(teller(), device="cpu", judge_command=command, limit=2)
    assert "2 of 2 cases have no score" in done.gate.reasons[0]
    assert "final: the judge command ended with code 1: no key is set" in done.notes


@each(
    ("asked", "kind", "text"),
    [
        ({"min_accuracy": 0.5}, ExpertError, "no accuracy is measured: 40 of 40 expected"),
        ({"min_improvement": 0.1, "domain": "text"}, ExpertError, "is for open text"),
        ({"min_score": 0.1}, ExpertError, "name it with --judge-command"),
        (
            {"judge_command": "no-such-program"},
            ExpertError,
            "there is no program 'no-such-program'",
        ),
    ],
)
def test_a_requirement_that_does_not_apply_is_refused_with_a_fix(asked, kind, text):
    with pytest.raises(kind) as raised:
        validate(teller(), device="cpu", **asked)
    assert text in str(raised.value)


TEXTS = [{"text": f"the cat sat on mat {n} and slept"} for n in range(20)]


@cache
def learnt_text() -> Path:
    """A run of a model with a base on plain text."""
    return own_run(place() / "texts", rows=TEXTS)


@pytest.mark.parametrize("run", [finished_characters, learnt_text])
def test_plain_text_has_a_loss_and_no_gate_and_may_be_exported(run, tmp_path):
    done = validate(run(), device="cpu")
    assert done.result.cases == ()
    assert (done.gate.passed, done.gate.reasons) == (None, ())
    [note] = done.notes  # none on characters that would be drawn, or on few cases
    assert "no answer to judge, so no accuracy is required" in note
    found = written(run())
    assert found["gate"] == {"passed": None, "reasons": []}
    assert found["rows"]["perplexity"] > 1
    out = export(run(), tmp_path / "out", device="cpu")
    assert out.warnings() == []
    assert out.judged.endswith("no answer was judged: the rows have no answers")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "quality gate" not in card


def test_the_loss_of_plain_text_is_held_to_that_of_a_baseline(tmp_path):
    done = validate(learnt_text(), device="cpu", baseline="base")
    assert done.result.rows.loss < done.baseline.rows.loss
    assert done.gate.passed is True
    assert export(learnt_text(), tmp_path / "out", device="cpu").warnings() == []
    file = rows_file(tmp_path, TEXTS)
    # A run trained on JSON answers only is worse at text than its base.
    worse = validate(learnt(), device="cpu", baseline="base", test_set=file, max_regression=0.0)
    assert worse.gate.passed is False
    assert worse.gate.reasons[0].startswith("loss ")

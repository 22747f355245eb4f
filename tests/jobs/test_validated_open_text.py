"""Open text, judged by its loss or by a judge command, and rows without answers."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

from expert.cli.validate import gate_lines, score_sheet
from expert.jobs.export.checks import CannotExport
from expert.jobs.export.export import export
from expert.jobs.report import report
from expert.jobs.validate.validate import CannotValidate, validate
from expert.judging.judge_command import JudgeError
from tests.each import each
from tests.jobs.runs import WORDS, base_model, place, run, write_expert
from tests.jobs.trained_runs import finished_characters
from tests.jobs.validated_runs import as_it_was, learnt, own_run, rows_file, written

__all__ = ["as_it_was"]  # a fixture for every test here: the runs are looked at by others too

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
    with pytest.raises(CannotExport, match="is not below the base's"):
        export(learnt(), tmp_path / "out", device="cpu")


def test_three_stories_are_not_enough_to_tell(tmp_path):
    done = validate(teller(), device="cpu", limit=3)
    assert done.gate.undecided
    assert "on 3 rows: too few; at least 30" in done.gate.reasons[0]
    report(teller(), to=tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "not enough to tell" in page
    assert "gate passes." not in page
    with pytest.raises(CannotExport, match="not enough to tell whether the quality gate passes"):
        export(teller(), tmp_path / "out", device="cpu")
    out = export(teller(), tmp_path / "out", device="cpu", allow_failed=True)
    assert "not enough to tell" in out.warnings()[0]
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| quality gate | not enough to tell: loss " in card


@pytest.mark.parametrize("domain", ["text", "open"])
def test_a_domain_in_the_manifest_wins(tmp_path, domain):
    config = {"max_steps": 1, "save_steps": 1}
    decoding = {"max_new_tokens": 2, "grammar_type": domain}
    base = base_model()
    path = write_expert(tmp_path, base, config, rows=TALES, decoding=decoding)
    done = validate(run(path).folder, device="cpu", limit=2)
    assert done.domain == domain
    assert done.because == "the manifest names it (decoding or capabilities)"
    assert (done.base is None) is (domain == "text")


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
        ({"min_accuracy": 0.5}, CannotValidate, "no accuracy is measured: 40 of 40 expected"),
        ({"min_improvement": 0.1, "domain": "text"}, CannotValidate, "is for open text"),
        ({"min_score": 0.1}, JudgeError, "name it with --judge-command"),
        ({"judge_command": "no-such-program"}, JudgeError, "there is no program 'no-such-program'"),
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

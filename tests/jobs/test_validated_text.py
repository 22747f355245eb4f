"""Rows without answers: a loss, no gate on answers, and what that means for an export."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from expert.jobs.export.export import export
from expert.jobs.validate.validate import CannotValidate, validate
from tests.jobs.runs import place
from tests.jobs.trained_runs import finished_characters
from tests.jobs.validated_runs import as_it_was, learnt, own_run, rows_file, written
from tests.wording import wording

__all__ = ["as_it_was"]  # a fixture for every test here: the runs are looked at by others too
TEXTS = [{"text": f"the cat sat on mat {n} and slept"} for n in range(20)]


@cache
def learnt_text() -> Path:
    """A run of a model with a base on plain text."""
    return own_run(place() / "texts", rows=TEXTS)


@pytest.mark.parametrize("run", [finished_characters, learnt_text])
def test_plain_text_has_a_loss_and_no_gate_and_may_be_exported(run, tmp_path):
    from expert.cli.export import exported_lines

    done = validate(run(), device="cpu")
    assert done.reached.cases == ()
    assert (done.gate.passed, done.gate.reasons) == (None, ())
    [note] = done.notes  # none on characters that would be drawn, or on few cases
    assert wording("no-answer-to-judge") in note
    found = written(run())
    assert found["gate"] == {"passed": None, "reasons": []}
    assert found["settings"]["min_accuracy"] is None
    assert found["rows"]["perplexity"] > 1
    assert found["rows"]["token_accuracy"] is not None
    out = export(run(), tmp_path / "out", device="cpu")
    assert out.warnings() == []
    [judged] = [line for line, _ in exported_lines(out) if line.startswith("  validated: ")]
    assert judged.endswith(wording("no-answer-judged-rows"))
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert wording("answers-not-judged-rows") in card
    assert "quality gate" not in card


def test_an_accuracy_that_is_asked_of_plain_text_is_refused_with_a_remedy():
    with pytest.raises(CannotValidate) as raised:
        validate(learnt_text(), device="cpu", min_accuracy=0.9)
    text = str(raised.value)
    assert text.startswith(wording("rows-held-out-no"))
    assert wording("hold-loss-to-run") in text
    assert "--test-set FILE" in text
    assert validate(learnt_text(), device="cpu", min_accuracy=0.0).gate.passed is None


def test_the_loss_of_plain_text_is_held_to_that_of_a_baseline(tmp_path):
    done = validate(learnt_text(), device="cpu", baseline="base")
    assert done.reached.rows.loss < done.baseline.rows.loss
    assert done.gate.passed is True
    assert export(learnt_text(), tmp_path / "out", device="cpu").warnings() == []
    file = rows_file(tmp_path, TEXTS)
    # What learnt to answer in JSON alone is worse at text than its base.
    worse = validate(learnt(), device="cpu", baseline="base", test_set=file, max_regression=0.0)
    assert worse.gate.passed is False
    assert worse.gate.reasons[0].startswith("loss ")


def test_a_part_of_a_text_and_another_state_do_not_take_the_place_of_the_validated(tmp_path):
    validate(learnt_text(), device="cpu")
    part = validate(learnt_text(), device="cpu", limit=1)
    assert part.file.name == "validation-partial.json"
    assert wording("looked-at-these-rows") in part.notes
    part.file.unlink()
    out = export(learnt_text(), tmp_path / "out", device="cpu", checkpoint="1")
    assert out.warnings()[0].startswith(wording("final-validated-exported"))


def test_conversations_are_not_put_to_a_model_that_continues_text(tmp_path):
    file = rows_file(tmp_path, [{"instruction": "a", "output": "b"}])
    with pytest.raises(CannotValidate, match=wording("character-model-continues-text")):
        validate(finished_characters(), device="cpu", test_set=file)

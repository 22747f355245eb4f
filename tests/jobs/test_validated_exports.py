"""How a validation affects the export after it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from expert.core.hashed import write_hashed
from expert.core.rundir import weights_hash
from expert.jobs.export.checks import CannotExport
from expert.jobs.export.export import export
from expert.jobs.report import report
from expert.jobs.validate.validate import validate
from tests.jobs.runs import run
from tests.jobs.trained_runs import finished
from tests.jobs.validated_runs import TESTS, as_it_was, learnt, own_run, written

__all__ = ["as_it_was"]  # an autouse fixture: other tests read these runs too


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
    with pytest.raises(CannotExport) as raised:
        export(copy, tmp_path / "out", device="cpu")
    assert "the quality gate failed: accuracy 10.0% is below 95.0%" in str(raised.value)
    assert "--allow-failed" in str(raised.value)
    assert not (tmp_path / "out").exists()
    done = export(copy, tmp_path / "out", device="cpu", allow_failed=True)
    assert "the quality gate failed" in done.warnings()[0]
    card = (done.folder / "README.md").read_text(encoding="utf-8")
    assert "the quality gate failed" in card
    assert str(tmp_path) not in card


def test_a_validation_that_cannot_be_read_is_no_pass(tmp_path):
    gate = {"passed": True, "reasons": []}
    found = {"gate": gate, "checkpoint": "final", "settings": {"min_accuracy": "low"}}
    for place, text in enumerate(("{", found)):
        copy = with_validation(tmp_path / str(place), text)
        with pytest.raises(CannotExport, match="the file cannot be read"):
            export(copy, tmp_path / "out", device="cpu")


def test_a_partial_validation_does_not_replace_a_full_one():
    from expert.cli.validate import gate_lines

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


def test_a_gate_that_a_few_of_the_rows_passed_is_not_enough_for_an_export(tmp_path):
    cases = [{"passed": True}] * 5
    passed = {"gate": {"passed": True, "reasons": []}, "checkpoint": "final", "cases": cases}
    copy = with_validation(tmp_path, {**passed, "partial": {"test_set": "rows", "of": 40}})
    with pytest.raises(CannotExport, match=r"passed on only 5 of 40 cases  \(validate them all"):
        export(copy, tmp_path / "out", device="cpu")
    done = export(copy, tmp_path / "out", device="cpu", allow_failed=True)
    assert "the quality gate passed on only 5 of 40 cases" in done.warnings()[0]
    passed["weights"] = weights_hash(copy / "final")
    many = {**passed, "cases": cases * 10, "partial": {"test_set": "rows", "of": 4000}}
    write_hashed(copy / "validation.json", json.dumps(many))
    assert export(copy, tmp_path / "two", device="cpu").judged == "50 cases, a part of 4000"


def test_an_export_names_a_bar_that_is_lower_than_usual(tmp_path):
    found = {
        "gate": {"passed": True, "reasons": []},
        "checkpoint": "final",
        "cases": [{}] * 200,
        "accuracy": 0.12,
        "settings": {"min_accuracy": 0.1},
    }
    copy = with_validation(tmp_path, found)
    done = export(copy, tmp_path / "out", device="cpu")
    assert done.judged == "accuracy 12.0% of 200 cases, asked for at least 10%"
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| quality gate | passed (final), asked for at least 10% |" in card
    usual = {**found, "accuracy": 1.0, "cases": [{}], "settings": {"min_accuracy": 0.95}}
    usual["weights"] = weights_hash(copy / "final")
    write_hashed(copy / "validation.json", json.dumps(usual))
    assert export(copy, tmp_path / "two", device="cpu").judged == "accuracy 100.0% of 1 case"


def test_the_card_and_the_export_say_how_well_it_answers(tmp_path):
    from expert.cli.export import exported_lines

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
        "| cases also in the training rows | 20; answers right without them: 95.0% |",
        "| quality gate | passed (final) |",
    ):
        assert line in card
    without = export(finished("lora"), tmp_path / "two", device="cpu")
    assert "not validated" in exported_lines(without)[2][0]
    card = (tmp_path / "two" / "README.md").read_text(encoding="utf-8")
    assert "| answers | not judged: expert validate was not run |" in card


def go_on(folder: Path, steps: int) -> None:
    """Train the run up to this many steps in total."""
    manifest = folder.parents[1] / "manifest.json"
    longer = [f"training.config.max_steps={steps}"]
    run(manifest, resume=str(folder), allow_changed=True, overrides=longer)


def test_a_verdict_on_earlier_weights_does_not_count(tmp_path):
    from expert.cli.export import exported_lines

    folder = own_run(tmp_path / "own")
    assert validate(folder, device="cpu", min_accuracy=0.95).gate.passed is False
    with pytest.raises(CannotExport, match="the quality gate failed"):
        export(folder, tmp_path / "refused", device="cpu")
    go_on(folder, 4)
    assert validate(folder, device="cpu", min_accuracy=0.0).gate.passed is True
    judged = export(folder, tmp_path / "judged", device="cpu")
    assert judged.warnings() == []
    assert "accuracy" in judged.judged
    before = report(folder).html.read_text(encoding="utf-8")
    assert "gate passes" in before
    assert "ut of date" not in before
    go_on(folder, 6)
    done = export(folder, tmp_path / "out", device="cpu")
    assert done.warnings() == [
        (
            f"{folder}/validation.json is about earlier weights: the run continued since  "
            f"(expert validate --expert {folder})"
        )
    ]
    assert "not validated" in exported_lines(done)[2][0]
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| not judged: the validation is about earlier weights: the run" in card
    assert "quality gate" not in card
    after = report(folder).html.read_text(encoding="utf-8")
    assert "Validation, out of date" in after
    assert "is about earlier weights: the run continued since" in after
    for reported in ("gate passes", "not validated yet"):
        assert reported not in after

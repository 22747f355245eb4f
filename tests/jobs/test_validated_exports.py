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


def test_a_validation_that_cannot_be_read_or_is_of_few_rows_is_no_pass(tmp_path):
    passed = {"gate": {"passed": True, "reasons": []}, "checkpoint": "final"}
    few = {
        "gate": {"passed": None, "reasons": ["3 rows: too few"]},
        "cases": [{"passed": True}] * 3,
    }
    for place, (found, words) in enumerate(
        [
            ("{", "the file cannot be read"),
            ({**passed, "settings": {"min_accuracy": "low"}}, "the file cannot be read"),
            (passed | few, r"not enough to tell .* 3 rows: too few  \(score more rows"),
        ]
    ):
        copy = with_validation(tmp_path / str(place), found)
        with pytest.raises(CannotExport, match=words):
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


def test_the_card_and_the_export_say_how_well_it_answers(tmp_path):
    from expert.cli.export import exported_lines

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

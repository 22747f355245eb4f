"""A run that goes on after it was validated has weights that nobody judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from expert.jobs.export.checks import CannotExport
from expert.jobs.export.export import export
from expert.jobs.report import report
from expert.jobs.validate.validate import validate
from tests.jobs.runs import run
from tests.jobs.validated_runs import own_run, written
from tests.wording import wording


def go_on(folder: Path) -> None:
    """Train the run for two more updates."""
    manifest = folder.parents[1] / "manifest.json"
    longer = ["training.config.max_steps=4"]
    run(manifest, resume=str(folder), allow_changed=True, overrides=longer)


@pytest.mark.parametrize("least", [0.0, 0.95])
def test_a_verdict_on_a_run_that_went_on_since_counts_as_none(tmp_path, least):
    from expert.cli.export import exported_lines

    folder = own_run(tmp_path / "own")
    passed = validate(folder, device="cpu", min_accuracy=least).gate.passed
    assert passed is (least == 0.0)
    if not passed:
        with pytest.raises(CannotExport, match=wording("gate-not-passed")):
            export(folder, tmp_path / "refused", device="cpu")
    go_on(folder)
    done = export(folder, tmp_path / "out", device="cpu")
    assert done.warnings() == [wording("other-weights-run", folder=folder)]
    assert "not validated" in exported_lines(done)[2][0]
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert wording("not-judged-validation-other") in card
    assert "quality gate" not in card
    validate(folder, device="cpu", min_accuracy=0.0)
    again = export(folder, tmp_path / "again", device="cpu")
    assert again.warnings() == []
    assert "accuracy" in again.judged


def test_the_report_of_a_run_that_went_on_since_shows_its_validation_as_out_of_date(tmp_path):
    folder = own_run(tmp_path / "own")
    validate(folder, device="cpu", min_accuracy=0.0)
    before = report(folder).markdown.read_text(encoding="utf-8")
    assert "gate passes" in before
    assert "ut of date" not in before
    go_on(folder)
    after = report(folder).markdown.read_text(encoding="utf-8")
    assert wording("validation-out-of-date") in after
    assert wording("other-weights-run-went") in after
    for judged in ("gate passes", wording("not-validated-yet")):
        assert judged not in after


def test_a_few_rows_take_the_place_of_a_verdict_on_other_weights(tmp_path):
    folder = own_run(tmp_path / "own", validation_split=0.5)
    cases = len(validate(folder, device="cpu").reached.cases)
    assert cases > 2
    go_on(folder)
    few = validate(folder, device="cpu", limit=2)
    assert few.file.name == "validation.json"
    assert len(written(folder)["cases"]) == 2


def test_the_best_state_is_judged_under_its_name(tmp_path):
    from tests.jobs.trained_runs import finished

    done = validate(finished("lora"), device="cpu", limit=2, checkpoint="best")
    assert done.reached.name == "best (step-000006)"
    done.file.unlink()  # other tests export this run

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


def go_on(folder: Path, steps: int) -> None:
    """Train the run for as many steps in all."""
    manifest = folder.parents[1] / "manifest.json"
    longer = [f"training.config.max_steps={steps}"]
    run(manifest, resume=str(folder), allow_changed=True, overrides=longer)


def test_a_verdict_on_a_run_that_went_on_since_counts_as_none(tmp_path):
    from expert.cli.export import exported_lines

    folder = own_run(tmp_path / "own")
    assert validate(folder, device="cpu", min_accuracy=0.95).gate.passed is False
    with pytest.raises(CannotExport, match=wording("gate-not-passed")):
        export(folder, tmp_path / "refused", device="cpu")
    go_on(folder, 4)
    assert validate(folder, device="cpu", min_accuracy=0.0).gate.passed is True
    judged = export(folder, tmp_path / "judged", device="cpu")
    assert judged.warnings() == []
    assert "accuracy" in judged.judged
    before = report(folder).markdown.read_text(encoding="utf-8")
    assert "gate passes" in before
    assert "ut of date" not in before
    go_on(folder, 6)
    done = export(folder, tmp_path / "out", device="cpu")
    assert done.warnings() == [wording("other-weights-run", folder=folder)]
    assert "not validated" in exported_lines(done)[2][0]
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert wording("not-judged-validation-other") in card
    assert "quality gate" not in card
    after = report(folder).markdown.read_text(encoding="utf-8")
    assert wording("validation-out-of-date") in after
    assert wording("other-weights-run-went") in after
    for told in ("gate passes", wording("not-validated-yet")):
        assert told not in after


def test_a_few_rows_take_the_place_of_a_verdict_on_other_weights(tmp_path):
    folder = own_run(tmp_path / "own", validation_split=0.5)
    cases = len(validate(folder, device="cpu").reached.cases)
    assert cases > 2
    go_on(folder, 4)
    few = validate(folder, device="cpu", limit=2)
    assert few.file.name == "validation.json"
    assert len(written(folder)["cases"]) == 2


def test_the_best_state_is_judged_under_its_name(tmp_path):
    from tests.jobs.trained_runs import finished

    done = validate(finished("lora"), device="cpu", limit=2, checkpoint="best")
    assert done.reached.name == "best (step-000006)"
    done.file.unlink()  # other tests export this run

"""A run is read from any folder, and after all of it was moved: nothing is looked for or made
beside the folder that somebody happens to be in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from expert.jobs.diagnose.short_runs import read_run_manifest
from expert.jobs.export.export import export
from expert.jobs.report import report
from expert.jobs.sample.sample import sample
from expert.jobs.validate.validate import validate
from expert.run.stored.load import read_plan
from expert.run.stored.locate import find_trained
from expert.run.stored.status import run_status
from tests.jobs.runs import base_model, plan_of, run, write_expert


@pytest.fixture
def fruit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An expert that was trained by `expert train --manifest fruit/manifest.json`, its base with
    it."""
    shutil.copytree(base_model(), tmp_path / "fruit" / "models" / "base")
    monkeypatch.chdir(tmp_path)
    config = {"max_steps": 2, "save_steps": 1, "save_total_limit": None}
    run(write_expert(Path("fruit"), "models/base", config))
    return tmp_path / "fruit"


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def judged_from(cwd: Path, expert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validate, sample, report and look from a folder; only the verdict and the page are new."""
    monkeypatch.chdir(cwd)
    before = everything(cwd)
    done = validate(expert, device="cpu", min_accuracy=0.0)
    assert done.test_set == "rows held out of train.jsonl"
    assert sample(find_trained(expert).path, ["say red 1"], device="cpu")
    made = report(find_trained(expert).path)
    assert "no longer exists" not in made.html.read_text(encoding="utf-8")
    new = {Path(path).name for path in everything(cwd) - before}
    new = {name for name in new if not name.endswith(".sha256")}
    assert new <= {"validation.json", "report.html"}


def test_paths_of_a_run_mean_the_same_from_every_folder(fruit, monkeypatch):
    judged_from(fruit, Path("."), monkeypatch)
    status = run_status(find_trained(Path(".")))
    assert Path(str(status.last_checkpoint)).is_dir()
    monkeypatch.chdir(fruit / "runs")
    folder = find_trained(Path("..") / "manifest.json")
    for plan in (plan_of(folder.path), read_plan(folder).model_dump()):  # also as it is recorded
        assert Path(plan["model"]["location"]) == fruit / "models" / "base"
        assert Path(plan["data"]["cache"]) == fruit / "datasets_optimized" / "demo"
        assert Path(plan["watch"]["output_dir"]) == fruit / "runs"


def test_a_run_that_was_moved_with_its_expert_needs_nothing_of_where_it_was(fruit, monkeypatch):
    elsewhere = fruit.parent / "far" / "away"
    elsewhere.parent.mkdir()
    fruit.rename(elsewhere)
    monkeypatch.chdir(elsewhere.parent)
    (folder,) = (elsewhere / "runs").iterdir()
    judged_from(elsewhere.parent, folder, monkeypatch)
    plan = read_plan(find_trained(folder))
    assert Path(plan.model.location) == elsewhere / "models" / "base"
    assert Path(plan.data.cache or "") == elsewhere / "datasets_optimized" / "demo"
    assert read_run_manifest(folder).folder == elsewhere
    made = export(folder, to=elsewhere.parent / "out")
    config = json.loads((made.folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == "base"
    assert not fruit.exists()

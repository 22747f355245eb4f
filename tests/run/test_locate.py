"""Which run is meant by a folder, the same for every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expert.core.publish import publishing, weights_hash
from expert.core.rundir import RunFolder, RunFolderError
from expert.run.stored.locate import choice_in_words, find_expert, find_trained


def _started(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}", encoding="utf-8")
    return folder


def expert_folder(folder: Path, name: str = "manifest.json", **config: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    training = {"dataset": {"path": "a.jsonl"}, "config": config}
    data = {"name": "demo", "base_model": {"name": "X"}, "training": training}
    (folder / name).write_text(json.dumps(data), encoding="utf-8")
    return folder


def test_a_run_a_folder_of_runs_and_an_expert_s_folder_mean_the_newest_run(tmp_path):
    expert = expert_folder(tmp_path / "demo")
    _started(expert / "runs" / "demo-20260101-000000")
    newest = _started(expert / "runs" / "demo-20260102-000000")
    for place in (newest, expert / "runs", expert, expert / "manifest.json"):
        assert find_trained(place).path == newest
    assert find_expert(expert)[1] == expert
    assert find_expert(newest)[1] is None


def test_a_folder_whose_manifest_has_a_name_of_its_own_means_the_newest_of_its_runs(tmp_path):
    expert = expert_folder(tmp_path / "demo", "short.yaml")
    newest = _started(expert / "runs" / "demo-20260102-000000")
    assert find_trained(expert).path == newest
    with pytest.raises(RunFolderError, match=r"is not a run folder: it has no plan\.json"):
        find_trained(tmp_path)


@pytest.mark.parametrize("name", ["manifest.json", "manifest.yaml", "manifest.yml", "config.yaml"])
def test_a_manifest_is_found_by_any_of_its_names(tmp_path, name):
    expert = expert_folder(tmp_path / "demo", name, output_dir="trained")
    run = _started(expert / "trained" / "demo-20260101-000000")
    assert find_trained(expert).path == run


def test_runs_beside_a_manifest_are_found_where_its_own_runs_folder_has_none(tmp_path):
    expert = expert_folder(tmp_path / "demo")
    with pytest.raises(RunFolderError, match=r"no run of demo under .*expert train --manifest"):
        find_trained(expert)
    other = _started(expert / "other-20260102-000000")  # found, but not taken for its own
    found, beside = find_expert(expert)
    assert (found.path, beside) == (other, None)
    run = _started(expert / "demo-20260101-000000")
    assert find_expert(expert) == find_expert(expert / "manifest.json")
    assert (find_trained(expert).path, find_expert(expert)[1]) == (run, expert)
    _started(expert / "runs" / "demo-20250101-000000")
    assert find_trained(expert).path.parent.name == "runs"
    damaged = expert_folder(tmp_path / "demo-20260101-000000")  # a run without its plan
    (damaged / "events.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(RunFolderError, match=r"is not a run folder: it has no plan\.json"):
        find_trained(damaged)


def _finished(folder: Path, *, passed: bool | None = None) -> Path:
    run = RunFolder(_started(folder))
    with publishing(run.final) as target:
        (target / "model.safetensors").write_bytes(folder.name.encode())
    if passed is not None:
        verdict = {"gate": {"passed": passed}, "weights": weights_hash(run.final)}
        run.validation.write_text(json.dumps(verdict), encoding="utf-8")
    return folder


def test_an_answer_comes_from_the_newest_run_that_is_finished_and_validated(tmp_path):
    runs = tmp_path / "runs"
    validated = _finished(runs / "demo-20260101-000000", passed=True)
    _finished(runs / "demo-20260102-000000", passed=False)
    finished = _finished(runs / "demo-20260103-000000")
    newest = _started(runs / "demo-20260104-000000")
    found = {each: find_trained(runs, each).path for each in ("newest", "finished", "validated")}
    assert found == {"newest": newest, "finished": finished, "validated": validated}
    assert choice_in_words(runs, "validated") == (
        f"run: {validated.name} (validated); newer: {newest.name} (unfinished) and 2 more"
    )
    told = f"run: {newest.name} (unfinished); 3 others in {runs}"
    assert choice_in_words(runs, "newest") == told
    assert choice_in_words(finished, "validated") == ""
    (validated / "validation.json").write_text('{"gate": {"passed": true}}', encoding="utf-8")
    assert find_trained(runs, "validated").path == finished  # judged other weights

"""Recorded paths of a run are found from any working directory, and after a move."""

from __future__ import annotations

from pathlib import Path

from expert.core.rundir import relocated_path


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def test_what_was_recorded_from_another_folder_is_found_beside_the_runs(tmp_path, monkeypatch):
    cache = made(tmp_path / "fruit" / "datasets_optimized" / "fruit")
    runs = made(tmp_path / "fruit" / "runs")
    monkeypatch.chdir(tmp_path / "fruit")
    for recorded, place in (("fruit/datasets_optimized/fruit", cache), ("fruit/runs", runs)):
        found = relocated_path(recorded, runs_then="fruit/runs", runs_now=Path("runs"))
        assert found == place


def test_what_was_moved_with_its_runs_is_found_and_a_copy_has_its_own(tmp_path):
    old, new = tmp_path / "fruit", tmp_path / "deep" / "pears"
    recorded = str(old / "datasets_optimized")
    # Deleted tokens would be prepared again beside the moved runs.
    for home in ((), (old, new)):
        for each in home:
            made(each / "datasets_optimized")
        found = relocated_path(recorded, runs_then=str(old / "runs"), runs_now=new / "runs")
        assert found == new / "datasets_optimized"


def test_paths_outside_the_runs_folder_are_not_relocated(tmp_path):
    cache, now = tmp_path / "large-disk" / "tokens", tmp_path / "a" / "b" / "c" / "runs"
    for runs_then in (str(tmp_path / "fruit" / "runs"), "fruit/runs"):
        assert relocated_path(str(cache), runs_then=runs_then, runs_now=now) == cache
        cache.mkdir(parents=True, exist_ok=True)
        assert relocated_path(str(cache), runs_then=runs_then, runs_now=now) == cache

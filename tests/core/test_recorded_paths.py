"""Paths of a run lead to the same places from any folder, and after a move."""

from __future__ import annotations

import ntpath
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import pytest

from expert.core import rundir
from expert.core.rundir import found_again


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def test_what_was_recorded_from_another_folder_is_found_beside_the_runs(tmp_path, monkeypatch):
    cache = made(tmp_path / "fruit" / "datasets_optimized" / "fruit")
    runs = made(tmp_path / "fruit" / "runs")
    monkeypatch.chdir(tmp_path / "fruit")
    for recorded, place in (("fruit/datasets_optimized/fruit", cache), ("fruit/runs", runs)):
        found = found_again(recorded, runs_then="fruit/runs", runs_now=Path("runs"))
        assert found == place


def test_what_was_moved_with_its_runs_is_found_and_a_copy_has_its_own(tmp_path):
    old, new = tmp_path / "fruit", tmp_path / "deep" / "pears"
    for home in (old, new):
        made(home / "datasets_optimized" / "fruit")
    found = found_again(
        str(old / "datasets_optimized" / "fruit"),
        runs_then=str(old / "runs"),
        runs_now=new / "runs",
    )
    assert found == new / "datasets_optimized" / "fruit"


def test_tokens_that_were_thrown_away_would_be_made_beside_the_moved_runs(tmp_path):
    found = found_again(
        str(tmp_path / "fruit" / "datasets_optimized"),
        runs_then=str(tmp_path / "fruit" / "runs"),
        runs_now=tmp_path / "pears" / "runs",
    )
    assert found == tmp_path / "pears" / "datasets_optimized"


@pytest.mark.parametrize("is_there", [True, False])
def test_what_lay_apart_from_the_runs_stays_where_it_is(tmp_path, is_there):
    cache = tmp_path / "large-disk" / "tokens"
    if is_there:
        made(cache)
    for runs_then in (str(tmp_path / "fruit" / "runs"), "fruit/runs"):
        found = found_again(
            str(cache), runs_then=runs_then, runs_now=tmp_path / "a" / "b" / "c" / "runs"
        )
        assert found == cache


class AbsentWindowsPath(PureWindowsPath):
    """A path of a Windows machine on which nothing lies there."""

    def exists(self) -> bool:
        return False

    def absolute(self) -> AbsentWindowsPath:
        return self


def test_what_lay_on_another_drive_than_the_runs_stays_there(monkeypatch):
    monkeypatch.setattr(rundir, "Path", AbsentWindowsPath)
    monkeypatch.setattr(rundir, "os", SimpleNamespace(path=ntpath))
    runs: Any = AbsentWindowsPath("C:\\fruit\\runs")
    found = found_again("D:\\tokens", runs_then=str(runs), runs_now=runs)
    assert str(found) == "D:\\tokens"

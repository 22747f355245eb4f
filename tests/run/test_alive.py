"""Runs that hang, whose folder is taken away, or that were killed before they saved anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from expert.core.errors import EXIT_HUNG, EXIT_RUN_FAILED
from expert.core.rundir import RunFolderError, runs_in
from expert.training import loop
from expert.training.step import seed_step
from tests.jobs.runs import base_model, events_of, losses_of, run, write_expert

CONFIG = {"device": "cpu", "max_steps": 6, "save_steps": 4, "evaluation_strategy": "no"}
HANGS = """
import sys, time
from expert.model import load as build
from expert.training import loop
where = sys.argv.pop()
seed, load = loop.seed_step, build.load_model
def stuck(number, step, rank=0):
    if step == 3 and where == "step":
        time.sleep(600)
    seed(number, step, rank)
def stuck_too(*args, **more):
    if where == "loading":
        time.sleep(600)
    return load(*args, **more)
loop.seed_step, build.load_model = stuck, stuck_too
sys.argv = ["expert", "train", *sys.argv[1:]]
from expert.__main__ import main
main()
"""


@pytest.fixture
def manifest(tmp_path) -> Path:
    return write_expert(tmp_path, base_model(), CONFIG)


def only_run(manifest: Path) -> Path:
    (found,) = runs_in(manifest.parent / "runs")
    return found.path


def before_step(monkeypatch: pytest.MonkeyPatch, number: int, does) -> None:
    def seeded(seed: int, step: int, rank: int = 0) -> None:
        if step == number:
            does()
        seed_step(seed, step, rank)

    monkeypatch.setattr(loop, "seed_step", seeded)


@pytest.mark.fault(19)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "limit", "stack", "step"),
    [("step", 1.5, "stuck", 3), ("loading", 0.5, "stuck_too", 0)],
)
def test_a_run_that_hangs_ends_with_its_stacks_in_the_run_folder(
    manifest, where, limit, stack, step
):
    """As does one whose disk, device or feed does not answer: all of them are waited for."""
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(manifest), "--set", f"hang_timeout={limit}", where],
        capture_output=True,
        timeout=300,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == EXIT_HUNG, done.stderr
    folder = only_run(manifest)
    assert "the run hangs: " in done.stderr
    assert "stack traces are in " + str(folder) in done.stderr
    assert f"in {stack}\n" in (folder / "stacks.txt").read_text()
    assert events_of(folder, "failed")[-1]["step"] == step


@pytest.mark.fault(30)
def test_a_run_whose_folder_is_moved_ends_with_one_error_and_makes_no_other_one(
    manifest, monkeypatch
):
    now = manifest.parent / "elsewhere"
    before_step(monkeypatch, 2, lambda: only_run(manifest).rename(now))
    with pytest.raises(RunFolderError, match="was moved or removed while training") as ended:
        run(manifest)
    assert ended.value.exit_code == EXIT_RUN_FAILED
    assert list((manifest.parent / "runs").iterdir()) == []


def test_a_run_that_has_saved_nothing_is_resumed_at_step_0(manifest, monkeypatch):
    class Killed(BaseException):
        pass

    def kill() -> None:
        raise Killed

    before_step(monkeypatch, 2, kill)
    with pytest.raises(Killed):
        run(manifest)
    folder = only_run(manifest)
    monkeypatch.undo()
    assert run(manifest, resume="auto").folder == folder
    told = [event["text"] for event in events_of(folder, "warning")]
    assert "nothing was saved yet: this run starts at step 0" in told
    assert losses_of(folder) == losses_of(run(manifest).folder)


@pytest.mark.fault(4)
def test_sigusr1_saves_and_the_run_continues(manifest, monkeypatch):
    before_step(monkeypatch, 1, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    folder = run(manifest).folder
    assert [event["step"] for event in events_of(folder, "saved")] == [2, 4, 6]
    assert events_of(folder, "finished")

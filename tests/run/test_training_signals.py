"""Runs that are stopped or killed from outside, in processes of their own, and resumed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from expert.core.publish import damage
from expert.core.rundir import RunFolderError
from expert.model.load import LoadedModel
from expert.run.session import checkpoints
from expert.training import loop
from tests.faults.counting import case, scaled
from tests.jobs.runs import (
    events_of,
    losses_of,
    run,
    saved_steps,
    until,
    weights_of,
    write_expert,
)
from tests.jobs.trainer import ACKNOWLEDGED, GO_ON, HELD, begun, ended

# Two epochs of six steps with accumulation, dropout and evaluation.
SETTINGS = {
    "dropout": 0.2,
    "micro_batch_size": 2,
    "save_steps": 2,
    "save_total_limit": 2,
    "eval_steps": 4,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, base) -> tuple[Path, Path]:
    manifest = write_expert(tmp_path_factory.mktemp("whole"), base, SETTINGS)
    return manifest, run(manifest).folder


def own(whole, tmp_path) -> Path:
    """The manifest with its prepared data in a folder without runs."""
    manifest, _ = whole
    shutil.copytree(manifest.parent, tmp_path / "own", ignore=shutil.ignore_patterns("runs"))
    return Path(tmp_path, "own", "manifest.json")


def run_folder(manifest: Path) -> Path:
    return next((manifest.parent / "runs").iterdir())


def wait_for_file(manifest: Path, name: str) -> None:
    until((manifest.parent / name).exists, why=lambda: f"{name} did not come")


def times_told(manifest: Path, event: str) -> int:
    """How often the only run of a manifest has emitted an event."""
    files = list((manifest.parent / "runs").glob("*/events.jsonl"))
    return sum(len(events_of(file.parent, event)) for file in files)


def assert_equal_in_the_end(folder: Path, whole: tuple[Path, Path]) -> None:
    assert losses_of(folder) == losses_of(whole[1])
    assert weights_of(folder) == weights_of(whole[1])
    evals = [{e["step"]: e["loss"] for e in events_of(f, "eval")} for f in (folder, whole[1])]
    assert evals[0] == evals[1]


@pytest.mark.fault(4)
def test_a_signal_saves_the_step_reached_and_the_run_is_resumed_from_there(whole, tmp_path):
    manifest = own(whole, tmp_path)
    process = begun(manifest=str(manifest), hold_at=5)
    wait_for_file(manifest, HELD)
    folder = run_folder(manifest)
    # In the meantime nobody else may train there.
    with pytest.raises(RunFolderError, match=f"is in use by process {process.pid} on "):
        run(manifest, resume=str(folder))
    os.kill(process.pid, signal.SIGTERM)
    wait_for_file(manifest, ACKNOWLEDGED)
    (manifest.parent / GO_ON).touch()
    assert ended(process) == 143
    assert max(losses_of(folder)) == 6  # the step under way was taken, and no other
    assert max(saved_steps(folder)) == 6
    assert damage(folder / "checkpoints" / "step-000006") == ""
    told = events_of(folder, "stopped")[0]
    assert (told["step"], told["exit_code"], told["reason"]) == (6, 143, "SIGTERM")
    assert_equal_in_the_end(run(manifest, resume="auto").folder, whole)


@pytest.mark.fault(5)
def test_a_second_signal_ends_the_run_at_once_and_damages_nothing(whole, tmp_path):
    manifest = own(whole, tmp_path)
    process = begun(manifest=str(manifest), hold_at=2)
    wait_for_file(manifest, HELD)
    os.kill(process.pid, signal.SIGTERM)
    wait_for_file(manifest, ACKNOWLEDGED)  # two signals that wait together are one
    os.kill(process.pid, signal.SIGTERM)
    assert ended(process) == 143
    folder = run_folder(manifest)
    assert saved_steps(folder) == [2]  # the step under way was not waited for
    assert events_of(folder, "stopped") == []
    assert_equal_in_the_end(run(manifest, resume="auto").folder, whole)


def interrupted_in(monkeypatch, owner, name: str, call: int, number: int) -> None:
    """A signal comes in the middle of the `call`-th call, counted from 1."""
    original, calls = getattr(owner, name), []

    def with_a_signal(*args, **more):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return original(*args, **more)

    monkeypatch.setattr(owner, name, with_a_signal)


@pytest.mark.fault(4)
@pytest.mark.parametrize(
    ("owner", "name", "call", "reached", "number"),
    [
        # The first evaluation only shows that it fits; the second is due after four steps.
        pytest.param(LoadedModel, "evaluate", 2, 4, signal.SIGTERM, id="in an evaluation"),
        pytest.param(checkpoints, "save_checkpoint", 2, 4, signal.SIGINT, id="in a save"),
        pytest.param(loop, "seed_step", 12, 12, signal.SIGTERM, id="in the last step"),
    ],
)
def test_a_signal_is_answered_wherever_it_comes(
    whole, tmp_path, monkeypatch, owner, name, call, reached, number
):
    """An evaluation that was given up is made up for, and counts once."""
    manifest = own(whole, tmp_path)
    with monkeypatch.context() as patch:
        interrupted_in(patch, owner, name, call, number)
        stopped = run(manifest)
    assert (stopped.exit_code, stopped.steps, stopped.final) == (128 + number, reached, None)
    assert max(saved_steps(stopped.folder)) == reached
    done = run(manifest, resume="auto")
    assert done.exit_code == 0
    assert_equal_in_the_end(done.folder, whole)
    assert len(events_of(done.folder, "eval")) == len(events_of(whole[1], "eval"))


def killed_at_random(whole, manifest: Path, kills: int, seed: int) -> None:
    """Kill, resume, kill, ... and in the end let it finish."""
    chance = random.Random(seed)
    for kill in range(kills):
        event = "resumed" if kill else "saved"
        known, resume = times_told(manifest, event), {"resume": "auto"} if kill else {}
        process = begun(manifest=str(manifest), pause=0.01, **resume)
        until(lambda: times_told(manifest, event) > known)  # noqa: B023 - at once
        time.sleep(chance.uniform(0.0, 0.6))  # any moment will do
        with contextlib.suppress(ProcessLookupError):  # it may have finished by then
            os.kill(process.pid, signal.SIGKILL)
        assert ended(process) in (0, -signal.SIGKILL)
        folder = run_folder(manifest)
        newest = max(saved_steps(folder))
        with case():
            assert damage(folder / "checkpoints" / f"step-{newest:06d}") == ""
        if (folder / "final").is_dir():
            break
    else:
        run(manifest, resume="auto")
    assert events_of(folder, "rejected") == []
    assert_equal_in_the_end(folder, whole)


@pytest.mark.fault(1)
def test_kills_at_any_moment_leave_a_run_that_ends_the_same(whole, tmp_path):
    killed_at_random(whole, own(whole, tmp_path), kills=2, seed=1)


@pytest.mark.fault(1)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(scaled(55)))
def test_200_kills_at_any_moment_leave_runs_that_end_the_same(whole, tmp_path, seed):
    killed_at_random(whole, own(whole, tmp_path), kills=5, seed=seed)

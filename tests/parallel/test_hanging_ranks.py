"""A rank that hangs in a real run of two is found, named and ended, and the run continues."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from expert.core.errors import EXIT_HUNG, EXIT_OK
from tests.cli.running import ROOT
from tests.cli.test_many_gpus import PATIENCE_SECONDS, pid_of_rank, run_of
from tests.cli.test_many_gpus import started as start
from tests.jobs.runs import base_model, events_of, run, saved_steps, write_expert
from tests.parallel.test_worlds import CLOSE, numbers_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds ranks in /proc"),
]
TWO = ("--gpus", "2")
LIMIT = 30
CONFIG: dict[str, Any] = {"epochs": 20, "micro_batch_size": 2, "save_steps": 10, "device": "cpu"}


@pytest.fixture(autouse=True)
def short_limit(monkeypatch):
    monkeypatch.setenv("EXPERT_RANK_TIMEOUT", str(LIMIT))


@pytest.fixture
def manifest(tmp_path) -> Path:
    return write_expert(tmp_path / "expert", base_model(), CONFIG)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    return run(write_expert(tmp_path_factory.mktemp("alone"), base_model(), CONFIG)).folder


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").is_dir()


def check_ended(folder: Path, err: str, pid: int, rank: int) -> None:
    """The rank is named first, all have ended, and what the others were in is kept."""
    first = err.splitlines()[0]
    assert first.startswith(f"rank {rank} does not answer: "), err
    assert not is_there(pid)
    stacks = folder / "ranks" / f"rank-{1 - rank}.stacks.txt"
    assert "Thread" in stacks.read_text()
    assert str(folder / "ranks") in err
    if rank != 0:  # who writes the events is alive
        assert events_of(folder, "failed")[-1]["error"] == first


def check_continues(manifest: Path, folder: Path, alone: Path) -> None:
    again = start(manifest, *TWO, "--resume", str(folder))
    _, err = again.communicate(timeout=PATIENCE_SECONDS)
    assert again.returncode == EXIT_OK, err
    assert numbers_of(folder) == pytest.approx(numbers_of(alone), rel=CLOSE)
    assert not list(folder.rglob(".tmp*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_in_a_step_is_named_and_the_run_continues(manifest, alone, rank):
    process = start(manifest, *TWO)
    folder = run_of(manifest, 30)
    pid = pid_of_rank(rank, manifest)
    os.kill(pid, signal.SIGSTOP)
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == EXIT_HUNG, err
    check_ended(folder, err, pid, rank)
    assert err.splitlines()[-1].endswith(f"--resume {folder}")
    check_continues(manifest, folder, alone)


def test_a_rank_that_is_stopped_in_a_save_is_named_and_the_run_continues(
    manifest, alone, monkeypatch, tmp_path
):
    hook = tmp_path / "hook" / "sitecustomize.py"
    hook.parent.mkdir()
    shutil.copy(ROOT / "tests" / "parallel" / "stop_while_saving.py", hook)
    with monkeypatch.context() as patch:
        patch.setenv("STOP_WHILE_SAVING", "0 step-000020")
        process = start(manifest, *TWO, path=(hook.parent,))
        folder = run_of(manifest, 10)
        pid = pid_of_rank(0, manifest)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == EXIT_HUNG, err
    check_ended(folder, err, pid, 0)
    assert f"it was last seen saving the checkpoint of step {20}" in err.splitlines()[0]
    assert 20 not in saved_steps(folder)
    check_continues(manifest, folder, alone)


def test_all_ranks_start_again_where_restarts_are_left(manifest, alone):
    process = start(manifest, *TWO, "--max-restarts", "1")
    folder = run_of(manifest, 30)
    os.kill(pid_of_rank(1, manifest), signal.SIGSTOP)
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == EXIT_OK, err
    assert len(events_of(folder, "resumed")) == 1
    assert numbers_of(folder) == pytest.approx(numbers_of(alone), rel=CLOSE)


def test_ranks_that_are_stopped_together_continue_together(manifest):
    process = start(manifest, *TWO)
    run_of(manifest, 10)
    pids = [pid_of_rank(rank, manifest) for rank in range(2)]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(LIMIT / 2)  # more than a rank may be silent for
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == EXIT_OK, err


def test_stopping_the_command_that_started_the_ranks_does_not_end_them(manifest):
    process = start(manifest, *TWO)
    run_of(manifest, 10)
    process.send_signal(signal.SIGSTOP)
    time.sleep(LIMIT / 2)  # more than a rank may be silent for
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == EXIT_OK, err

"""`expert validate --gpus` as a person uses it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from expert.core.errors import EXIT_INTERRUPTED, EXIT_USAGE
from tests.cli.running import ROOT
from tests.jobs.validated_runs import as_it_was, learnt

__all__ = ["as_it_was"]  # a fixture for every test here: the runs are looked at by others too

PATIENCE_SECONDS = 240.0


def test_several_starts_by_torchrun_are_refused(run, monkeypatch):
    world = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**world, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    ran = run("validate", "nowhere", "--device", "cpu")
    assert ran.code == EXIT_USAGE
    assert ran.err.startswith("torchrun has started expert validate several times")


def started() -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A validation by two processes, both of which are at work."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    words = ["validate", str(learnt()), "--device", "cpu", "--gpus", "2", "--checkpoints", "all"]
    process = subprocess.Popen(
        [sys.executable, "-m", "expert", *words],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    end = time.monotonic() + PATIENCE_SECONDS
    while "answering" not in process.stdout.readline():
        assert time.monotonic() < end
    children = psutil.Process(process.pid).children()
    return process, [each for each in children if "validate.models" in " ".join(each.cmdline())]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")
def test_ctrl_c_ends_all_processes_and_writes_no_verdict():
    process, children = started()
    assert len(children) == 2
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == EXIT_INTERRUPTED
    assert "no verdict was written" in err
    assert not any(child.is_running() for child in children)
    assert not (learnt() / "validation.json").exists()

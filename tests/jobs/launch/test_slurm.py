"""The script of `expert launch --on slurm` in a real Slurm: submitted, requeued, resumed."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from expert.jobs.launch.cluster import make_job
from expert.jobs.launch.submit import write_job
from expert.manifest.reader import read_manifest
from tests.jobs.launch.one_box_slurm import Slurm, running, wait_until_idle, why_not
from tests.jobs.runs import base_model, events_of, run_with_steps, until, write_expert

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]

PATIENCE_SECONDS = 300.0
SECONDS_TO_FORGET = 15.0
"""Until slurmd starts a job again that it has just ended; Slurm itself waits two minutes."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def submitted(slurm: Slurm, folder: Path, epochs: int, **later: Any) -> tuple[str, Path]:
    """A job of a rank on each of two machines, and where its runs go. `later`: keys that the
    manifest has when the job runs."""
    config, base = {"device": "cpu", "epochs": epochs}, base_model()
    read = read_manifest(write_expert(folder / "expert", base, config))
    job = make_job(
        read,
        "slurm",
        nodes=2,
        gpus=1,
        cpus=1,
        setup=("export MASTER_ADDR=127.0.0.1",),  # both machines are this one
    )
    file = write_job(job, None)
    if later:
        write_expert(folder / "expert", base, config | later)
    log = folder / "job.log"
    words = ("sbatch", "--parsable", f"--output={log}", f"--chdir={folder}", str(file))
    number = slurm.call(*words).strip()
    return number, folder / "expert" / "runs" / f"demo-{number}"


def run_in(runs: Path, log: Path, steps: int) -> Path:
    """The only run there, once it has made that many steps since it was last started."""
    why = partial(Path.read_text, log)
    return until(lambda: run_with_steps(runs, steps), PATIENCE_SECONDS, why)


def wait_for(slurm: Slurm, job: str, *states: str) -> str:
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        state = slurm.state(job)
        if state in states:
            return state
        time.sleep(0.5)
    raise AssertionError(f"{slurm.state(job)} is none of {states}")


def test_a_job_that_is_warned_saves_is_queued_again_and_finishes_the_same_run(slurm, tmp_path):
    job, runs = submitted(slurm, tmp_path, epochs=8)
    log = tmp_path / "job.log"
    folder = run_in(runs, log, 8)
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    wait_for(slurm, job, "PENDING", "REQUEUED")
    (stopped,) = events_of(folder, "stopped")
    assert stopped["exit_code"] == 143
    assert events_of(folder, "saved")[-1]["step"] == stopped["step"]
    wait_until_idle(slurm)
    time.sleep(SECONDS_TO_FORGET)
    slurm.call("scontrol", "update", f"jobid={job}", "StartTime=now")  # else in two minutes
    assert wait_for(slurm, job, "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED", log.read_text()
    (resumed,) = events_of(folder, "resumed")
    assert resumed["step"] == stopped["step"]
    assert len(events_of(folder, "finished")) == 1
    assert [path.name for path in runs.glob("demo-*")] == [folder.name]
    assert (folder / "ranks" / "rank-1.log").is_file()


def test_a_job_that_is_cancelled_saves_and_is_not_queued_again(slurm, tmp_path):
    job, runs = submitted(slurm, tmp_path, epochs=40)
    folder = run_in(runs, tmp_path / "job.log", 8)
    slurm.call("scancel", job)
    assert wait_for(slurm, job, "CANCELLED", "COMPLETED", "FAILED") == "CANCELLED"
    time.sleep(3)
    assert slurm.state(job) == "CANCELLED"
    assert len(events_of(folder, "stopped")) == 1


def test_a_wrong_manifest_is_not_queued_again(slurm, tmp_path):
    job, _ = submitted(slurm, tmp_path, epochs=2, rank="many")
    assert wait_for(slurm, job, "FAILED", "COMPLETED", "REQUEUED") == "FAILED"

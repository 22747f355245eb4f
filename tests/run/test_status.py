"""Which run is watched, how it stands, and when watching ends."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from expert.core.rundir import RunFolder, RunFolderError
from expert.run.stored.locate import find_run
from expert.run.stored.status import follow_run, run_status
from tests.each import each

NO_SUCH_PID = 2**22 + 7  # above Linux's largest
STARTED = {
    "event": "started",
    "time": 1.0,
    "step": 0,
    "expert": "demo",
    "model": "tiny",
    "device": "CPU",
    "total_steps": 9,
    "epochs": 3,
}
STEP = {"event": "step", "time": 2.0, "step": 4, "loss": 1.5, "rate": 1e-3, "epoch": 1.25}
FINISHED = {"event": "finished", "time": 3.0, "step": 9, "loss": 1.0}


def a_run(folder: Path, *events: dict[str, Any], pid: int | None = None) -> RunFolder:
    """A run folder with these events; `pid` holds its lock."""
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}", encoding="utf-8")
    made = RunFolder(folder)
    write(made, *events)
    if pid is not None:
        holder = {"pid": pid, "host": socket.gethostname(), "since": "", "process": ""}
        made.lock_file.write_text(json.dumps(holder), encoding="utf-8")
    return made


def write(folder: RunFolder, *events: dict[str, Any]) -> None:
    with folder.events.open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(event) + "\n" for event in events)


def kinds(folder: RunFolder, **more: Any) -> list[str]:
    return [event["event"] for event in follow_run(folder, **more)]


# --- which run -----------------------------------------------------------------------------------


def test_the_newest_run_is_that_with_the_latest_time_in_its_name_whatever_its_expert(tmp_path):
    for name in ("z-20260101-000000", "a-20260102-000000", "a-20260102-000000-2", "b-20260101-1"):
        a_run(tmp_path / name)
    (tmp_path / "a-20260103-000000").mkdir()  # it was never started
    assert find_run(tmp_path).path.name == "a-20260102-000000-2"
    assert find_run(tmp_path / "z-20260101-000000").path.name == "z-20260101-000000"
    with pytest.raises(RunFolderError, match=r"is not a run folder: it has no plan\.json"):
        find_run(tmp_path / "a-20260103-000000")
    with pytest.raises(RunFolderError, match="there is no such folder"):
        find_run(tmp_path / "nowhere")


# --- how it stands -------------------------------------------------------------------------------


def test_a_finished_run_says_where_it_ended(tmp_path):
    saved = {"event": "saved", "time": 2.5, "path": "checkpoints/step-000004"}
    eval_ = {"event": "eval", "time": 2.4, "step": 4, "loss": 1.6}
    test = {"event": "eval", "time": 2.4, "step": 4, "loss": 9.0, "split": "test"}
    events = (STARTED, STEP, eval_, test, saved, FINISHED)
    status = run_status(a_run(tmp_path / "r", *events))
    assert (status.state, status.step, status.total_steps) == ("finished", 9, 9)
    assert (status.eval_loss, status.best_eval_loss, status.test_loss) == (1.6, 1.6, 9.0)
    again = {"event": "resumed", "time": 9.0, "step": 4}
    assert run_status(a_run(tmp_path / "a", *events, again)).test_loss is None
    # The path was written where the run was started; it is told as it leads there from here.
    assert status.last_checkpoint == str(tmp_path / "r" / "checkpoints" / "step-000004")
    assert status.final == str(tmp_path / "r" / "final")
    assert status.fallbacks == ()


def test_speed_use_of_the_card_and_peak_memory_are_reported(tmp_path):
    card = {"steps_per_second": 2.5, "gpu_utilization": 97.0, "peak_reserved_bytes": 9}
    later = {"step": 5, "peak_reserved_bytes": 8, "steps_per_second": 3.0}  # the peak was reset
    status = run_status(a_run(tmp_path / "g", STARTED, STEP | card, STEP | card | later))
    assert (status.steps_per_second, status.gpu_utilization) == (3.0, 97.0)
    assert (status.gpu_peak_memory_bytes, status.cpu_peak_memory_bytes) == (9, None)
    host = {"steps_per_second": 2.5, "cpu_peak_memory_bytes": 7}
    status = run_status(a_run(tmp_path / "c", STARTED, STEP | host))
    assert (status.gpu_peak_memory_bytes, status.cpu_peak_memory_bytes) == (None, 7)
    assert status.gpu_utilization is None
    finished = FINISHED | {"steps_per_second": 2.0}
    over = run_status(a_run(tmp_path / "f", STARTED, STEP | host, finished))
    assert (over.steps_per_second, over.cpu_peak_memory_bytes) == (2.0, 7)


def test_a_finished_run_says_nothing_of_an_earlier_step_as_if_it_were_the_last(tmp_path):
    told = {**FINISHED, "eval_loss": 1.2, "tokens_per_second": 70.0}
    early = run_status(a_run(tmp_path / "r", STARTED, {**STEP, "tokens_per_second": 50.0}, told))
    assert (early.step, early.loss, early.rate, early.epoch) == (9, None, None, None)
    assert (early.best_eval_loss, early.tokens_per_second) == (1.2, 70.0)
    told |= {"smoothed_loss": 1.1, "median_tokens_per_second": 80.0}
    new = run_status(a_run(tmp_path / "n", STARTED, STEP, told))
    assert (new.loss, new.tokens_per_second) == (1.1, 80.0)
    epoch = {"event": "epoch", "time": 2.5, "step": 9, "epoch": 3, "loss": 0.9}
    assert run_status(a_run(tmp_path / "e", STARTED, STEP, epoch, FINISHED)).epoch == 3
    last = run_status(a_run(tmp_path / "l", STARTED, {**STEP, "step": 9, "epoch": 3.0}, FINISHED))
    assert (last.loss, last.rate, last.epoch) == (1.5, 1e-3, 3.0)


def test_the_best_and_the_last_loss_on_the_validation_rows_are_reported_apart(tmp_path):
    evals = [
        {"event": "eval", "time": 2.0 + step, "step": step, "loss": loss, "split": "validation"}
        for step, loss in ((3, 1.4), (6, 1.2), (9, 1.9))
    ]
    status = run_status(a_run(tmp_path / "r", STARTED, *evals, {**FINISHED, "eval_loss": 1.2}))
    assert (status.eval_loss, status.best_eval_loss, status.best_eval_step) == (1.9, 1.2, 6)
    going = run_status(a_run(tmp_path / "g", STARTED, *evals))
    assert (going.eval_loss, going.best_eval_loss) == (1.9, 1.2)
    odd = {**evals[2], "loss": "nan"}
    assert run_status(a_run(tmp_path / "n", STARTED, *evals[:2], odd)).best_eval_loss == 1.2
    resumed = {"event": "resumed", "time": 9.0, "step": 3}
    undone = run_status(a_run(tmp_path / "u", STARTED, *evals, resumed))
    assert (undone.eval_loss, undone.best_eval_loss, undone.best_eval_step) == (1.4, 1.4, 3)


def test_a_run_whose_trainer_lives_is_running_and_one_whose_trainer_died_is_gone(tmp_path):
    saved = {"event": "saved", "time": 2.5, "step": 6, "path": "checkpoints/step-000006"}
    fell = {"event": "fell_back", "time": 2.0, "failure": "OutOfMemory", "reason": "2 GiB"}
    lives = a_run(tmp_path / "a", STARTED, STEP, fell, saved, pid=os.getpid())
    status = run_status(lives)
    assert (status.state, status.step, status.loss) == ("running", 6, 1.5)
    assert status.fallbacks == ("OutOfMemory: 2 GiB",)
    died = a_run(tmp_path / "b", STARTED, STEP, pid=NO_SUCH_PID)
    assert run_status(died).state == "gone"
    assert "the trainer ended without a final event" in run_status(died).because
    assert kinds(died, sleep=lambda seconds: None) == ["started", "step"]
    holder = {"pid": 1, "host": "elsewhere", "since": "", "process": ""}
    died.lock_file.write_text(json.dumps(holder), encoding="utf-8")  # on another machine
    assert run_status(died).state == "running"
    died.lock_file.unlink()
    died.events.unlink()
    bare = run_status(died)
    assert (bare.state, bare.step, bare.last_event) == ("gone", None, None)


def test_an_ending_before_a_resume_does_not_count(tmp_path):
    stopped = {"event": "stopped", "time": 3.0, "reason": "signal", "exit_code": 143}
    resumed = {"event": "resumed", "time": 4.0, "step": 2}
    folder = a_run(tmp_path / "a", STARTED, STEP, stopped, pid=os.getpid())
    assert (run_status(folder).state, run_status(folder).because) == ("stopped", "signal")
    write(folder, resumed, STARTED)
    assert (run_status(folder).state, run_status(folder).step) == ("running", 2)


# --- following -----------------------------------------------------------------------------------


@each("before", [(), ({"event": "stopped", "time": 3.0}, STARTED)], ids=["", "was resumed"])
def test_following_ends_when_the_run_has_finished_and_not_at_an_end_before(tmp_path, before):
    folder = a_run(tmp_path / "a", STARTED, *before, pid=os.getpid())
    waits = [lambda: write(folder, STEP), lambda: write(folder, FINISHED)]

    def sleep(seconds: float) -> None:
        if waits:
            waits.pop(0)()

    told = ["started", *(event["event"] for event in before), "step", "finished"]
    assert kinds(folder, sleep=sleep) == told

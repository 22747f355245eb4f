"""Actions of the pages start and stop real processes of the real command line."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from expert.core.errors import EXIT_INTERRUPTED
from expert.core.links import LinkRefused
from expert.core.rundir import Holder, RunFolder, process_of
from expert.jobs.board import actions
from expert.jobs.board.actions import (
    FOLDER,
    ActionRefused,
    Jobs,
    export_command,
    interrupt,
    stop_run,
    trainer_of,
)
from expert.jobs.board.folders import BoardItem
from tests.each import each
from tests.insight.pages import started, step_event, usual, write_run
from tests.jobs.board.board_client import BoardClient
from tests.jobs.runs import base_model, events_of, until, write_expert

RUN = "demo-20260101-120000"
SLEEPS = "import time; print('ready', flush=True); time.sleep(600)"


def sleeping() -> Any:
    process = subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def holder_for(pid: int, **changed: Any) -> Holder:
    facts = {"pid": pid, "host": socket.gethostname(), "since": "", "process": process_of(pid)}
    return Holder(**{**facts, **changed})


def about(root: Path, name: str) -> BoardItem:
    return BoardItem("run", root / name, root)


def lock(run: Path, holder: Holder) -> None:
    (run / ".lock").write_text(json.dumps(vars(holder)), encoding="utf-8")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / RUN, [started(), step_event(1)])


def test_stop_sends_ctrl_c_to_the_process_that_holds_the_run(run):
    process = sleeping()
    lock(run, holder_for(process.pid))
    assert trainer_of(RunFolder(run)) is not None
    browser = BoardClient(run.parent)
    answer = browser.post(f"/run/{browser.id_of(RUN)}/stop")
    assert answer.status_code == 200
    assert process.wait(timeout=60) == -signal.SIGINT
    process.stdout.close()
    assert browser.post(f"/run/{browser.id_of(RUN)}/stop").status_code == 409


@pytest.mark.slow
def test_stop_reaches_all_ranks_through_the_process_that_started_them(tmp_path, monkeypatch):
    manifest = write_expert(tmp_path / "expert", base_model(), {"epochs": 200})
    words = ["train", str(manifest), "--device", "cpu", "--gpus", "2"]
    process = subprocess.Popen([sys.executable, "-m", "expert", *words], start_new_session=True)
    until(lambda: any(events_of(path.parent, "step") for path in tmp_path.rglob("events.jsonl")))
    browser = BoardClient(tmp_path)
    browser.board.places.search(now=True)
    (run,) = browser.board.places.of_kind("run")
    sent: list[int] = []
    monkeypatch.setattr(
        actions, "interrupt", lambda holder: (sent.append(holder.pid), interrupt(holder))
    )
    assert browser.post(f"/run/{run.id}/stop").status_code == 200
    assert sent == [process.pid]
    assert process.wait(timeout=240) == EXIT_INTERRUPTED
    (stopped,) = events_of(run.path, "stopped")
    assert events_of(run.path, "saved")[-1]["step"] == stopped["step"]


@each("changed", [
    {"host": "another-machine"},
    {"process": "another-boot:123"},
    {"process": ""},
])  # fmt: skip
def test_only_the_recorded_trainer_process_gets_a_signal(changed, run):
    process = sleeping()
    lock(run, holder_for(process.pid, **changed))
    with pytest.raises(ActionRefused):
        stop_run(run)
    assert process.poll() is None
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_board_itself_and_a_process_that_is_gone_get_no_signal(run):
    with pytest.raises(ActionRefused):
        interrupt(holder_for(os.getpid()))
    process = subprocess.Popen([sys.executable, "-c", ""])
    holder = holder_for(process.pid)
    process.wait()
    with pytest.raises(ActionRefused):
        interrupt(holder)
    with pytest.raises(ActionRefused):
        stop_run(run)  # no process has locked it


def test_a_command_runs_in_a_session_of_its_own_and_its_output_and_code_are_kept(tmp_path):
    jobs = Jobs()
    job = jobs.start("version", ["--version"], about(tmp_path, "s"))
    assert os.getsid(job.holder.pid) == job.holder.pid != os.getsid(0)
    until(lambda: job.exit_code is not None)
    assert job.exit_code == 0
    assert job.state == "finished"
    assert job.output().startswith("expert ")
    assert job.words == "expert --version"
    assert jobs.all() == [jobs.get(job.id)] == [job]


def test_a_failed_command_shows_its_output(tmp_path):
    browser = BoardClient(tmp_path)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "manifest.yaml").write_text("base: x\n", encoding="utf-8")
    place = f"/manifest/{browser.id_of('bad', 'manifest')}/train"
    go = browser.post(place).json()["go"]
    job = browser.board.jobs.get(go.rpartition("/")[2])
    until(lambda: job.exit_code is not None)
    page = browser.page(go)
    assert 'data-state="failed"' in page
    assert "manifest.yaml" in page
    assert f"expert train --manifest {tmp_path}/bad/manifest.yaml" in page
    assert job.about in browser.page("/start")


def test_a_command_is_not_started_twice_nor_beyond_the_limit(tmp_path, monkeypatch):
    jobs = Jobs()
    monkeypatch.setattr(actions.sys, "executable", "/bin/sleep")
    monkeypatch.setattr(actions, "MAX_RUNNING", 2)
    real = subprocess.Popen
    monkeypatch.setattr(
        actions.subprocess, "Popen", lambda command, **how: real(["/bin/sleep", "600"], **how)
    )
    started_jobs = [jobs.start("train", [], about(tmp_path, name)) for name in "ab"]
    for name in "ac":
        with pytest.raises(ActionRefused, match="already"):
            jobs.start("train", [], about(tmp_path, name))
    for job in started_jobs:
        interrupt(job.holder)
        until(lambda job=job: job.exit_code is not None)


def test_resume_is_refused_while_running_and_without_the_manifest(run):
    browser = BoardClient(run.parent)
    place = f"/run/{browser.id_of(RUN)}/resume"
    answer = browser.post(place)
    assert answer.status_code == 409
    assert "manifest" in answer.json()["problem"]
    lock(run, holder_for(os.getppid()))
    assert browser.post(place).status_code == 409
    assert not (run.parent / FOLDER).exists()


def test_an_export_gets_an_unused_folder_name(run):
    found = BoardItem("run", run, run.parent)
    first = export_command(found, merged=True)
    assert first == ["export", str(run), "--to", f"{run.parent}/exports/{RUN}-merged", "--merged"]
    (run.parent / "exports" / f"{RUN}-adapter").mkdir(parents=True)
    assert export_command(found, merged=False)[3] == f"{run.parent}/exports/{RUN}-adapter-2"


@each("action", ["delete", "..", "notes%2f", "stop%00"])
def test_unknown_actions_are_refused(action, tmp_path):
    write_run(tmp_path / RUN, usual(2))
    browser = BoardClient(tmp_path)
    assert browser.post(f"/run/{browser.id_of(RUN)}/{action}").status_code in (404, 405)


def test_the_folder_of_commands_may_not_be_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / FOLDER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LinkRefused):
        Jobs().start("train", [], about(tmp_path, "a"))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_nobody_else_reads_what_the_board_stores(tmp_path):
    folder = tmp_path / FOLDER
    folder.mkdir(mode=0o755)  # by an earlier board
    job = Jobs().start("version", ["--version"], BoardItem("run", Path(tmp_path / "s"), tmp_path))
    until(lambda: job.exit_code is not None)
    assert stat.S_IMODE(job.log.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700

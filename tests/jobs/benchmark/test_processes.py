"""The processes that measure settings, when one crashes, hangs or fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expert.jobs.benchmark import child, processes
from expert.jobs.benchmark.processes import Job, MeasurementFailed, Ready, SettingProcess, Window
from tests.forked import forked
from tests.jobs.benchmark.fake_processes import a_job
from tests.jobs.runs import times_slower

READY = Ready(step_seconds=0.1, steps=5, cores=2, threads=2, environment={"python": "x"})
WINDOW = Window(first=8, steps=4, tokens=100, examples=9, seconds=2.0, others=0.1)


# Targets are functions of a module, so that a spawned process can import them.


def works(job: Job, connection: Any, log: str, environ: dict[str, str]) -> None:
    connection.send({"doing": "training", "done": 1, "of": 2})
    connection.send({"ready": READY})
    while True:
        connection.send({"window": WINDOW} if connection.recv() else {"measured": {"loss": 1.0}})


def fails(job: Job, connection: Any, *_: Any) -> None:
    connection.send({"failed": "out of memory"})


def crashes(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def dies_when_paused(job: Job, connection: Any, *_: Any) -> None:
    connection.send({"ready": READY})
    os.kill(os.getpid(), signal.SIGKILL)


def leaves_words(job: Job, connection: Any, log: str, environ: dict[str, str]) -> None:
    Path(log).write_text("Traceback\nno torch here\n", encoding="utf-8")
    os._exit(3)


def hangs(job: Job, connection: Any, log: str, environ: dict[str, str]) -> None:
    os.setsid()
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(log).write_text(str(started.pid), encoding="utf-8")
    time.sleep(600)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts processes; they are ended with the test."""
    forked(int).join()  # the server has imported everything
    monkeypatch.setattr(processes, "START_SECONDS", 0.0)
    made: list[SettingProcess] = []

    def started(target: Callable[..., None], **more: Any) -> SettingProcess:
        reported: list[Any] = []
        progress = lambda *words: reported.append(words)  # noqa: E731
        process = SettingProcess(
            a_job(**more), log=tmp_path / "log.txt", progress=progress, target=target
        )
        made.append(process)
        process.reported = reported  # type: ignore[attr-defined]
        return process

    yield started
    for each in made:
        each.stop()


def test_two_settings_are_timed_measured_and_stopped_beside_each_other(start):
    one, other = start(works), start(works)
    assert one.ready == READY
    assert one.reported == [("starting", 0, 0), ("training", 1, 2)]
    for process in (one, other, one):
        assert process.window(4, 2).rate == 50.0
    assert one.measured() == {"loss": 1.0}
    assert one.window(4, 0) == WINDOW  # and it is timed again
    one.stop()
    assert not one.alive
    assert other.window(4, 0) == WINDOW


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (fails, "^out of memory$"),
        pytest.param(
            crashes,
            "its process was killed by SIGSEGV",
            marks=pytest.mark.skipif(os.name != "posix", reason="signals are POSIX"),
        ),
        (leaves_words, "its process ended with code 3: no torch here"),
    ],
)
def test_a_setting_that_does_not_get_ready_is_lost_with_the_reason(start, target, words):
    with pytest.raises(MeasurementFailed, match=words):
        start(target)
    assert start(works).ready == READY  # and spoils no later one


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")
@pytest.mark.parametrize("order", ["window", "measured"])
def test_a_setting_that_dies_while_it_waits_is_lost(start, order):
    process = start(dies_when_paused)
    with pytest.raises(MeasurementFailed, match="its process was killed by SIGKILL"):
        process.window(4, 0) if order == "window" else process.measured()
    assert not process.alive


def test_a_setting_with_slow_steps_is_not_given_up(start):
    """Each answer starts the limit again."""
    process, waited = start(works), list[float]()
    answers = [*({"doing": "training", "done": n, "of": 0} for n in range(3)), {"window": WINDOW}]
    real = process._connection
    process._connection = SimpleNamespace(
        poll=lambda limit: waited.append(limit) or True, recv=lambda: answers.pop(0)
    )
    assert process._wait_for(("window",), 1.5) == {"window": WINDOW}
    assert waited == [1.5] * 4
    process._connection = real


@pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX")
def test_a_setting_that_hangs_is_ended_with_all_that_it_started(start, tmp_path):
    limit = round(3 * times_slower())
    with pytest.raises(MeasurementFailed, match=f"no answer for {limit} s"):
        start(hangs, limit=float(limit))
    pid = int((tmp_path / "log.txt").read_text(encoding="utf-8"))
    for _ in range(100):
        if not _lives(pid):
            break
        time.sleep(0.05)
    assert not _lives(pid)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def starts_too_late(log: str, printed: str) -> None:
    os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT), 2)
    child.main(None, None, log, {})  # type: ignore[arg-type]


def test_a_process_started_after_its_benchmark_was_stopped_ends_silently(tmp_path):
    process = forked(starts_too_late, str(tmp_path / "gone" / "log.txt"), str(tmp_path / "printed"))
    process.join()
    assert process.exitcode == 1
    assert (tmp_path / "printed").read_text() == ""


def test_a_process_forked_after_cuda_was_initialised_is_spawned_instead(tmp_path, monkeypatch):
    methods: list[str] = []

    class Pretending(SettingProcess):
        def _start(self, target: Any, job: Any, method: str) -> None:
            methods.append(method)

        def _wait_for(self, wanted: Any, limit: float) -> dict[str, Any]:
            return {"ready": READY} if methods[-1] == "spawn" else {"spawn": True}

        def stop(self) -> None:
            self.alive = False

    made = Pretending(a_job(), log=tmp_path / "log", progress=lambda *_: None, target=works)
    assert methods == ["forkserver", "spawn"]
    assert made.alive
    assert made.ready == READY


def test_a_host_that_runs_ahead_does_not_make_steps_look_short():
    """Compiled in nine seconds, launched in 50 ms while the device was busy, then at its pace."""
    lines = [{"event": "step", "updates": 1, "seconds": seconds} for seconds in (9.0, 0.05, 0.6)]
    assert child._step_seconds([*lines, {"event": "saved"}]) == 0.6


LEAVES_A_SEMAPHORE = """
import multiprocessing, os, time

from expert.jobs.benchmark import processes

def leaves(connection):
    kept = multiprocessing.get_context("spawn").Semaphore()
    connection.send(kept is not None)
    time.sleep(60)

if __name__ == "__main__":
    os.environ.setdefault(*processes.NO_TRACKER_WARNING)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=leaves, args=(there,))
    process.start()
    here.recv()
    process.kill()
    process.join()
"""


def test_a_killed_process_leaves_no_warning_of_pythons_resource_tracker(tmp_path):
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES_A_SEMAPHORE, encoding="utf-8")
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("", "")

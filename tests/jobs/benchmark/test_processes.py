"""The process that measures a setting, when it crashes, hangs or fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expert.jobs.benchmark.child import Job, MeasurementFailed, events_of, run_setting
from tests.each import each
from tests.forked import forked
from tests.jobs.runs import times_slower

# Targets are functions of a module, so that a forked process can import them.


def works(job: Job, connection: Any, log: str, environ: dict[str, str]) -> None:
    connection.send({"event": "step", "step": 1})
    time.sleep(600)


def fails(job: Job, connection: Any, *_: Any) -> None:
    connection.send({"event": "setting_failed", "error": "out of memory"})


def crashes(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves_words(job: Job, connection: Any, log: str, environ: dict[str, str]) -> None:
    Path(log).write_text("Traceback\nno torch here\n", encoding="utf-8")
    os._exit(3)


def hangs(job: Job, connection: Any, log: str, environ: dict[str, str]) -> None:
    os.setsid()
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(log).write_text(str(started.pid), encoding="utf-8")
    time.sleep(600)


def events(target: Any, log: Path, limit: float = 60.0) -> Any:
    forked(int).join()  # the server has imported everything
    job: Any = SimpleNamespace(plan=SimpleNamespace(kernels=SimpleNamespace(device="cpu")))
    return events_of(job, log=log, limit=limit, target=target)


@each(
    ("target", "words"),
    [
        (fails, "^out of memory$"),
        (crashes, "its process was killed by SIGSEGV"),
        (leaves_words, "its process ended with code 3: no torch here"),
    ],
)
def test_a_setting_that_fails_says_why_and_spoils_no_later_one(tmp_path, target, words):
    with pytest.raises(MeasurementFailed, match=words):
        next(events(target, tmp_path / "log.txt"))
    running = events(works, tmp_path / "log.txt")
    assert next(running) == {"event": "step", "step": 1}
    running.close()


def test_a_setting_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    limit = round(3 * times_slower())
    with pytest.raises(MeasurementFailed, match=f"no answer for {limit} s"):
        next(events(hangs, tmp_path / "log.txt", float(limit)))
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
    run_setting(None, None, log, {})  # type: ignore[arg-type]


def test_a_process_started_after_its_benchmark_was_stopped_ends_silently(tmp_path):
    process = forked(starts_too_late, str(tmp_path / "gone" / "log.txt"), str(tmp_path / "printed"))
    process.join()
    assert process.exitcode == 1
    assert (tmp_path / "printed").read_text() == ""

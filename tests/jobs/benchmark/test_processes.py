"""The process that measures a setting, when it fails, hangs or is stopped."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from expert.core.process import Child
from expert.jobs.benchmark import measured
from expert.jobs.benchmark.measured import MeasurementFailed, events_of
from tests.each import each

RUNS = """
import os, pathlib, sys, time
run = pathlib.Path(sys.argv[1]) / "demo-1"
run.mkdir(parents=True)
(run / "pid").write_text(str(os.getpid()))
(run / "events.jsonl").write_text('{"event": "step", "step": 1, "time": 1.0}\\n')
"""


def events(monkeypatch, place: Path, code: str, limit: float = 60.0):
    """The events of a process that runs this code instead of `expert train`."""
    child = Child

    def started(command, **how):
        return child([sys.executable, "-c", code, *command[4:]], **how)

    monkeypatch.setattr(measured, "Child", started)
    log = place / "log.txt"
    return events_of([str(place / "runs")], place / "runs", log=log, env={}, limit=limit)


@each(
    ("code", "words"),
    [
        ("import sys; sys.exit('no torch here')", "its process ended with code 1: no torch here"),
        ("import os; os.kill(os.getpid(), 11)", "its process was killed by SIGSEGV"),
        (f"{RUNS}\ntime.sleep(600)", "not finished after"),
    ],
)
def test_a_setting_that_fails_or_hangs_says_why(tmp_path, monkeypatch, code, words):
    limit = 10.0 if "sleep" in code else 60.0
    with pytest.raises(MeasurementFailed, match=words):
        list(events(monkeypatch, tmp_path, code, limit))


def test_a_setting_is_ended_with_the_measurement(tmp_path, monkeypatch):
    running = events(monkeypatch, tmp_path, f"{RUNS}\ntime.sleep(600)")
    assert next(running)["step"] == 1
    pid = int((tmp_path / "runs" / "demo-1" / "pid").read_text(encoding="utf-8"))
    running.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)

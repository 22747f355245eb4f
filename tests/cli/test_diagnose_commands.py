"""`expert diagnose RUN` as a person runs it."""

from __future__ import annotations

import json
import os
import shutil
import socket
from functools import partial
from pathlib import Path

import pytest

from expert.core.rundir import RunFolder
from tests.insight.pages import write_run
from tests.insight.records import HEALTHY_STEP, PLAN, finished_events, step_events
from tests.jobs.trained_runs import finished
from tests.wording import wording

written = partial(write_run, plan=PLAN)
"""A run folder with these events and nothing else but its plan."""


@pytest.fixture(scope="module")
def moved(tmp_path_factory) -> Path:
    """A finished run, copied to where nothing else of it is."""
    place: Path = tmp_path_factory.mktemp("moved") / "run"
    shutil.copytree(finished("lora"), place)
    return place


def test_the_verdict_is_the_first_line(run, moved):
    ran = run("diagnose", str(moved))
    lines = ran.out.splitlines()
    assert (ran.code, ran.err) == (0, "")
    assert lines[0].startswith("compute-bound: good. The CPU computes ")
    [update] = [number for number, line in enumerate(lines) if line.startswith("one step: ")]
    names = [line.split("  ")[1] for line in lines[update + 1 : update + 7]]
    assert names[0].startswith(wording("waiting-for-data"))
    assert wording("the-run-so-far") in ran.out
    [rates] = [line for line in lines if " tokens/s" in line and line.startswith("  ")]
    assert " samples/s" in rates
    assert lines[-1].startswith(f"next: expert sample {moved} --prompt")
    found = json.loads(run("diagnose", str(moved), "--json").out)
    assert found["verdict"]["kind"] == "compute-bound"
    assert set(found["seconds"]) >= {"loading", "training", "evaluating", "saving", "rest", "total"}
    assert found["update"]["wall"] > 0
    assert found["state"] == "finished"


def test_a_slow_feed_is_reported_with_the_command_that_fixes_it(run, tmp_path):
    steps = step_events(time_data_wait=4.0, seconds=5.6)
    feed = {"event": "feed", "step": 0, "kind": "late", "workers": 0}
    ran = run("diagnose", str(written(tmp_path / "run", finished_events(steps, feed))))
    assert ran.code == 0
    assert ran.out.startswith(wording("data-bound-the-device-computes"))
    assert "expected gain: pre-tokenise: 3.5x (1.1 s / 320 ms)" in ran.out
    assert "! warning  tokenised-late" in ran.out
    assert ran.out.endswith(wording("next-expert-train-file"))


def test_findings_with_errors_leave_the_exit_code_alone(run, tmp_path):
    events = [*step_events(4), {"event": "failed", "error": "ValueError: [red] row", "time": 200}]
    ran = run("diagnose", str(written(tmp_path / "run", events)))
    assert ran.code == 0
    assert "ValueError: [red] row" in ran.out
    assert f"--resume {tmp_path / 'run'}" in ran.out


def test_a_run_that_is_running_is_diagnosed_as_it_is(run, tmp_path):
    folder = written(tmp_path / "run", finished_events(step_events())[:-1])
    killed = run("diagnose", str(folder)).out
    assert "✗ error" in killed
    assert "no-ending" in killed
    holder = {"pid": os.getpid(), "host": socket.gethostname()}
    RunFolder(folder).lock_file.write_text(json.dumps(holder), encoding="utf-8")
    ran = run("diagnose", str(folder))
    assert ran.out.startswith(wording("compute-bound-good-gpu-computes"))
    assert "✗ error" not in ran.out
    assert ran.out.endswith(wording("next-expert-watch", folder=folder))


def test_a_run_without_a_step_shows_no_step_times(run, tmp_path):
    events = [{"event": "started", "time": 1.0, "step": 0}]
    ran = run("diagnose", str(written(tmp_path / "run", events, plan={})))
    assert ran.code == 0
    assert ran.out.startswith(wording("unknown-no-update-finished"))
    assert "one step:" not in ran.out


def test_damaged_files_are_counted_and_the_rest_is_judged(run, tmp_path):
    folder = written(tmp_path / "run", finished_events(step_events()))
    (folder / "plan.json").write_text("{", encoding="utf-8")
    whole = (folder / "events.jsonl").read_text(encoding="utf-8")
    (folder / "events.jsonl").write_text('{"event": \n' + whole + '{"event": "st', encoding="utf-8")
    ran = run("diagnose", str(folder))
    assert ran.code == 0
    words = " ".join(ran.out.split())
    assert wording("lines-cannot-read-missing") in words
    assert f"{HEALTHY_STEP['tokens_per_second']:,.0f} tokens/s" in ran.out

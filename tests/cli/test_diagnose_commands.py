"""`expert diagnose` as a person runs it: of a run, and before one."""

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
from tests.insight.records import PLAN, finished_events, step_events
from tests.jobs.runs import write_expert
from tests.jobs.trained_runs import finished

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
    assert names[0].startswith("waiting for data")
    assert "the run so far: " in ran.out
    [rates] = [line for line in lines if " tokens/s" in line and line.startswith("  ")]
    assert " samples/s" in rates
    assert lines[-1].startswith(f"next: expert sample {moved} --prompt")
    found = json.loads(run("diagnose", str(moved), "--json").out)
    assert found["verdict"]["kind"] == "compute-bound"
    assert found["learning"]["kind"] == "learning"
    assert set(found["seconds"]) >= {"loading", "training", "evaluating", "saving", "rest", "total"}
    assert found["update"]["wall"] > 0
    assert found["state"] == "finished"


def test_a_slow_feed_is_reported_with_the_command_that_fixes_it(run, tmp_path):
    steps = step_events(time_data_wait=4.0, seconds=5.6)
    feed = {"event": "feed", "step": 0, "kind": "late", "workers": 0}
    ran = run("diagnose", str(written(tmp_path / "run", finished_events(steps, feed))))
    assert ran.code == 0
    assert ran.out.startswith("data-bound: rows are tokenised while training: ")
    assert "expected gain: up to 3.5x" in ran.out
    assert "! warning  tokenised-late" in ran.out
    assert ran.out.endswith("train --manifest FILE --set training.config.tokenize=ahead\n")


def test_a_run_that_is_running_is_diagnosed_as_it_is(run, tmp_path):
    folder = written(tmp_path / "run", finished_events(step_events())[:-1])
    killed = run("diagnose", str(folder)).out
    assert "✗ error" in killed
    assert "no-ending" in killed
    holder = {"pid": os.getpid(), "host": socket.gethostname()}
    RunFolder(folder).lock_file.write_text(json.dumps(holder), encoding="utf-8")
    ran = run("diagnose", str(folder))
    assert ran.out.startswith("compute-bound: good. The GPU computes 100 % of a step's 299 ms")
    assert "✗ error" not in ran.out
    assert ran.out.endswith(f"next: expert watch {folder}\n")


# --- before a run ---------------------------------------------------------------------------------


def test_a_manifest_is_looked_at_and_the_last_line_sums_it_up(run, tmp_path):
    manifest = write_expert(tmp_path, "tiny", {"save_strategy": "no"})
    ran = run("diagnose", "-m", str(manifest), "--no-timing", "--gpu", "rtx-4090")
    assert ran.code == 0
    assert "training.config.save_strategy: epoch" in ran.out
    assert ran.out.splitlines()[-1] == "! 1 warning; a run would start on GeForce RTX 4090"
    options = ("--set", "training.config.attention=eager", "--gpu", "rtx-4090", "--json")
    found = json.loads(run("diagnose", "-m", str(manifest), *options).out)
    by_name = {each["name"]: each for each in found["findings"]}
    assert by_name["eager-attention"]["overrides"] == ["training.config.attention=auto"]
    assert found["exit_code"] == 0
    (tmp_path / "train.jsonl").unlink()
    ran = run("diagnose", "-m", str(manifest), "--no-timing")
    assert ran.code == 2
    assert "would not start" in ran.out.splitlines()[-1]
    alone = run("diagnose", "--no-timing")
    assert alone.code == 0


def test_a_profile_of_a_run_is_written_into_its_folder(run):
    folder = finished("lora")
    ran = run("diagnose", str(folder), "--profile", "1")
    assert ran.code == 0
    assert "aten::mm" in ran.out
    [trace] = (folder / "profile").iterdir()
    assert str(trace) in ran.out.splitlines()[-1]


def test_a_text_trains_for_the_same_steps_however_it_is_named(run, tmp_path, monkeypatch):
    """The document: 25 epochs, a checkpoint every 5, all of them kept."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "input.txt").write_text("to be or not to be\n" * 200, encoding="utf-8")
    shape = "{n_layer: 1, n_head: 1, n_embd: 16, block_size: 32}"
    config = f"dataset: input.txt\nmodel: {shape}\ntraining: {{batch_size: 16}}\n"
    (tmp_path / "config.yaml").write_text(config, encoding="utf-8")
    planned = []
    for words in (
        ["--dataset", "input.txt"],
        ["config.yaml", "--dataset", "input.txt"],
        ["config.yaml"],
    ):
        plan = json.loads(run("train", *words, "--dry-run", "--json").out)["plan"]
        watch = plan["watch"]
        assert (plan["length"]["epochs"], watch["save_every_epochs"]) == (25, 5)
        assert watch["keep_checkpoints"] is None
        planned.append(plan["length"]["total_steps"])
        ran = run("diagnose", *words, "--no-timing")
        assert f"{planned[0]:,} steps" in ran.out + ran.err, ran
    assert len({*planned}) == 1
    assert f"{planned[0]:,} steps" in run("diagnose", "--no-timing").out
    (tmp_path / "config.yaml").write_text("services: {web: {image: x}}\n", encoding="utf-8")
    assert run("diagnose", "--no-timing").code == 0  # of another program

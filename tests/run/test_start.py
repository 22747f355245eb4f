"""Threads of real runs on a CPU, with and without a neighbour."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from itertools import count

import pytest
import torch

from expert.run.session.start import find_free_threads
from expert.telemetry.cpu import CpuSampler, OtherProcesses, available_cores
from tests.jobs.runs import base_model, events_of, run, write_expert


@pytest.fixture
def free_to_choose(monkeypatch):
    """No word of the user's, and two threads as torch would have them on two cores."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@contextmanager
def neighbours(count: int):
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_with_every_core_taken_one_thread_is_left_and_kept_when_the_run_resumes(
    tmp_path, free_to_choose
):
    manifest = write_expert(tmp_path, base_model(), {"max_steps": 2, "save_steps": 1})
    progress: list[int] = []
    with neighbours(len(available_cores())):
        found = find_free_threads(2)
        folder = run(manifest, progress=progress.append).folder
    assert (found.count, found.lowered) == (1, True)
    [told] = events_of(folder, "threads")
    assert (told["threads"], told["lowered"]) == (1, True)
    assert all(0 <= step["cpu_others"] <= 1 for step in events_of(folder, "step"))
    assert torch.get_num_threads() == 2
    assert progress == [1, 2]
    run(manifest, resume=str(folder / "checkpoints" / "step-000001"))
    told = events_of(folder, "threads")[-1]
    assert (told["threads"], told["because"]) == (1, "as the run began")
    assert (told["kept"], told["own"]) == (True, 2)


def test_a_run_resumed_on_another_machine_chooses_again(tmp_path, free_to_choose):
    manifest = write_expert(tmp_path, base_model(), {"max_steps": 2, "save_steps": 1})
    folder = run(manifest).folder
    with (folder / "events.jsonl").open("a", encoding="utf-8") as events:
        events.write(json.dumps({"event": "threads", "threads": 64, "cores": 640}) + "\n")
    run(manifest, resume=str(folder / "checkpoints" / "step-000001"))
    told = events_of(folder, "threads")[-1]
    assert told["threads"] <= len(available_cores())
    assert told["kept"] is False


def test_a_run_names_who_takes_its_cores_and_its_diagnosis_too(tmp_path, monkeypatch):
    """By a clock and processes made up: 80 % of the cores in others' hands for the whole run."""
    from expert.jobs.diagnose.diagnose import diagnose_run

    seconds_gone = count(1.0)
    now = 0.0

    def clock():
        nonlocal now
        now = next(seconds_gone)
        return now

    cores = len(available_cores())
    sampler = CpuSampler(clock=clock, busy=lambda: 0.8 * cores * now, own=lambda: 0.0)
    monkeypatch.setattr("expert.telemetry.cpu.CpuSampler", lambda: sampler)
    seconds = iter([0.0, 1.2 * cores])
    neighbour = OtherProcesses(clock=clock, look=lambda: {7: ("rustc", next(seconds))})
    monkeypatch.setattr("expert.telemetry.cpu.OtherProcesses", lambda: neighbour)
    config = {"max_steps": 4, "dataloader_num_workers": 0}
    folder = run(write_expert(tmp_path, base_model(), config)).folder
    [told] = events_of(folder, "neighbours")
    assert [one["name"] for one in told["processes"]] == ["rustc"]
    found = diagnose_run(folder)
    assert "good" not in found.verdict.sentence
    [busy] = [finding for finding in found.findings if finding.name == "busy-cores"]
    assert "(80 %), most of all rustc (pid 7, " in busy.evidence

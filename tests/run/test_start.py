"""Threads of real runs on a CPU, with and without a neighbour."""

from __future__ import annotations

from itertools import count

from expert.run.session.start import choose_threads
from expert.telemetry.cpu import CpuSampler, available_cores
from tests.each import each
from tests.jobs.runs import base_model, run, write_expert


def test_the_diagnosis_of_a_run_says_that_others_take_its_cores(tmp_path, monkeypatch):
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
    config = {"max_steps": 4, "dataloader_num_workers": 0}
    folder = run(write_expert(tmp_path, base_model(), config)).folder
    found = diagnose_run(folder)
    assert "good" not in found.verdict.sentence
    [busy] = [finding for finding in found.findings if finding.name == "busy-cores"]
    assert "(80 %)" in busy.evidence


@each(
    ("granted", "recorded", "threads", "because"),
    [
        (2, {}, 2, "torch's own number"),
        (1, {}, 1, "this process may use 1 cores"),
        (2, {"threads": 1}, 1, "as the run began"),
        (2, {"threads": 64}, 2, "torch's own number"),
    ],
)
def test_threads_depend_on_the_machine_and_the_run_and_not_on_how_busy_it_is(
    granted, recorded, threads, because, monkeypatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    assert choose_threads(2, granted=granted, recorded=recorded) == (threads, because)
    monkeypatch.setenv("MKL_NUM_THREADS", "2")
    assert choose_threads(2, granted=granted, recorded=recorded)[0] == 2

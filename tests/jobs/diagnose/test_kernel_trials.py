"""Trials of kernels: right ones, wrong ones, and ones that end their process."""

from __future__ import annotations

import math
import sys
import textwrap

import pytest
import torch

from expert.jobs.diagnose import kernels
from expert.jobs.diagnose.kernels import TRIALS, difference, try_kernels
from tests.each import each
from tests.warm import python

CPU = torch.device("cpu")


@each("name", [each for each in TRIALS if each not in ("torch.compile",)])
def test_every_trial_works_on_a_cpu_or_says_why_it_is_absent(name, monkeypatch):
    monkeypatch.setattr(kernels, "TIMED", 1)
    found = kernels.run_trial(name, CPU)
    assert found.state in ("works", "absent"), found.because
    assert found.state == "works" or found.because


def failing(device):
    raise RuntimeError("no kernel image is available\nmore lines")


@each(
    ("trial", "state", "because"),
    [
        (lambda device: (0.5, 0.01), "wrong", "off by 0.5 where 0.01 is allowed"),
        (lambda device: (float("nan"), 0.01), "wrong", "off by nan where 0.01 is allowed"),
        (failing, "failed", "RuntimeError: no kernel image is available"),
    ],
)
def test_a_wrong_or_failing_kernel_is_reported(monkeypatch, trial, state, because):
    monkeypatch.setitem(TRIALS, "bf16 matmul", trial)
    found = kernels.run_trial("bf16 matmul", CPU)
    assert (found.state, found.because) == (state, because)


def test_differences_are_relative_and_nan_if_anything_is_nan():
    one = torch.tensor([3.0, 4.0])
    assert difference([one * 1.1], [one]) == pytest.approx(0.1, rel=1e-5)
    assert math.isnan(difference([one * math.nan, one], [one, one]))
    assert math.isnan(difference([one, one * math.nan], [one, one]))


STAND_IN = """
    import json, os, signal, sys, time
    def say(**line):
        print(json.dumps(line), flush=True)
    say(facts={"version": "9"})
    for name in sys.argv[2:]:
        say(begin=name)
        if name == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if name == "exit":
            sys.stderr.write("illegal memory access\\n")
            sys.exit(7)
        if name == "hang":
            time.sleep(60)
        say(result={"name": name, "state": "works"})
"""


@pytest.fixture
def stand_in(tmp_path):
    """A process that behaves as its trials are called."""
    file = tmp_path / "trials.py"
    file.write_text(textwrap.dedent(STAND_IN), encoding="utf-8")
    return [sys.executable, str(file)]


def test_after_a_kernel_that_ends_its_process_the_others_still_run(stand_in):
    found = try_kernels("cpu", ["a", "crash", "b", "exit", "c"], command=stand_in)
    assert [(each.name, each.state) for each in found.tried] == [
        ("a", "works"),
        ("crash", "crashed"),
        ("b", "works"),
        ("exit", "crashed"),
        ("c", "works"),
    ]
    assert found.tried[1].because == "the process was killed by SIGSEGV"
    assert found.tried[3].because == "the process ended with code 7: illegal memory access"
    assert found.torch == {"version": "9"}


def test_after_a_kernel_that_hangs_the_others_still_run(stand_in):
    found = try_kernels("cpu", ["hang", "b"], command=stand_in, seconds=1.0)
    assert [each.state for each in found.tried] == ["too slow", "works"]
    assert found.tried[0].because == "not done after 1 s"


def test_trials_that_do_not_start_say_why():
    command = [sys.executable, "-c", "raise SystemExit('no torch here')"]
    found = try_kernels("cpu", ["a"], command=command)
    assert [each.state for each in found.tried] == ["not tried"]
    assert "no torch here" in found.note


def test_the_real_process_tries_a_real_kernel():
    command = [python(), "-m", "expert.jobs.diagnose.kernels"]
    found = try_kernels("cpu", ["bf16 matmul", "TF32 matmul"], command=command)
    assert [each.state for each in found.tried] == ["works", "absent"]
    assert found.torch["version"] == torch.__version__


@pytest.mark.gpu
def test_every_trial_works_on_the_card_or_says_why_it_is_absent():
    found = try_kernels("cuda")
    bad = {each.name: f"{each.state}: {each.because}" for each in found.tried if each.bad}
    assert bad == {}
    assert len(found.tried) == len(TRIALS)

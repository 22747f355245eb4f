"""The best metric so far, early stopping, and signals."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from expert.training import stopping
from expert.training.stopping import BestSoFar, Signals
from tests.each import each


def follow(best: BestSoFar, values) -> list[tuple[bool, bool]]:
    return [best.observe(step, value) for step, value in enumerate(values)]


@each(
    ("options", "values", "improved", "stops_at"),
    [
        ({}, [2.0, 1.0, 1.0, 1.5, 0.9], "++--+", []),  # equal is not better
        ({"greater_is_better": True}, [0.1, 0.3, 0.2], "++-", []),
        ({"patience": 2}, [1.0, 1.1, 0.9, 1.0, 0.95], "+-+--", [4]),
        ({"patience": 2}, [1.0, 1.0, 1.0], "+--", [2]),
        ({}, [1.0] * 100, "+" + 99 * "-", []),
        # Gains below the threshold are the best, but wear patience out.
        ({"threshold": 0.1, "patience": 2}, [1.0, 0.99, 0.98], "+++", [2]),
        # Small ones count together.
        ({"threshold": 0.125, "patience": 3}, [1 - n / 16 for n in range(12)], "+" * 12, []),
    ],
)
def test_any_gain_is_the_best_and_patience_ends_without_gains_of_the_threshold(
    options, values, improved, stops_at
):
    best = BestSoFar("eval_loss", **{"greater_is_better": False, **options})
    seen = follow(best, values)
    assert "".join("+" if better else "-" for better, _ in seen) == improved
    assert [step for step, (_, stop) in enumerate(seen) if stop] == stops_at
    assert best.best_step == improved.rindex("+")
    assert best.best == values[best.best_step]


@each("cut", range(7))
def test_what_is_read_back_from_a_checkpoint_continues_counting(cut):
    values = [1.0, 0.99, 0.7, math.nan, 0.69, 0.68, 0.67]

    def made(state=None) -> BestSoFar:
        follow: Any = {"greater_is_better": False, "threshold": 0.1, "patience": 4}
        return BestSoFar("eval_loss", **follow, state=state)

    whole, first = made(), made()
    expected = follow(whole, values)
    seen = follow(first, values[:cut])
    second = made(json.loads(json.dumps(first.state())))
    seen += [second.observe(step, value) for step, value in enumerate(values) if step >= cut]
    assert seen == expected
    assert seen[-1][1]
    assert second.state() == whole.state()


# --- signals -------------------------------------------------------------------------------------


@each(
    ("first", "second"),
    [
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGINT, signal.SIGTERM),
        (signal.SIGTERM, signal.SIGTERM),
    ],
)
def test_the_first_signal_sets_the_exit_code_and_the_second_ends_the_process_at_once(
    first, second, monkeypatch
):
    ends: list[object] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    monkeypatch.setattr(stopping, "show_cursor", lambda: ends.append("restored"))
    with Signals(acknowledge=lambda again: ends.append("again" if again else "first")) as signals:
        os.kill(os.getpid(), first)
        assert (signals.requested, ends) == (128 + first, ["first"])
        os.kill(os.getpid(), second)
    assert ends == ["first", "restored", "again", 128 + second]


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert signals.requested is None
    finally:
        signal.signal(signal.SIGINT, before)


# A process that was forked while the run listens, as those that make batches are.
FORKS = """
import os, signal, sys, time
from expert.training.stopping import Signals

with Signals(acknowledge=lambda again: os.write(1, b"stopping\\n")):
    worker = os.fork()
    if worker == 0:
        os.write(1, b"ready\\n")
        time.sleep(15)
    sys.stdin.readline()
    for number in map(int, sys.argv[1:]):
        os.kill(worker, number)
        time.sleep(0.2)
    print(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
"""


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGINT] * 2 + [signal.SIGTERM]])
def test_a_worker_ignores_ctrl_c_and_ends_on_sigterm(numbers):
    command = [sys.executable, "-c", FORKS, *(str(int(number)) for number in numbers)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        told, _ = process.communicate("go\n", timeout=30)
    assert told == f"{-signal.SIGTERM}\n"


def test_a_signal_whose_exception_python_swallowed_ends_the_run_before_its_first_step():
    script = """
import contextlib, os, signal
from expert.core.interrupts import Interrupted, raise_on_signals
from expert.training.stopping import Signals
raise_on_signals()
with contextlib.suppress(Interrupted):  # as Python does around a fork
    os.kill(os.getpid(), signal.SIGHUP)
with Signals():
    print("trained")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (129, "")

"""The best metric so far, early stopping, and signals."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading

import pytest

from expert.core.errors import EXIT_HANGUP, EXIT_SIGUSR1
from expert.core.interrupts import show_cursor
from expert.training import stopping
from expert.training.stopping import BestSoFar, Observation, Signals
from tests.each import each

BETTER = Observation(improved=True, stop=False)
NOT_BETTER = Observation(improved=False, stop=False)
ENOUGH = Observation(improved=False, stop=True)


def follow(best: BestSoFar, values) -> list[Observation]:
    return [best.observe(step, value) for step, value in enumerate(values)]


@each(
    ("options", "values", "improved", "stops_at"),
    [
        ({}, [2.0, 1.0, 1.0, 1.5, 0.9], "++--+", None),  # equal is not better
        ({"greater_is_better": True}, [0.1, 0.3, 0.2], "++-", None),
        ({"patience": 2}, [1.0, 1.1, 0.9, 1.0, 0.95], "+-+--", 4),
        ({"patience": 2}, [1.0, 1.0, 1.0], "+--", 2),
        ({}, [1.0] * 100, "+" + 99 * "-", None),
        # Gains below the threshold are the best, but wear patience out.
        ({"threshold": 0.1, "patience": 2}, [1.0, 0.99, 0.98], "+++", 2),
        # Small ones count together.
        ({"threshold": 0.125, "patience": 3}, [1 - n / 16 for n in range(12)], "+" * 12, None),
    ],
)
def test_any_gain_is_the_best_and_patience_ends_without_gains_of_the_threshold(
    options, values, improved, stops_at
):
    best = BestSoFar("eval_loss", **{"greater_is_better": False, **options})
    seen = follow(best, values)
    assert "".join("+" if verdict.improved else "-" for verdict in seen) == improved
    assert [step for step, verdict in enumerate(seen) if verdict.stop] == (
        [] if stops_at is None else [stops_at]
    )
    assert best.best_step == improved.rindex("+")
    assert best.best == values[best.best_step]


@each("greater", [True, False])
@each("wrong", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_never_the_best(greater, wrong):
    best = BestSoFar("eval_loss", greater_is_better=greater, patience=2)
    assert follow(best, [wrong, 1.0, wrong, wrong]) == [NOT_BETTER, BETTER, NOT_BETTER, ENOUGH]
    assert (best.best, best.best_step) == (1.0, 1)


@each("cut", range(7))
def test_what_is_read_back_from_a_checkpoint_continues_counting(cut):
    values = [1.0, 0.99, 0.7, math.nan, 0.69, 0.68, 0.67]

    def made(state=None) -> BestSoFar:
        return BestSoFar(
            "eval_loss", greater_is_better=False, threshold=0.1, patience=4, state=state
        )

    whole, first = made(), made()
    expected = follow(whole, values)
    seen = follow(first, values[:cut])
    second = made(json.loads(json.dumps(first.state())))
    seen += [second.observe(step, value) for step, value in enumerate(values) if step >= cut]
    assert seen == expected
    assert seen[-1].stop
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


def test_the_handlers_of_before_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Signals() as signals:
        during = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        assert signals.requested is None
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert during != before


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert signals.requested is None
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_nothing_is_set():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def enter() -> None:
        with Signals() as signals:
            seen.append((signal.getsignal(signal.SIGTERM), signals.requested))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(before, None)]


def test_the_cursor_is_shown_on_terminals_and_nothing_is_written_elsewhere(monkeypatch):
    written = []
    monkeypatch.setattr(os, "isatty", lambda stream: stream == 2)
    monkeypatch.setattr(os, "write", lambda stream, text: written.append((stream, text)))
    show_cursor()
    assert written == [(2, b"\x1b[?25h")]


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="without forks nothing is inherited")
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


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
class TestOtherSignals:
    def send(self, *numbers: int) -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    def test_a_closed_terminal_is_a_request_and_never_the_second_one(self):
        before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
        try:
            with Signals() as signals:
                self.send(signal.SIGHUP, signal.SIGHUP)
                assert signals.requested == EXIT_HANGUP
        finally:
            signal.signal(signal.SIGHUP, before)

    def test_sigusr1_asks_for_a_checkpoint_once(self):
        with Signals() as signals:
            self.send(signal.SIGUSR1)
            assert signals.requested is None
            assert [signals.take_save_request(), signals.take_save_request()] == [True, False]

    def test_sigusr1_asks_for_an_end_where_the_plan_says_so(self):
        with Signals(on_sigusr1="stop") as signals:
            self.send(signal.SIGUSR1, signal.SIGUSR1)
            assert signals.requested == EXIT_SIGUSR1
            assert not signals.take_save_request()

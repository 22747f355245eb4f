"""Worker processes that die, hang or cannot be started."""

from __future__ import annotations

import errno
import math
import multiprocessing
import os
import signal
import subprocess
from itertools import count
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from expert.data.processes import CannotStartWorkers, WorkersFailed, in_workers
from tests.each import each
from tests.warm import python

COUNT = 24


def all_of(disturb: Any, restart: Any, patience: float = math.inf) -> list[int]:
    """All results; `disturb` is given the workers after every third."""
    found = []
    for made in in_workers(
        lambda: lambda number: number * 2,
        lambda made: range(made, COUNT),
        2,
        patience=patience,
        restart=restart,
    ):
        found.append(made)
        if len(found) % 3 == 0:
            disturb(multiprocessing.active_children())
    return found


def once() -> Any:
    asked = count()
    return lambda error: next(asked) == 0


def send(number: int, times: int = 1) -> Any:
    left = [number] * times

    def to_all(workers: list[BaseProcess]) -> None:
        if left:
            left.pop()
            for worker in workers:
                os.kill(worker.pid or 0, number)

    return to_all


@pytest.mark.fault(18)
@each("number", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_that_die_or_hang_are_started_once_more_and_nothing_is_lost_or_repeated(number):
    expected = [2 * each for each in range(COUNT)]
    assert all_of(send(number), once(), patience=1.0) == expected
    words = "SIGKILL" if number == signal.SIGKILL else "hang: nothing came for 1"
    with pytest.raises(WorkersFailed, match=words):
        all_of(send(number), lambda error: False, patience=1.0)
    assert multiprocessing.active_children() == []  # a stopped one ends by SIGKILL alone


def test_where_no_process_can_be_started_the_reason_is_given(monkeypatch):
    def refuse(self: BaseProcess) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(BaseProcess, "start", refuse)
    with pytest.raises(CannotStartWorkers, match="No space left on device"):
        all_of(lambda workers: None, once())


SIGNALLED = """
import concurrent.futures.process as pools, os, signal
from expert.core.interrupts import raise_on_signals
from expert.data.processes import in_workers

def hang_up():
    os.kill(os.getpid(), signal.SIGHUP)

raise_on_signals()
made, started = pools._ThreadWakeup, pools._ExecutorManagerThread.start
{moment}
print(*in_workers(lambda: lambda item: item, lambda made: range(2), 1))
"""


@each(
    "moment",
    [
        "pools._ThreadWakeup = lambda: hang_up() or made()",
        "pools._ExecutorManagerThread.start = lambda self: hang_up() or started(self)",
        "os.register_at_fork(before=hang_up)",
    ],
)
def test_a_signal_while_workers_start_ends_the_command_as_anywhere_else(moment):
    script = SIGNALLED.format(moment=moment)
    done = subprocess.run([python(), "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (129, "", "")

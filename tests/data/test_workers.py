"""Worker processes that die, hang or cannot be started."""

from __future__ import annotations

import errno
import math
import multiprocessing
import os
import pickle
import re
import signal
import sys
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch

from expert.data.feed.workers import (
    QUIET_POLLS,
    CannotStartWorkers,
    WaitLimits,
    WorkersFailed,
    _wait_until_written,
    data_loader,
    load_items,
)
from tests.data.shards import loader_plan
from tests.data.test_loader import a_feed, contents, prepared  # noqa: F401 - a fixture

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals of Linux")
COUNT = 24


class Numbers(torch.utils.data.Dataset[int]):
    def __getitem__(self, number: int) -> int:
        return number


def a_loader(first: int) -> Any:
    return data_loader(
        Numbers(), loader_plan(workers=2), batch_size=None, sampler=range(first, COUNT)
    )


def all_of(disturb: Any, restart: Any, idle: float = math.inf) -> list[int]:
    """All items; `disturb` is given the workers after every third."""
    found = []
    for item in load_items(a_loader, lambda: WaitLimits(idle), restart):
        found.append(item)
        if len(found) % 3 == 0:
            disturb(multiprocessing.active_children())
    return found


def once() -> Any:
    asked: list[WorkersFailed] = []

    def restart(error: WorkersFailed) -> bool:
        asked.append(error)
        return len(asked) == 1

    restart.asked = asked  # type: ignore[attr-defined]
    return restart


def send(number: int, times: int = 1) -> Any:
    left = [number] * times

    def to_all(workers: list[BaseProcess]) -> None:
        if left:
            left.pop()
            for worker in workers:
                os.kill(worker.pid or 0, number)

    return to_all


@pytest.mark.fault(18)
def test_workers_that_are_killed_are_started_once_more_and_nothing_is_lost_or_repeated():
    restart = once()
    assert all_of(send(signal.SIGKILL), restart) == list(range(COUNT))
    (error,) = restart.asked
    assert "a data worker died" in str(error)
    assert "SIGKILL" in str(error)
    with pytest.raises(WorkersFailed, match="SIGKILL"):  # those that die again are an error
        all_of(send(signal.SIGKILL, times=COUNT), once())


@pytest.mark.fault(18)
def test_workers_that_are_stopped_are_found_and_have_written_what_they_were_in():
    restart = once()
    assert all_of(send(signal.SIGSTOP), restart, idle=2.0) == list(range(COUNT))
    (error,) = restart.asked
    assert "the data workers hang" in str(error)
    written = re.split(r"^process \d+\n", error.stacks, flags=re.MULTILINE)[1:]
    assert len(written) == 2
    for stack in written:  # whole, and not one inside the other
        assert "in _worker_loop" in stack
    for worker in multiprocessing.active_children():
        worker.join(10)
    assert multiprocessing.active_children() == []  # a stopped one ends by SIGKILL alone


def test_a_stack_that_was_written_at_once_is_not_waited_for(tmp_path, monkeypatch):
    """A worker may have written its stack before anybody looks at the file."""
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    with (tmp_path / "stacks").open("w+b") as stream:
        before = stream.write(b"process 1\n")
        stream.write(b"its stack\n")
        stream.flush()
        _wait_until_written(stream, before)
    assert len(pauses) == 1 + QUIET_POLLS  # to see that there is more, then that it grows no more


def test_where_no_process_can_be_started_the_reason_is_given(monkeypatch):
    def refuse(self: BaseProcess) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(BaseProcess, "start", refuse)
    with pytest.raises(CannotStartWorkers, match="No space left on device"):
        all_of(lambda workers: None, once())


@pytest.mark.fault(18)
@pytest.mark.parametrize("persistent", [False, True])
def test_a_feed_whose_workers_die_in_an_epoch_gives_the_same_batches(prepared, persistent):  # noqa: F811
    alone = contents(a_feed(prepared))
    feed = a_feed(prepared, workers=2, persistent=persistent)
    feed.restart = once()
    killed = send(signal.SIGKILL)
    found = []
    with feed:
        for number, fed in enumerate(feed):
            found += [
                (batch.bins, batch.tokens.tolist(), batch.labels.tolist(), batch.counts)
                for batch in fed.batches
            ]
            if number == 4:
                killed(multiprocessing.active_children())
    assert found == alone


def test_a_batch_goes_between_processes_without_shared_memory(prepared):  # noqa: F811
    made = prepared.__getitems__([0, 1])
    sent = bytes(ForkingPickler.dumps(made))
    assert b"rebuild" not in sent
    again = pickle.loads(sent)
    assert again.counts == made.counts
    for one, other in zip(again[:-1], made[:-1], strict=True):
        np.testing.assert_array_equal(one, other)

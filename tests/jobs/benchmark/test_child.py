"""Steps that pass to the training loop only while a window is timed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expert.jobs.benchmark.child import Windows
from expert.jobs.benchmark.numbers import _steady
from expert.jobs.benchmark.processes import Window


def feed(begin: int = 0, end: int = 100) -> Any:
    for number in range(begin, end):
        counts = SimpleNamespace(real_tokens=10, examples=2)
        yield SimpleNamespace(step=SimpleNamespace(done=number), counts=counts)


class Parent:
    """Gives orders, and keeps how many steps had passed before each of them."""

    def __init__(self, *orders: dict[str, int] | None) -> None:
        self.orders, self.passed = list(orders), list[int]()
        self.said: list[dict[str, Any]] = []
        self.before: list[int] = []
        self.paused_for = 0

    def receive(self) -> dict[str, int] | None:
        self.before.append(len(self.passed))
        return self.orders.pop(0)

    def paused(self) -> Any:
        self.paused_for += 1
        return nullcontext()

    def windows(self, **more: Any) -> Windows:
        return Windows(
            self.receive,
            self.said.append,
            finished=lambda: {"loss": 1.0},
            device=torch.device("cpu"),
            meter=lambda: self,  # type: ignore[return-value,arg-type]
            **more,
        )

    @property
    def timed(self) -> list[Window]:
        return [each["window"] for each in self.said if "window" in each]


def test_a_window_is_timed_after_steps_that_are_not_and_nothing_passes_in_between():
    parent = Parent({"steps": 3, "skip": 1}, {"steps": 2, "skip": 0}, None)
    windows = parent.windows(fresh=2)
    for fed in windows(feed()):
        parent.passed.append(fed.step.done)
    assert parent.before == [0, 5, 7]  # two of a fresh feed and three, then two
    assert [(w.first, w.steps, w.tokens, w.examples) for w in parent.timed] == [
        (2, 3, 30, 6),
        (5, 2, 20, 4),
    ]
    assert windows.timed == parent.timed
    assert parent.paused_for == 3  # the clock of the run as well
    assert (windows.over, windows.ends_with_loss) == (True, False)


def test_what_was_measured_is_sent_and_the_process_stays():
    parent = Parent({}, {"steps": 1, "skip": 0}, {}, None)
    assert len(list(parent.windows()(feed()))) == 1
    assert [next(iter(each)) for each in parent.said] == ["measured", "window", "measured"]


def test_a_process_that_does_not_stay_ends_with_its_loss():
    parent = Parent({"steps": 1, "skip": 0}, {})
    windows = parent.windows(keeps_running=False)
    assert len(list(windows(feed()))) == 1
    assert (windows.over, windows.ends_with_loss) == (True, True)


def test_a_window_that_a_feed_did_not_finish_starts_again_with_the_next():
    """The loop may leave a feed for another plan of its own."""
    parent = Parent({"steps": 4, "skip": 0}, None)
    windows = parent.windows(fresh=1)
    first = windows(feed(0, 100))
    for _ in range(3):
        next(first)
    first.close()
    assert not windows.over
    assert [fed.step.done for fed in windows(feed(3, 100))] == [3, 4, 5, 6, 7]
    assert [(window.first, window.steps) for window in parent.timed] == [(4, 4)]
    assert len(parent.before) == 2  # the order was given once


@pytest.mark.parametrize(("seconds", "percent"), [(0.4, None), (1.5, 93.0)])
def test_the_card_is_looked_at_after_windows_that_last_long_enough(seconds, percent):
    """NVML looks back for up to a second: a shorter window would show what was before it."""
    parent, times = Parent({"steps": 1, "skip": 0}, None), iter([10.0, 10.0 + seconds])
    gpu: Any = SimpleNamespace(sample=lambda: SimpleNamespace(utilization_percent=93.0))
    list(parent.windows(gpu=gpu, clock=lambda: next(times))(feed()))
    assert [window.gpu_percent for window in parent.timed] == [percent]


def line(step: int, waited: float) -> dict[str, Any]:
    return {"event": "step", "step": step, "updates": 1, "seconds": 1.0, "time_data_wait": waited}


def test_log_lines_that_waited_for_orders_are_not_counted():
    trained = [line(1, 0.3), line(2, 0.3), line(3, 0.1), line(4, 0.1)]
    waited = [line(5, 0.9), line(6, 0.9)]
    one = Window(first=4, steps=1, tokens=1, examples=1, seconds=1.0, others=0.0)
    short = [one, replace(one, first=5)]
    assert _steady([*trained, *waited], short, 4) == trained[2:]
    assert _steady([*trained, *waited], [replace(one, steps=2)], 4) == waited[1:]
    assert _steady([line(1, 0.3), line(2, 0.9)], short, 1) == [line(1, 0.3)]

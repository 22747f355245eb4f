"""Updates that pass to the loop only while a window is timed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expert.jobs.benchmark.rung_numbers import _steady
from expert.jobs.benchmark.rung_windows import Gate, Order, Window


def feed(begin: int = 0, end: int = 100) -> Any:
    for number in range(begin, end):
        counts = SimpleNamespace(real_tokens=10, examples=2)
        yield SimpleNamespace(update=SimpleNamespace(done=number), counts=counts)


class Asker:
    """Gives orders, and keeps what passed before each of them."""

    def __init__(self, *orders: Order | None) -> None:
        self.orders, self.passed = list(orders), list[int]()
        self.answers: list[Window] = []
        self.before: list[int] = []
        self.stood_still = 0

    def next(self) -> Order | None:
        self.before.append(len(self.passed))
        return self.orders.pop(0)

    def paused(self) -> Any:
        self.stood_still += 1
        return nullcontext()

    def gate(self, fresh: int = 0, **more: Any) -> Gate:
        return Gate(
            self.next,
            self.answers.append,
            device=torch.device("cpu"),
            meter=lambda: self,  # type: ignore[return-value,arg-type]
            fresh=fresh,
            **more,
        )


def test_a_window_is_timed_after_those_that_are_not_and_nothing_passes_in_between():
    asker = Asker(Order(do="window", updates=3, skip=1), Order(do="window", updates=2), None)
    gate = asker.gate(fresh=2)
    asker.passed.extend([])
    for fed in gate(feed()):
        asker.passed.append(fed.update.done)
    assert asker.before == [0, 5, 7]  # two of a fresh feed and three, then two
    assert [(w.first, w.updates, w.tokens, w.examples) for w in asker.answers] == [
        (2, 3, 30, 6),
        (5, 2, 20, 4),
    ]
    assert gate.windows == asker.answers
    assert asker.stood_still == 3  # the clock of the run as well
    assert gate.left
    assert gate.last is None


def test_an_order_that_ends_it_is_kept():
    asker = Asker(Order(do="tell"))
    gate = asker.gate()
    assert list(gate(feed())) == []
    assert (gate.left, gate.last) == (True, Order(do="tell"))


def test_a_window_that_a_feed_did_not_finish_is_begun_anew_with_the_next():
    """The loop may leave a feed for another plan of its own."""
    asker = Asker(Order(do="window", updates=4), Order(do="leave"))
    gate = asker.gate(fresh=1)
    first = gate(feed(0, 100))
    for _ in range(3):
        next(first)
    first.close()
    assert not gate.left
    assert [fed.update.done for fed in gate(feed(3, 100))] == [3, 4, 5, 6, 7]
    assert [(window.first, window.updates) for window in asker.answers] == [(4, 4)]
    assert len(asker.before) == 2  # the order was given once


def test_a_window_knows_how_many_updates_the_run_had_before_it():
    """Where none goes before it, too: what was learnt is not part of a window."""
    asker = Asker(Order(do="window", updates=2), None)
    list(asker.gate()(feed(5, 100)))
    assert [window.first for window in asker.answers] == [5]


@pytest.mark.parametrize(("seconds", "use"), [(0.4, None), (1.5, 93.0)])
def test_the_use_of_the_card_is_asked_at_the_end_of_windows_that_last_long_enough(seconds, use):
    """NVML looks back for up to a second: what was before a shorter window would be told of it."""
    asker, times = Asker(Order(do="window", updates=1), None), iter([10.0, 10.0 + seconds])
    gate = asker.gate(use=lambda: 93.0, clock=lambda: next(times))
    list(gate(feed()))
    assert [window.use for window in asker.answers] == [use]


def line(step: int, waited: float) -> dict[str, Any]:
    return {"event": "step", "step": step, "updates": 1, "seconds": 1.0, "time_data_wait": waited}


def test_lines_that_waited_for_orders_tell_nothing_of_the_feed():
    learnt = [line(1, 0.3), line(2, 0.3), line(3, 0.1), line(4, 0.1)]
    stood = [line(5, 0.9), line(6, 0.9)]
    one = Window(first=4, updates=1, tokens=1, examples=1, seconds=1.0, others=0.0)
    short = [one, replace(one, first=5)]
    assert _steady([*learnt, *stood], short, 4) == learnt[2:]
    assert _steady([*learnt, *stood], [replace(one, updates=2)], 4) == stood[1:]
    assert _steady([line(1, 0.3), line(2, 0.9)], short, 1) == [line(1, 0.3)]

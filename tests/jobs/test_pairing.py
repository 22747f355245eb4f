"""How many windows are timed, of how many updates, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from expert.jobs.benchmark.minutes import ClimbTime
from expert.jobs.benchmark.pairing import lengths_of, rates_of, time_alone, time_in_turns
from expert.jobs.benchmark.rig import Begun
from expert.jobs.benchmark.rung_windows import Window
from expert.jobs.benchmark.rungs import QUICK


class Machine:
    """Two rungs on a clock that their windows move on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def clock(self) -> float:
        return self.now


class Played:
    def __init__(self, machine: Machine, name: str, seconds: float, *rates: float) -> None:
        self.machine, self.name = machine, name
        self.begun = Begun(seconds_per_update=seconds, updates_learnt=5)
        self.rates, self.asked = list(rates), list[tuple[int, int]]()

    def window(self, updates: int, skip: int, tell: Any) -> Window:
        self.machine.order.append(self.name)
        self.machine.now += (updates + skip) * self.begun.seconds_per_update
        self.asked.append((updates, skip))
        rate = self.rates[(len(self.asked) - 1) % len(self.rates)]
        return Window(first=0, updates=1, tokens=int(rate), examples=1, seconds=1.0, others=0.0)


def quiet(*_: Any) -> None:
    """Nobody is told."""


def turns(left: float, one: Played, other: Played, machine: Machine) -> list[tuple[Window, Window]]:
    time = ClimbTime(left, machine.clock)
    return time_in_turns(one, other, QUICK, time, quiet)  # type: ignore[arg-type]


def test_who_goes_first_changes_from_pair_to_pair():
    machine = Machine()
    one, other = Played(machine, "A", 0.1, 100), Played(machine, "B", 0.1, 150)
    pairs = turns(100.0, one, other, machine)
    assert "".join(machine.order) == "ABBAAB"
    assert rates_of(pairs) == [(100.0, 150.0)] * 3  # the first is always that of A


def test_a_clear_difference_ends_it_and_an_unclear_one_is_looked_at_longer():
    machine = Machine()
    one, other = Played(machine, "A", 0.1, 100), Played(machine, "B", 0.1, 90, 100, 112)
    assert len(turns(100.0, one, other, machine)) == QUICK.most_pairs


@pytest.mark.parametrize(("rate", "pairs"), [(150, 2), (70, 4), (100, 2)])
def test_what_looks_slower_may_take_its_time_twice(rate, pairs):
    """A pair takes two seconds, two more go before the first, and there are five."""
    machine = Machine()
    one, other = Played(machine, "A", 1.0, 100), Played(machine, "B", 1.0, rate)
    assert len(turns(5.0, one, other, machine)) == pairs


@pytest.mark.parametrize(("left", "pairs"), [(0.0, 2), (30.0, 2), (35.0, 3)])
def test_slow_updates_are_windows_of_one_and_two_of_them_at_least(left, pairs):
    """An update of 4 s has a window of its own: nothing else would end in time."""
    machine = Machine()
    one, other = Played(machine, "A", 4.0, 100), Played(machine, "B", 4.0, 200)
    assert len(turns(left, one, other, machine)) == pairs
    # One of them stood still while the other was loaded: both wake up before they are timed.
    assert one.asked == other.asked == [(1, 1)] + [(1, 0)] * (pairs - 1)


def test_fast_updates_fill_a_window_after_some_that_are_not_timed():
    found = lengths_of(Played(Machine(), "A", 0.01, 1), 1.0)
    assert (found.updates, found.skip) == (100, 2)


def test_alone_there_are_as_many_windows_as_there_is_time_for():
    for left, windows in ((0.0, 2), (100.0, QUICK.least_pairs)):
        seat = Played(Machine(), "A", 2.0, 100)
        assert len(time_alone(seat, QUICK, left, quiet)) == windows

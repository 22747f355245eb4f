"""Two settings timed against each other: in which order, for how long, and what fits together."""

from __future__ import annotations

from typing import Any

import pytest

from expert.jobs.benchmark.compare import Timed, Timing
from expert.jobs.benchmark.pace import QUICK, Clock
from expert.jobs.benchmark.processes import Job, MeasurementFailed, Ready, Window
from tests.each import each
from tests.jobs.benchmark.fake_processes import a_job


def timed(name: str, device: str = "cuda", peak: int = 10) -> Timed:
    return Timed(a_job(name, device=device, peak=peak))


class Machine:
    """Starts settings that are made up, on a clock that their windows move on. `new` is twice as
    fast as others, unless rates are given."""

    def __init__(
        self,
        *,
        left: float = 1e6,
        step_seconds: float = 1.0,
        rates: dict[str, list[float]] | None = None,
        fails_beside: bool = False,
        falls_back_beside: bool = False,
    ) -> None:
        self.now, self.step_seconds, self.rates = 0.0, step_seconds, rates or {}
        self.fails_beside, self.falls_back_beside = fails_beside, falls_back_beside
        self.started: list[tuple[str, bool, bool, bool]] = []
        self.order: list[str] = []
        self.asked: dict[str, list[tuple[int, int]]] = {}
        self.timing = Timing(
            start=lambda job: Process(self, job),  # type: ignore[arg-type,return-value]
            pace=QUICK,
            clock=Clock(left, lambda: self.now),
            progress=lambda *_: None,
        )

    def compare(self, old: Timed, new: Timed) -> Any:
        self.timing.compare(None, old)
        return self.timing.compare(old, new)

    def pairs(self, *, left: float) -> list[tuple[float, float]]:
        """Pairs of A and B, both ready."""
        one, other = timed("A"), timed("B")
        for seat, beside in ((one, other), (other, one)):
            seat.open(self.timing.start, beside=beside)
        self.timing.clock.total = left
        self.timing.clock.start_setting(1)
        return self.timing._pairs(one, other)


class Process:
    def __init__(self, machine: Machine, job: Job) -> None:
        machine.started.append((job.name, job.beside, job.keeps_running, job.speed_only))
        if job.beside and machine.fails_beside:
            raise MeasurementFailed("out of memory")
        self.machine, self.job, self.alive = machine, job, True
        self.ready = Ready(step_seconds=machine.step_seconds, steps=5)

    def window(self, steps: int, skip: int) -> Window:
        machine, name = self.machine, self.job.name
        machine.order.append(name)
        machine.now += (steps + skip) * machine.step_seconds
        asked = machine.asked.setdefault(name, [])
        rates = machine.rates.get(name, [200.0 if name == "new" else 100.0])
        rate = rates[len(asked) % len(rates)]
        asked.append((steps, skip))
        return Window(first=0, steps=1, tokens=int(rate), examples=1, seconds=1.0, others=0.0)

    def measured(self) -> dict[str, Any]:
        return {"fallbacks": ["b"] if self.job.beside and self.machine.falls_back_beside else []}

    def stop(self) -> None:
        self.alive = False


# --- what fits together --------------------------------------------------------------------------


@each(
    ("peaks", "started", "how", "alive"),
    [
        ((10, 10), [("old", False, True, False), ("new", True, True, False)], "in turns", (1, 1)),
        # Without room for the judged model the process ends with its loss.
        ((30, 40), [("old", False, True, False), ("new", True, False, False)], "in turns", (1, 0)),
        # One that has ended is started again to be timed against the next.
        (
            (60, 30),
            [
                ("old", False, False, False),
                ("old", False, True, True),
                ("new", True, False, False),
            ],
            "in turns",
            (1, 0),
        ),
        (
            (60, 50),
            [("old", False, False, False), ("new", False, True, False)],
            "one after the other",
            (0, 1),
        ),
    ],
)
def test_both_processes_stay_alive_if_they_fit_together(peaks, started, how, alive):
    machine, old, new = Machine(), timed("old", peak=peaks[0]), timed("new", peak=peaks[1])
    paired = machine.compare(old, new)
    assert machine.started == started
    assert (paired.how, paired.gain, paired.against) == (how, 2.0, "old")
    assert (old.alive, new.alive) == alive


def test_what_is_compared_again_is_timed_after_it_once_more():
    """The baseline first and last: how far it drifted between them widens the spread."""
    machine = Machine(rates={"old": [100.0, 100.0, 100.0, 50.0]})
    old, new = timed("old", peak=60), timed("new", peak=50)
    machine.compare(old, new)
    paired = machine.timing.compare(old, new, again=True)
    assert [name for name, _, _, _ in machine.started] == ["old", "new", "old"]
    assert {round(ratio) for ratio in paired.ratios} == {2, 4}


@pytest.mark.parametrize("mood", ["fails_beside", "falls_back_beside"])
def test_on_a_card_one_that_has_no_room_beside_another_is_measured_alone(mood):
    machine, old, new = Machine(**{mood: True}), timed("old"), timed("new")
    paired = machine.compare(old, new)
    assert [beside for _, beside, _, _ in machine.started] == [False, True, False]
    assert new.found["fallbacks"] == []
    assert paired.how == "one after the other"
    assert not old.alive


def test_on_a_cpu_a_setting_that_fails_fails_once():
    machine, old, new = Machine(fails_beside=True), timed("old", "cpu"), timed("new", "cpu")
    with pytest.raises(MeasurementFailed, match="out of memory"):
        machine.compare(old, new)
    assert len(machine.started) == 2
    assert old.alive


# --- how many windows, in which order ------------------------------------------------------------


def test_the_order_alternates_between_pairs():
    machine = Machine(step_seconds=0.1, rates={"A": [100], "B": [150]})
    assert machine.pairs(left=100.0) == [(100.0, 150.0)] * 3  # the first is always that of A
    assert "".join(machine.order) == "ABBAAB"


def test_a_clear_difference_ends_it_and_an_unclear_one_is_timed_longer():
    machine = Machine(step_seconds=0.1, rates={"A": [100], "B": [90, 100, 112]})
    assert len(machine.pairs(left=100.0)) == QUICK.most_pairs


@pytest.mark.parametrize(("rate", "pairs"), [(150, 2), (70, 4), (100, 2)])
def test_a_setting_that_looks_slower_is_timed_twice_as_long(rate, pairs):
    """A pair takes two seconds, two more go before the first, and there are five."""
    machine = Machine(rates={"A": [100], "B": [rate]})
    assert len(machine.pairs(left=5.0)) == pairs


@pytest.mark.parametrize(("left", "pairs"), [(0.0, 2), (30.0, 2), (35.0, 3)])
def test_slow_steps_are_windows_of_one_and_two_of_them_at_least(left, pairs):
    """A step of 4 s has a window of its own: nothing else would end in time."""
    machine = Machine(step_seconds=4.0, rates={"A": [100], "B": [200]})
    assert len(machine.pairs(left=left)) == pairs
    # One of them waited while the other was loaded: both take a step before they are timed.
    assert machine.asked["A"] == machine.asked["B"] == [(1, 1)] + [(1, 0)] * (pairs - 1)


@pytest.mark.parametrize(("left", "windows"), [(0.0, 2), (100.0, QUICK.least_pairs)])
def test_alone_there_are_as_many_windows_as_there_is_time_for(left, windows):
    machine, one = Machine(left=left, step_seconds=2.0), timed("A")
    machine.timing.compare(None, one)
    assert len(one.rates) == windows

"""Two rungs on one device: beside each other where they fit, alone where they turn out not to."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from expert.jobs.benchmark.holding import Timed, hold_against
from expert.jobs.benchmark.minutes import ClimbTime
from expert.jobs.benchmark.rig import Begun, RungLost, Seen
from expert.jobs.benchmark.rung_windows import Window
from expert.jobs.benchmark.rungs import QUICK, Work
from tests.insight.ladders import measured
from tests.wording import wording


def plan_on(device: str, peak: int) -> Any:
    memory = SimpleNamespace(peak_bytes=peak, budget_bytes=100)
    return SimpleNamespace(memory=memory, kernels=SimpleNamespace(device=device))


def timed(name: str, device: str = "cuda", peak: int = 10) -> Timed:
    work = Work(
        name=name,
        plan={},
        manifest={},
        folder="",
        runs="",
        pace={},
        learnt=None,
        judged_in="fp32",
    )
    return Timed(name=name, work=work, plan=plan_on(device, peak))


@dataclass
class Seat:
    """A rung in it is twice as fast when it is called `new`, and has moods beside another."""

    rig: Rig
    work: Work | None = None

    @property
    def taken(self) -> bool:
        return self.work is not None

    @property
    def begun(self) -> Begun:
        return Begun(seconds_per_update=1.0, updates_learnt=5)

    def begin(self, work: Work, tell: Any) -> Begun:
        self.rig.begun.append((work.name, work.beside, work.stays, work.only_rate))
        if work.beside and self.rig.fails_beside:
            raise RungLost("out of memory")
        self.work = work
        return self.begun

    def window(self, updates: int, skip: int, tell: Any) -> Window:
        assert self.work is not None
        tokens = 200 if self.work.name == "new" else 100
        return Window(first=0, updates=1, tokens=tokens, examples=1, seconds=1.0, others=0.0)

    def seen(self, tell: Any, *, stays: bool) -> Seen:
        assert self.work is not None
        fallbacks = ["fewer at once"] if self.work.beside and self.rig.falls_back_beside else []
        self.work = self.work if stays else None
        return Seen(measured=measured(200.0, fallbacks=fallbacks))

    def leave(self) -> None:
        self.work = None


class Rig:
    def __init__(self, *, fails_beside: bool = False, falls_back_beside: bool = False) -> None:
        self.fails_beside, self.falls_back_beside = fails_beside, falls_back_beside
        self.begun: list[tuple[str, bool, bool, bool]] = []
        self.seats = (Seat(self), Seat(self))

    def free_seat(self) -> Seat:
        return next(seat for seat in self.seats if not seat.taken)


def held(rig: Rig, old: Timed, new: Timed) -> Any:
    hold: Any = hold_against
    quiet = lambda *_: None  # noqa: E731
    hold(None, old, rig, pace=QUICK, time=ClimbTime(1e6), tell=quiet)
    return hold(old, new, rig, pace=QUICK, time=ClimbTime(1e6), tell=quiet)


def test_both_live_and_stand_ready_where_they_fit():
    rig, old, new = Rig(), timed("old"), timed("new")
    _, paired = held(rig, old, new)
    assert rig.begun == [("old", False, True, False), ("new", True, True, False)]
    assert (paired.how, paired.gain, paired.against) == ("in turns", 2.0, "old")
    assert old.alive
    assert new.alive


def test_a_model_that_is_judged_needs_room_too_or_the_rung_goes_before_it():
    rig, old, new = Rig(), timed("old", peak=30), timed("new", peak=40)
    _, paired = held(rig, old, new)
    assert rig.begun[1] == ("new", True, False, False)
    assert paired.how == "in turns"
    assert old.alive
    assert not new.alive


def test_one_that_has_gone_is_loaded_again_to_be_timed_beside_the_next():
    rig, old, new = Rig(), timed("old", peak=60), timed("new", peak=30)
    _, paired = held(rig, old, new)
    assert rig.begun == [
        ("old", False, False, False),
        ("old", False, True, True),
        ("new", True, False, False),
    ]
    assert paired.how == "in turns"


def test_what_does_not_fit_is_timed_one_after_the_other():
    rig, old, new = Rig(), timed("old", peak=60), timed("new", peak=50)
    _, paired = held(rig, old, new)
    assert rig.begun == [("old", False, False, False), ("new", False, True, False)]
    assert (paired.how, paired.gain) == (wording("one-after-the-other"), 2.0)


@pytest.mark.parametrize("mood", ["fails_beside", "falls_back_beside"])
def test_on_a_card_one_that_has_no_room_beside_another_is_measured_alone(mood):
    rig, old, new = Rig(**{mood: True}), timed("old"), timed("new")
    seen, paired = held(rig, old, new)
    assert [beside for _, beside, _, _ in rig.begun] == [False, True, False]
    assert seen.measured.fallbacks == []
    assert paired.how == wording("one-after-the-other")
    assert not old.alive


def test_on_a_cpu_a_rung_that_fails_fails_once():
    rig, old, new = Rig(fails_beside=True), timed("old", "cpu"), timed("new", "cpu")
    with pytest.raises(RungLost, match=wording("out-of-memory")):
        held(rig, old, new)
    assert len(rig.begun) == 2
    assert old.alive

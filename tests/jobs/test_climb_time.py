"""The time of a climb, by a clock that is turned by hand."""

from __future__ import annotations

from expert.jobs.benchmark.minutes import ClimbTime
from expert.jobs.benchmark.pairing import time_for_windows
from expert.jobs.benchmark.rungs import QUICK


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_is_left_is_shared_among_the_rungs_that_are_to_come():
    clock = Clock()
    time = ClimbTime(120.0, clock)
    assert time.left(12) == 120.0  # what was announced
    assert time.begin_rung(12) == 10.0
    clock.now = 4.0
    assert time.rung_left == 6.0
    clock.now = 32.0
    assert time.rung_left == -22.0
    assert time.end_rung() == 32.0
    assert time.begin_rung(11) == 8.0  # the others pay for it


def test_the_time_left_follows_the_rungs_before_within_the_longest_time():
    clock = Clock()
    time = ClimbTime(120.0, clock)
    time.begin_rung(4)
    clock.now = 20.0
    time.end_rung()
    assert time.left(3) == 60.0
    assert time.left(30) == 160.0  # no rung is begun after 180 s


def test_no_rung_is_begun_that_would_end_after_one_and_a_half_times_the_announced_time():
    clock = Clock()
    time = ClimbTime(120.0, clock)
    clock.now = 1000.0
    assert not time.is_up  # however long the first takes, it is measured
    clock.now = 0.0
    for ends, up in ((50.0, False), (100.0, False), (140.0, True)):
        time.begin_rung(5)
        clock.now = ends
        time.end_rung()
        assert time.is_up is up


def test_a_rung_is_begun_only_where_time_stays_for_all_that_is_left_together():
    clock = Clock()
    time = ClimbTime(120.0, clock)
    time.begin_rung(12)
    clock.now = 30.0
    time.end_rung()
    assert not time.is_up_for(10)  # 30 + this one, two for the rest, one for the end: 150 of 180
    time.begin_rung(11)
    clock.now = 70.0
    time.end_rung()
    assert time.is_up_for(10)
    assert not time.is_up_for(0)  # only the end comes after it


def test_getting_ready_pays_for_being_timed():
    clock = Clock()
    time = ClimbTime(20.0, clock)
    time.begin_rung(2)
    clock.now = 1.0
    assert time_for_windows(time, QUICK) == 9.0
    clock.now = 30.0
    assert (time.rung_left, time_for_windows(time, QUICK)) == (-20.0, 15.0)
    time.begin_rung(1)
    assert (time.rung_left, time_for_windows(time, QUICK)) == (0.0, 4.0)  # two pairs of windows

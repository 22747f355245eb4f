"""The time of a benchmark, by a clock that is turned by hand."""

from __future__ import annotations

from expert.jobs.benchmark.pace import QUICK, Clock, window_steps


class Now:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def test_what_is_left_is_shared_among_the_settings_to_come_within_the_longest_time():
    now = Now()
    clock = Clock(120.0, now)
    assert clock.left(12) == 120.0  # what was announced
    assert clock.start_setting(12) == 10.0
    now.time = 32.0
    assert clock.end_setting() == 32.0
    assert clock.start_setting(11) == 8.0  # the others pay for it
    assert clock.left(3) == 96.0
    assert clock.left(30) == 148.0  # no setting starts after 180 s


def test_no_setting_starts_that_would_end_after_one_and_a_half_times_the_announced_time():
    now = Now()
    clock = Clock(120.0, now)
    now.time = 1000.0
    assert not clock.is_used_up()  # however long the first takes, it is measured
    now.time = 0.0
    for ends, up in ((50.0, False), (100.0, False), (140.0, True)):
        clock.start_setting(5)
        now.time = ends
        clock.end_setting()
        assert clock.is_used_up() is up


def test_a_setting_starts_only_where_time_stays_for_all_that_is_left_together():
    now = Now()
    clock = Clock(120.0, now)
    clock.start_setting(12)
    now.time = 30.0
    clock.end_setting()
    assert not clock.is_used_up(10)  # 30 + this one, two for the rest, one for the end: 150 of 180
    clock.start_setting(11)
    now.time = 70.0
    clock.end_setting()
    assert clock.is_used_up(10)
    assert not clock.is_used_up(0)


def test_timing_takes_a_share_of_the_time_of_getting_ready():
    now = Now()
    clock = Clock(20.0, now)
    clock.start_setting(2)
    now.time = 1.0
    assert clock.timing_seconds(QUICK) == 9.0
    now.time = 30.0
    assert clock.timing_seconds(QUICK) == 15.0
    clock.start_setting(1)
    assert clock.timing_seconds(QUICK) == 4.0  # two pairs of windows
    assert window_steps(0.01, 1.0) == (100, 2)  # after some that are not timed
    assert window_steps(4.0, 1.0) == (1, 0)

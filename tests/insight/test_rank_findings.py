"""What holds several GPUs up, found in the events of a run."""

from __future__ import annotations

from tests.insight.records import finished_events, found_in, record, step_events

RANKS = {"slowest_rank": 2, "slowest_rank_seconds": 0.5, "median_rank_seconds": 0.4}


def test_a_rank_that_is_always_the_slowest_is_named():
    found = found_in(record(finished_events(step_events(**RANKS))))
    assert "rank 2" in found["slow-rank"].evidence
    assert "25" in found["slow-rank"].evidence


def test_a_slowest_rank_that_is_hardly_slower_is_no_finding():
    near = {**RANKS, "slowest_rank_seconds": 0.42}
    assert "slow-rank" not in found_in(record(finished_events(step_events(**near))))


def test_a_slowest_rank_that_is_another_each_time_is_a_matter_of_the_rows():
    steps = step_events(**RANKS)
    for number, step in enumerate(steps):
        step["slowest_rank"] = number % 4
    found = found_in(record(finished_events(steps)))
    assert "slow-rank" not in found
    assert "uneven-ranks" in found


def test_a_step_that_talks_for_long_has_a_slow_link():
    found = found_in(record(finished_events(step_events(time_communication=10.0))))
    assert "slow-link" in found


def test_waiting_for_the_slowest_rank_is_not_the_link_and_what_is_left_is():
    waiting = record(finished_events(step_events(time_communication=1.0, **RANKS)))
    assert "slow-link" not in found_in(waiting)
    both = found_in(record(finished_events(step_events(time_communication=10.0, **RANKS))))
    assert {"slow-link", "slow-rank"} <= both.keys()
    assert "1.8 s" in both["slow-link"].evidence  # 2 s of each step, less 0.2 s of waiting

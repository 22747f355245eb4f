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
    talking = {"time_communication": 10.0}
    found = found_in(record(finished_events(step_events(**talking))))
    assert "slow-link" in found
    assert "slow-link" not in found_in(record(finished_events(step_events(**talking, **RANKS)))), (
        "the others wait for the slow one"
    )

from __future__ import annotations

import pytest

from expert.training.pressure import (
    SETTLING_STEPS,
    STORM_WARMUP_STEPS,
    AllocatorRetries,
    DataWait,
    Pressure,
    RecompileCounter,
)


def watch(**changes):
    return DataWait(**{"workers": 4, "cores": 16, **changes})


def fed(wait, shares, *, seconds=10.0):
    """What the watch says after each of so many steps."""
    return [wait.add(seconds, seconds * share) for share in shares]


@pytest.mark.parametrize(("share", "told"), [(0.19, False), (0.2, False), (0.21, True)])
def test_a_fifth_of_the_time_is_tolerated(share, told):
    wait = watch()
    fed(wait, [1.0] * SETTLING_STEPS)
    assert bool(fed(wait, [share] * 6)[-1]) == told


def test_what_got_better_is_tried_again_and_only_twice_in_all():
    wait = watch()
    fed(wait, [0.0] * SETTLING_STEPS)
    signs = [fed(wait, [share] * 6)[-1] for share in (0.6, 0.4, 0.3, 0.9)]
    assert [bool(hint) for hint in signs] == [True, True, False, False]
    assert not signs[1].thrashing


def test_graphs_of_the_warm_up_and_of_evaluations_are_no_storm():
    graphs = [0]
    watched = RecompileCounter(lambda: graphs[0], most=4)
    for _ in range(STORM_WARMUP_STEPS):
        graphs[0] += 10
        assert watched.add() is None
    with watched.ignored():
        graphs[0] += 7
    graphs[0] += 4
    assert watched.add() is None
    graphs[0] += 1
    hint = watched.add()
    assert hint is not None
    assert hint.count == 5
    assert watched.add() is None  # told once


def test_a_sign_is_kept_until_it_is_taken_and_then_forgotten():
    both = Pressure(
        data=watch(), spilling=AllocatorRetries(), recompiling=RecompileCounter(lambda: 0)
    )
    for _ in range(SETTLING_STEPS + 6):
        both.add_times(10.0, 9.0)
    for count in range(5):
        both.add_facts({"allocator_retries": count})
    assert type(both.take_hint()).__name__ == "DataBound"
    assert both.take_hint() is None

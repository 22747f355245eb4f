"""The learning rate: its formulas, its edges, and what a rollback does to it."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.training.schedule import (
    Schedule,
    after_rollback,
    learning_rate,
    rollbacks_of,
    schedule_of,
    with_rollbacks,
)
from tests.each import each
from tests.training.toys import optim_plan

KINDS = ("linear", "cosine", "constant", "polynomial", "cosine_with_restarts")
# Rates are a handful of float64 operations: a few units in the last place.
ROUNDING = 1e-12


def schedule(kind: str = "cosine", total: int = 10, warmup: int = 0, **options: float) -> Schedule:
    return Schedule(kind=kind, peak=1.0, warmup_steps=warmup, total_steps=total, options=options)


def rates(made: Schedule) -> list[float]:
    return [learning_rate(step, made) for step in range(made.total_steps)]


@st.composite
def schedules(draw) -> Schedule:
    kind = draw(st.sampled_from(KINDS))
    possible = {
        "num_cycles": st.floats(0.1, 5),
        "power": st.floats(0.5, 3),
        "lr_end": st.floats(0, 2),
        "min_lr": st.floats(0, 2),
    }
    names = draw(st.sets(st.sampled_from(sorted(possible))))
    return Schedule(
        kind=kind,
        peak=draw(st.floats(1e-7, 1)),
        warmup_steps=draw(st.integers(0, 60)),
        total_steps=draw(st.integers(1, 50)),
        options={name: draw(possible[name]) for name in sorted(names)},
    )


@given(schedules())
def test_every_step_has_a_rate_above_zero_and_at_most_the_peak(made):
    for rate in rates(made):
        assert 0 < rate <= made.peak


@given(st.sampled_from(["linear", "cosine", "polynomial"]), st.integers(1, 80), st.integers(0, 90))
def test_after_warm_up_the_rate_only_falls(kind, total, warmup):
    falling = rates(schedule(kind, total, warmup))[warmup:]
    assert all(before > after for before, after in pairwise(falling))


def half_wave(step: int, steps: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * step / steps))


@each(
    ("made", "expected"),
    [
        (schedule("linear", 4), [1.0, 0.75, 0.5, 0.25]),
        (schedule("cosine", 8, min_lr=0.2), [0.2 + 0.8 * half_wave(n, 8) for n in range(8)]),
        # A trace is kept where a whole wave touches zero.
        (schedule("cosine", 4, num_cycles=1.0), [1.0, 0.5, 1e-12, 0.5]),
        (schedule("constant", 6, 2), [0.5, 1, 1, 1, 1, 1]),
        (
            schedule("polynomial", 4, power=2.0, lr_end=0.1),
            [0.1 + 0.9 * (1 - n / 4) ** 2 for n in range(4)],
        ),
        (
            schedule("cosine_with_restarts", 8, num_cycles=2.0),
            2 * [half_wave(n, 4) for n in range(4)],
        ),
        # A warm-up longer than the run never arrives; a floor above the peak is the peak.
        (schedule("cosine", 3, 4), [0.25, 0.5, 0.75]),
        (schedule("cosine", 3, min_lr=2.0), [1.0, 1.0, 1.0]),
        (schedule("polynomial", 3, lr_end=2.0), [1.0, 1.0, 1.0]),
    ],
)
def test_every_kind_has_its_curve(made, expected):
    assert rates(made) == pytest.approx(expected, rel=ROUNDING, abs=0)


@each(
    ("total", "ratio", "steps"),
    [(100, 0.03, 3), (101, 0.03, 4), (100, 0.07, 7), (1, 0.03, 1), (10, 0.0, 0), (10, 1.0, 10)],
)
def test_a_ratio_of_warm_up_is_rounded_up_to_whole_steps(total, ratio, steps):
    assert schedule_of(optim_plan(warmup_ratio=ratio), total).warmup_steps == steps


def test_the_plan_settles_the_schedule():
    plan = optim_plan(
        scheduler="polynomial", scheduler_options={"power": 2.0}, warmup_steps=7, learning_rate=3e-4
    )
    made = schedule_of(plan, 90)
    assert made == Schedule(
        kind="polynomial", peak=3e-4, warmup_steps=7, total_steps=90, options={"power": 2.0}
    )
    assert schedule_of(optim_plan(), 90).warmup_steps == 0


def test_after_a_rollback_the_same_curve_is_lower_and_warms_up_again():
    before = schedule("linear", 100)
    made = after_rollback(before, at=40)
    lower = [0.5 * learning_rate(step, before) for step in range(100)]
    assert rates(made)[:40] == lower[:40]
    assert rates(made)[40:42] == [lower[40] / 6, lower[41] * 2 / 6]  # a tenth of the rest
    assert rates(made)[46:] == lower[46:]
    assert after_rollback(before, at=99).restart_warmup_steps == 5


@given(schedules(), st.integers(0, 60))
def test_a_schedule_comes_back_from_json_as_it_was(planned, at):
    made = after_rollback(planned, at=at)
    back = with_rollbacks(planned, json.loads(json.dumps(rollbacks_of(made))))
    assert back == made
    assert rates(back) == rates(made)

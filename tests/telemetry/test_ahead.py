"""The remaining evaluations of a run, and how long they will take."""

from __future__ import annotations

from expert.telemetry.meter import Meter, RemainingEvaluations, StepCounts
from tests.each import each
from tests.telemetry.clocks import HandClock


def made(meter: Meter, clock: HandClock, done: int, seconds: float = 1.0) -> None:
    """Add `done` steps, numbered from 0."""
    for step in range(done):
        clock.turn(seconds)
        meter.add(StepCounts(step=step, real_tokens=1, places=1, examples=1, targets=1))


@each(
    ("total", "every", "left"),
    [
        (40, 10, {0: 4, 9: 4, 10: 4, 11: 3, 39: 1, 40: 1}),
        (45, 10, {0: 5, 40: 2, 41: 1, 45: 1}),  # one more after the last step
        (5, 10, {0: 1, 5: 1}),
    ],
)
def test_evaluations_to_come_are_those_on_the_way_and_the_last(total, every, left):
    ahead = RemainingEvaluations(total_steps=total, every=every, at_end=True, validation=1.0)
    assert {done: ahead.evaluations(done) for done in left} == left


def test_a_finished_evaluation_is_not_remaining():
    ahead = RemainingEvaluations(total_steps=40, every=10, at_end=True, validation=1.0)
    ahead.measured(5.0, cost=1.0, done=10)
    assert ahead.evaluations(10) == 3
    ahead.measured(5.0, cost=1.0, done=40)
    assert ahead.evaluations(40) == 0


def test_the_time_left_has_the_evaluations_in_it_before_and_after_one_was_measured():
    clock = HandClock()
    ahead = RemainingEvaluations(total_steps=4, at_end=True, validation=60.0, test=30.0)
    meter = Meter(clock, total_steps=4, ahead=ahead, settling=0)
    made(meter, clock, 1)
    assert meter.eta_seconds() == 3 + 90.0
    made(meter, clock, 4)
    assert meter.eta_seconds() == 90.0
    ahead.measured(20.0, cost=60.0, done=4)  # three times as fast as expected
    assert meter.eta_seconds() == 10.0


def test_an_evaluation_that_was_measured_says_how_long_the_next_ones_take():
    clock = HandClock()
    ahead = RemainingEvaluations(total_steps=30, every=10, at_end=True, validation=6.0, test=3.0)
    meter = Meter(clock, total_steps=30, ahead=ahead, settling=0)
    made(meter, clock, 10)
    ahead.measured(12.0, cost=6.0, done=10)
    assert meter.eta_seconds() == 20.0 + 2 * 12.0 + 6.0

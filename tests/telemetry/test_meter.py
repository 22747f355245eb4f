"""Rates, averages and the remaining time, with a fake clock."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from expert.telemetry.meter import MIN_SMOOTHED, SMOOTH_SHARE, Meter, StepCounts
from expert.telemetry.timeline import StepTimes
from tests.each import each
from tests.telemetry.conftest import HandClock

COUNTS = {"real_tokens": 90, "places": 100, "examples": 3, "targets": 50}


def times(step: int, wall: float, data_wait: float) -> StepTimes:
    return StepTimes(step=step, wall=wall, phases={"data_wait": data_wait})


@pytest.fixture
def meter(clock) -> Meter:
    return Meter(clock, peak_flops=1000.0, total_steps=100)


def make(meter: Meter, clock: HandClock, *seconds: float, first: int = 1, **changed: Any) -> None:
    loss_sum = changed.pop("loss_sum", None)
    counts: dict[str, Any] = COUNTS | changed
    for step, one in enumerate(seconds, start=first):
        clock.turn(one)
        meter.add(StepCounts(step=step, **counts))
        if loss_sum is not None:
            meter.add_loss(loss_sum, counts["targets"])


def test_the_clock_stands_still_before_the_start_and_in_pauses_however_they_end(meter, clock):
    clock.turn(1000)
    meter.start()
    make(meter, clock, 1.0)
    with meter.paused() as pause:
        clock.turn(30)
        with suppress(RuntimeError), meter.paused():
            clock.turn(5)
            raise RuntimeError("an evaluation fails")
        clock.turn(5)
    make(meter, clock, 2.0, first=2)
    assert (meter.step_line()["seconds"], pause.seconds) == (3.0, 40.0)


@each(
    ("peak", "flops", "mfu"),
    [(1000.0, (800.0, 800.0), 0.4), (None, (800.0, 800.0), None), (1000.0, (800.0, None), None)],
    ids=["known", "of a card that nobody knows", "of a model that nobody has counted"],
)
def test_mfu_is_the_arithmetic_done_of_what_the_card_could_do(peak, flops, mfu):
    clock = HandClock()
    meter = Meter(clock, peak_flops=peak)
    for step, (seconds, one) in enumerate(zip((1.0, 3.0), flops, strict=True)):
        make(meter, clock, seconds, first=step, flops=one)
    assert meter.step_line()["mfu"] == mfu


def test_a_host_far_ahead_of_its_device_does_not_make_steps_faster(meter, clock):
    """As with captured passes, which launch immediately: three steps settle, two are counted."""
    make(meter, clock, 1.0, 1.0, 1.0, 0.01, 0.01, flops=800.0)
    for step in range(1, 6):
        meter.add_times(times(step, wall=2.0, data_wait=0.0))
    line, run = meter.step_line(5), meter.run_line()
    assert line["seconds"] == run["seconds"] == 3 + 2 * 2.0
    for told in (line, run):
        assert told["tokens_per_second"] == 2 * 90 / (2 * 2.0)
        assert told["steps_per_second"] == 0.5
    assert line["mfu"] == pytest.approx(0.4)
    assert line["eta_seconds"] == 2.0 * (100 - 6)
    make(meter, clock, 3.0, 3.0, first=6)  # the host waits for data outside of any step
    for step in (6, 7):
        meter.add_times(times(step, wall=2.0, data_wait=0.0))
    assert meter.step_line(7)["tokens_per_second"] == 30.0


def test_after_a_fallback_the_next_steps_settle_again(meter, clock):
    start = clock()
    assert meter.steady_since is None
    make(meter, clock, 9.0, 9.0, 9.0, 1.0)
    assert meter.steady_since == start + 27
    with meter.paused():
        clock.turn(5)
    assert meter.steady_since == start + 33
    meter.resettle()
    assert meter.steady_since is None
    make(meter, clock, 9.0, 9.0, 9.0, 1.0, first=5)
    assert meter.steady_since == start + 60
    assert meter.eta_seconds() == 91 * (1 + 5 / 56)  # 5 seconds of pause in 56 of training


def test_losses_are_weighed_by_their_targets_and_not_diluted_by_those_that_come_late(meter, clock):
    make(meter, clock, 1.0, targets=2, loss_sum=10.0)
    make(meter, clock, 1.0, first=2, targets=100, loss_sum=90.0)
    assert meter.step_line()["loss"] == pytest.approx(100 / 102)  # not (5 + 0.9) / 2
    make(meter, clock, 1.0, 1.0)
    assert meter.step_line()["loss"] is None
    meter.add_loss(100.0, 50)
    assert meter.step_line()["loss"] == 2.0


def test_a_step_line_covers_what_came_since_the_last_one(meter, clock):
    make(meter, clock, 5.0, 5.0, loss_sum=50.0, flops=500.0)
    meter.step_line()
    make(meter, clock, 1.0, first=3, loss_sum=100.0, flops=500.0)
    meter.add_times(times(3, wall=1.0, data_wait=0.125))
    assert meter.step_line() == {
        "loss": 2.0,
        "smoothed_loss": 2.0,
        "updates": 1,
        "tokens": 90,
        "targets": 50,
        "examples": 3,
        "tokens_per_second": 90.0,
        "median_tokens_per_second": 90.0,
        "samples_per_second": 3.0,
        "steps_per_second": 1.0,
        "mfu": 0.5,
        "data_wait": 0.125,
        "padding": 0.1,
        "seconds": 1.0,
        "eta_seconds": None,
    }


def test_a_late_line_covers_the_steps_up_to_its_own_and_what_was_undone(meter, clock):
    make(meter, clock, 1.0, 2.0, 4.0)  # steps 1, 2 and 3
    lines = [meter.step_line(2), meter.step_line(3)]
    assert [line["updates"] for line in lines] == [2, 1]
    assert [line["seconds"] for line in lines] == [3.0, 4.0]
    make(meter, clock, 1.0, 1.0, 1.0)
    make(meter, clock, 5.0, first=2)  # after a rollback
    assert meter.step_line(2)["seconds"] == 8.0  # all of that time was spent


def test_an_epoch_line_ends_its_epoch_and_the_run_continues(meter, clock):
    make(meter, clock, 2.0, loss_sum=50.0)
    assert meter.epoch_line(1, eval_loss=1.5) == {
        "epoch": 1,
        "loss": 1.0,
        "seconds": 2.0,
        "tokens": 90,
        "tokens_per_second": 45.0,
        "samples_per_second": 1.5,
        "steps_per_second": 0.5,
        "eval_loss": 1.5,
    }
    make(meter, clock, 1.0, first=2, loss_sum=150.0)
    assert meter.epoch_line(2)["loss"] == 3.0
    assert (meter.run_line()["loss"], meter.run_line()["seconds"]) == (2.0, 3.0)


def test_rates_leave_out_the_steps_that_compile_and_the_seconds_do_not(meter, clock):
    make(meter, clock, 60.0)
    assert meter.step_line()["tokens_per_second"] == 1.5  # nothing else is known yet
    make(meter, clock, 20.0, 20.0, 1.0, 2.0, first=2)
    line, epoch, run = meter.step_line(), meter.epoch_line(1), meter.run_line()
    assert (line["seconds"], epoch["seconds"], run["seconds"]) == (43.0, 103.0, 103.0)
    for facts in (line, epoch, run):
        assert facts["tokens_per_second"] == 60.0
        assert facts["samples_per_second"] == 2.0
        assert facts["steps_per_second"] == pytest.approx(2 / 3)


def test_a_resumed_meter_continues_with_its_sums(meter, clock):
    make(meter, clock, 1.0, 3.0, loss_sum=100.0)
    other = Meter(clock, total_steps=100)
    other.restore(meter.state())
    for one in (meter, other):
        one.start()
        make(one, clock, 2.0, first=3, loss_sum=25.0)
    assert other.run_line() == meter.run_line()
    assert other.epoch_line(1) == meter.epoch_line(1)
    assert other.run_line()["loss"] == 1.5


def test_losses_of_steps_that_were_undone_are_forgotten_and_their_time_is_not(meter, clock):
    make(meter, clock, 1.0, loss_sum=50.0)
    before = meter.state()
    make(meter, clock, 1.0, first=2, loss_sum=5000.0)
    meter.restore_losses(before)
    assert (meter.run_line()["loss"], meter.run_line()["seconds"]) == (1.0, 2.0)
    assert meter.epoch_line(1)["loss"] == 1.0
    meter.restore_losses({})
    assert meter.run_line()["loss"] is None


def test_the_loss_of_a_run_is_the_mean_of_its_newest_lines_and_its_rate_a_median(clock):
    meter, told = Meter(clock, settling=0), []
    for step in range(1, 101):
        make(meter, clock, 50.0 if step > 98 else 1.0, first=step, loss_sum=50.0 * step)
        line = meter.step_line(step)
        told.append(line["loss"])
        newest = told[-1 - (max(1, round(step * SMOOTH_SHARE)) if step >= MIN_SMOOTHED else 0) :]
        assert line["smoothed_loss"] == pytest.approx(sum(newest) / len(newest))
    assert line["median_tokens_per_second"] == 90.0
    resumed = Meter(clock)
    resumed.restore(meter.state())
    assert resumed.run_line()["smoothed_loss"] == line["smoothed_loss"]

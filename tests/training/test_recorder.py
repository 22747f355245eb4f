from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from expert.telemetry.meter import Meter
from expert.telemetry.timeline import Timeline
from expert.training import recorder as recorder_module
from expert.training.recorder import SCALE_HALVINGS, DelayedValues, RecompileCounter, Recorder
from expert.training.recovery import NotFinite
from expert.training.spikes import SpikeWatch
from expert.training.step import StepStats
from tests.telemetry.conftest import HandClock
from tests.training.toys import CPU


def made(told, **changes):
    clock = HandClock()
    recorder = Recorder(
        lambda event, *, step=None, **fields: told.append({"event": event, "step": step, **fields}),
        device=CPU,
        meter=Meter(clock),
        timeline=Timeline(CPU, clock=clock),
        spikes=SpikeWatch(),
        **{"log_every": 1, "recompiling": RecompileCounter(lambda: 0), **changes},
    )
    return recorder, clock


def take(recorder, clock, step, loss=2.0, *, applied=True, norm=1.0):
    """A step of one second and ten targets."""
    recorder.begin(step)
    with recorder.waiting():
        clock.now += 0.25
    clock.now += 0.75
    fed = SimpleNamespace(
        step=SimpleNamespace(done=step, bins=(step, step + 100)),
        made_seconds=0.125,
        copied=None,
        facts={},
    )
    stats = StepStats(
        loss_sum=torch.tensor(10 * loss),
        grad_norm=torch.tensor(norm),
        applied=torch.tensor(applied),
        metrics={"margin": torch.tensor(5.0 * step)},
        weight=10,
        real_tokens=20,
        places=40,
        examples=2,
    )
    return recorder.end(fed, stats, rate=1e-3, epoch=0.5)


def test_lines_come_when_they_are_due_with_the_mean_since_the_last():
    told = []
    recorder, clock = made(told, log_every=3)
    for step, loss in enumerate((1.0, 2.0, 6.0, 5.0)):
        take(recorder, clock, step, loss)
    assert [(line["step"], line["loss"]) for line in told] == [(3, 3.0)]
    assert "mean_loss" not in told[0]
    assert told[0]["examples"] == 6
    assert (told[0]["updates"], told[0]["time_feed"], told[0]["padding"]) == (3, 0.375, 0.5)
    assert told[0]["margin"] == 0.5  # a metric of the objective: (0 + 5 + 10) / 30


def test_lines_of_a_card_that_reports_late_cover_their_own_steps_to_the_last(monkeypatch):
    """A line without time or tokens would be read as a step that takes none."""
    monkeypatch.setattr(recorder_module, "DelayedValues", lambda d: DelayedValues(d, lag=1))
    told = []
    recorder, clock = made(told)
    for step in range(3):
        take(recorder, clock, step)
    recorder.wait_for_numbers()
    assert [line["step"] for line in told] == [1, 2, 3]
    facts = [(line["updates"], line["seconds"], line["tokens"], line["time_feed"]) for line in told]
    assert facts == [(1, 1.0, 20, 0.125)] * 3


@pytest.mark.parametrize("loss", [math.nan, math.inf, 2.0])
def test_a_step_that_was_not_applied_is_trouble_with_its_sequences(loss):
    told = []
    recorder, clock = made(told, log_every=100)
    (trouble,) = take(recorder, clock, 3, loss, applied=False, norm=math.nan)
    assert trouble.what == NotFinite(step=3, bins=(3, 103))
    assert [line["step"] for line in told] == [4]  # told although no line was due


def test_an_overflow_of_scaled_losses_is_no_trouble_until_it_never_ends():
    recorder, clock = made([], loss_scaling=True)
    found = [take(recorder, clock, step, applied=False) for step in range(SCALE_HALVINGS + 1)]
    assert found[:-1] == [[]] * SCALE_HALVINGS
    assert isinstance(found[-1][0].what, NotFinite)
    recorder, clock = made([], loss_scaling=True)
    assert take(recorder, clock, 0, math.nan, applied=False)  # a loss is never scaled


def test_a_single_high_loss_is_reported_once_and_no_trouble():
    told = []
    recorder, clock = made(told, log_every=50)
    losses = [2.0 + 0.01 * (step % 3) for step in range(30)]
    for step, loss in enumerate([*losses, 14.8, 15.0, 2.0, 12.8, 2.0]):
        assert take(recorder, clock, step, loss) == []
    found = [(line["step"], line["loss"]) for line in told if line["event"] == "high_loss"]
    assert found == [(31, pytest.approx(14.8)), (34, pytest.approx(12.8))]


def test_a_loss_that_is_not_finite_is_left_out_of_the_mean_and_shown_as_it_was():
    told = []
    recorder, clock = made(told, log_every=3)
    take(recorder, clock, 0, 2.0)
    take(recorder, clock, 1, math.nan, applied=False)
    assert [(line["step"], str(line["loss"])) for line in told] == [(2, "nan")]
    assert recorder.meter.run_line()["loss"] == 2.0


def test_the_first_step_reports_how_long_compiling_took():
    told = []
    recorder, clock = made(told, compiles=True, log_every=0)
    for step in range(3):
        take(recorder, clock, step)
    recorder.meter.resettle()  # another plan: it compiles again
    take(recorder, clock, 3)
    assert told == [
        {"event": "compiled", "step": 1, "seconds": 1.0},
        {"event": "compiled", "step": 4, "seconds": 1.0},
    ]

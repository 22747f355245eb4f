"""Lasting spikes are detected, noise is not, and reactions are limited."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.training.spikes import SkippedSteps, SpikeTest, SpikeWatch, after_not_finite
from tests.each import each
from tests.training.toys import stability

# Of real runs of the built-in model on rows that repair JSON, without a spike in either.
REAL: dict[str, list[float]] = json.loads(
    (Path(__file__).parent / "files" / "losses.json").read_text(encoding="utf-8")
)
LEAST = SpikeTest().least_history
STAYS = SpikeTest().stays
AT_ONCE = SpikeTest(stays=1)


def smooth(step: int) -> float:
    """A loss that falls from 10.5 towards 2.5, as language models' do."""
    return 2.5 + 8 * math.exp(-step / 300) + step * -1e-5


def lognormal(draw: random.Random) -> float:
    return math.exp(draw.gauss(0, 0.2))


def laplace(draw: random.Random) -> float:
    return 1 + 0.04 * draw.choice((-1, 1)) * draw.expovariate(1)


def student(draw: random.Random) -> float:
    """Four degrees of freedom: one in ten thousand is 13 scales out."""
    chi = sum(draw.gauss(0, 1) ** 2 for _ in range(4)) / 4
    return 1 + 0.02 * draw.gauss(0, 1) / math.sqrt(chi)


def gaussian(draw: random.Random) -> float:
    return max(0.1, 1 + 0.15 * draw.gauss(0, 1))


def none(_draw: random.Random) -> float:
    return 1.0


NOISES = (lognormal, laplace, student, gaussian, none)


def alarms(losses, watch: SpikeWatch | None = None) -> list[int]:
    """The first step of every spike."""
    watch = watch or SpikeWatch()
    found = [watch.observe(step, loss) for step, loss in enumerate(losses)]
    return [spike.step for spike in found if spike is not None]


def alarms_at_once(losses) -> list[int]:
    """Of spikes that need not stay: the level of a single loss is judged in the same way."""
    return alarms(losses, SpikeWatch(AT_ONCE))


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("seed", [0, 1])
def test_noise_is_no_spike_in_ten_thousand_steps(noise, seed):
    draw = random.Random(seed)
    assert alarms(smooth(step) * noise(draw) for step in range(10_000)) == []


@each("noise", NOISES)
@each("length", [STAYS, 50])
@each("at", [LEAST, 100, 1500])
def test_losses_ten_times_as_high_are_found_once_it_is_certain(noise, length, at):
    draw = random.Random(3)
    losses = [smooth(step) * noise(draw) for step in range(at + length + 200)]
    for step in range(at, at + length):
        losses[step] *= 10
    assert alarms(losses)[0] == at
    assert alarms(losses[: at + STAYS - 1]) == []
    assert alarms(losses[: at + STAYS]) == [at]


@pytest.mark.parametrize("length", range(1, STAYS))
def test_a_spike_that_does_not_stay_is_no_spike(length):
    losses = [2.5] * 100
    losses[60 : 60 + length] = [25.0] * length
    assert alarms(losses) == []


def test_rows_that_are_not_learned_yet_spike_alone_when_the_others_are():
    # As make demo was: in one step of twenty a row of 16 costs 1.2 nats, the others nothing.
    draw = random.Random(11)
    losses = [0.001 + (1.2 / 16 if draw.random() < 0.05 else 0.0) for _ in range(5000)]
    assert len(alarms_at_once(losses)) > 50  # or it would prove nothing
    assert alarms(losses) == []


@pytest.mark.parametrize("updates", [2, 5, 10])
def test_a_spike_that_takes_a_few_steps_to_build_up_is_found(updates):
    draw = random.Random(5)
    losses = [2.0 * laplace(draw) for _ in range(100)]
    losses += [2.0 * 5 ** ((1 + number) / updates) for number in range(updates)]
    assert alarms([*losses, *[10.0] * STAYS])


@each(
    ("losses", "found"),
    [
        ([1.0] * (LEAST - 1) + [50.0], []),  # too little history
        ([1.0] * LEAST + [50.0], [LEAST]),
        ([5.0] * 60 + [0.1] * 10, []),  # a fall
        ([1.0] * 40 + [1.49], []),  # below half of the median
        ([1.0] * 40 + [1.51], [40]),
        ([0.001] * 40 + [0.05], []),  # a tiny loss may multiply
        ([0.001] * 40 + [0.06], [40]),
    ],
)
def test_a_spike_is_a_rise_that_is_high_enough_after_enough_losses(losses, found):
    assert alarms_at_once(losses) == found


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_no_spike_and_leaves_no_trace(wrong):
    watch, clean = SpikeWatch(), SpikeWatch()
    for step in range(60):
        watch.observe(step, 1.0 + step % 3)
        clean.observe(step, 1.0 + step % 3)
        if step % 2:
            assert watch.observe(step, wrong) is None
    assert watch.state() == clean.state()


@given(st.lists(st.floats(0, 1e6), max_size=120), st.integers(0, 120))
def test_a_watch_from_a_checkpoint_sees_what_the_first_one_would_have(losses, cut):
    whole, first = SpikeWatch(), SpikeWatch()
    expected = [whole.observe(step, loss) for step, loss in enumerate(losses)]
    seen = [first.observe(step, loss) for step, loss in enumerate(losses[:cut])]
    second = SpikeWatch(state=json.loads(json.dumps(first.state())))
    seen += [second.observe(step, loss) for step, loss in enumerate(losses) if step >= cut]
    assert seen == expected
    assert second.state() == whole.state()


# --- reactions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({}, ["stop", "stop", "stop"]),
        ({"on_not_finite": "skip", "max_skipped_updates": 2}, ["skip", "skip", "stop"]),
        ({"on_not_finite": "rollback", "max_rollbacks": 1}, ["rollback", "stop", "stop"]),
        ({"on_not_finite": "skip", "max_skipped_updates": 0}, ["stop", "stop", "stop"]),
    ],
)
def test_numbers_that_are_not_finite_stop_the_run_at_last(policy, expected):
    plan = stability(**policy)
    assert [after_not_finite(plan, skips=n, rollbacks=n) for n in range(3)] == expected


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=12))
def test_skipped_steps_are_exactly_those_of_the_windows(windows):
    skipped, expected = SkippedSteps(), set()
    for first, more in windows:
        skipped = skipped.with_window(first, first + more)
        expected |= set(range(first, first + more + 1))
    assert {step for step in range(-5, 90) if step in skipped} == expected
    assert SkippedSteps.from_json(json.loads(json.dumps(skipped.to_json()))) == skipped

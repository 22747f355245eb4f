"""Every threshold on both sides: what lies just below is left alone, what lies above is told.

The runs are made up from a healthy one; the numbers stand beside the rules, with their reasons.
"""

from __future__ import annotations

from typing import Any

import pytest

from expert.insight.findings.verdict import judge
from tests.each import each
from tests.insight.records import (
    GIB,
    evidence,
    finished_events,
    found_in,
    planned,
    record,
    step_events,
)

ALONE = {"data__packing": "none"}
MICRO = {"batch__micro_batch": 1, "batch__accumulation": 16, "memory__parts": {"loss": GIB}}
CARD = 150_754_820_096


def level(name: str, steps: list[Any], plan: dict[str, Any] | None = None, *others: Any) -> Any:
    """How bad a run is said to be in one respect; None where nothing is said."""
    found = found_in(record(finished_events(steps, *others), plan)).get(name)
    return None if found is None else found.severity


def pauses(kind: str, *seconds: float) -> list[dict[str, Any]]:
    return [{"event": kind, "time": 101.0, "step": 5, "seconds": each} for each in seconds]


@pytest.mark.parametrize(("padding", "told"), [(0.19, None), (0.21, "warning")])
def test_padding_of_rows_alone(padding, told):
    steps = step_events(padding=padding, samples_per_second=100.0)
    assert level("padding-waste", steps, planned(**ALONE)) == told


@pytest.mark.parametrize(("padding", "told"), [(0.39, None), (0.41, "note")])
def test_padding_of_packed_rows(padding, told):
    assert level("padding-waste", step_events(padding=padding)) == told


@pytest.mark.parametrize(("samples", "told"), [(420.0, None), (430.0, "warning")])
def test_rows_an_eighth_of_a_sequence_long(samples, told):
    """108,997 tokens a second are rows of 260 or 253 tokens, and 2,048 are 8 of 256."""
    steps = step_events(samples_per_second=samples)
    assert level("short-rows-alone", steps, planned(**ALONE)) == told
    assert level("packing-off", steps, planned(**ALONE)) == (None if told else "note")


@pytest.mark.parametrize(("waited", "told"), [(0.15, None), (0.18, "warning")])
def test_waiting_a_tenth_of_the_time(waited, told):
    steps = step_events(time_data_wait=waited, seconds=1.4934 + waited, time_feed=0.5)
    assert level("slow-disk", steps) == told


@pytest.mark.parametrize(("waited", "told"), [(0.020, None), (0.030, "warning")])
def test_waiting_longer_than_threads_take_to_change_over(waited, told):
    """Of five updates of 10 ms each."""
    part = {"time_forward": 0.02, "time_backward": 0.0, "time_optimizer": 0.0, "time_feed": 0.5}
    assert level("slow-disk", step_events(time_data_wait=waited, seconds=0.05, **part)) == told


@pytest.mark.parametrize(("feed", "name"), [(0.027, "slow-disk"), (0.025, "slow-feed")])
def test_reading_five_million_tokens_a_second(feed, name):
    steps = step_events(time_data_wait=1.0, seconds=2.5, time_feed=feed)
    assert level(name, steps) == "warning"


def test_the_read_rate_counts_five_bytes_a_token():
    steps = step_events(time_data_wait=1.0, seconds=2.5, time_feed=1.3)
    found = found_in(record(finished_events(steps)))["slow-disk"]
    assert "500 kB/s were read (100,000 tokens/s)" in found.evidence


@pytest.mark.parametrize(("use", "told"), [(71.0, None), (69.0, "warning")])
def test_the_use_of_the_card_in_old_runs(use, told):
    assert level("launch-bound", step_events(ran_dry=None, gpu_utilization=use)) == told


@pytest.mark.parametrize(("dry", "told"), [(0.4, None), (0.5, "warning")])
def test_half_of_the_updates_launched_too_late(dry, told):
    assert level("launch-bound", step_events(ran_dry=dry, gpu_utilization=90.0)) == told


@pytest.mark.parametrize(("use", "told"), [(97.0, None), (96.0, "warning")])
def test_a_queue_that_runs_dry_costs_nothing_where_the_card_is_in_full_use(use, told):
    assert level("launch-bound", step_events(ran_dry=1.0, gpu_utilization=use)) == told


def test_a_device_that_waits_for_data_is_not_called_launch_bound():
    assert level("launch-bound", step_events(ran_dry=1.0, time_data_wait=1.0, seconds=2.5)) is None


@pytest.mark.parametrize(("tokens", "told"), [(8191, "warning"), (8193, "note")])
def test_a_small_micro_batch_that_fills_the_card_is_a_note(tokens, told):
    steps = step_events(tokens=tokens * 16 * 5)
    assert level("small-micro-batch", steps, planned(("batch.micro_batch",), **MICRO)) == told


@pytest.mark.parametrize(("gib", "told"), [(70, None), (45, "warning")])
def test_advice_on_the_micro_batch_needs_twice_the_room(gib, told):
    """139 GiB hold 44 and one sequence of 70 GiB, or two of 45."""
    plan = planned(("batch.micro_batch",), **MICRO | {"memory__parts": {"loss": gib * GIB}})
    steps = step_events(peak_reserved_bytes=(gib + 1) * GIB, tokens=1000)
    assert level("small-micro-batch", steps, plan) == told


@pytest.mark.parametrize(("share", "told"), [(0.89, None), (0.91, "note")])
def test_the_power_limit(share, told):
    assert level("power-limit", step_events(throttled_power=share)) == told


@pytest.mark.parametrize(("share", "told"), [(0.19, None), (0.21, "warning")])
def test_heat(share, told):
    assert level("throttled", step_events(throttled_heat=share)) == told


@pytest.mark.parametrize(("share", "told"), [(0.96, None), (0.98, "warning")])
def test_a_card_that_is_nearly_full(share, told):
    used = {"gpu_memory_bytes": share * CARD, "gpu_process_memory_bytes": share * CARD}
    assert level("memory-full", step_events(**used, allocator_retries=1)) == told


@pytest.mark.parametrize(("more", "told"), [(1.4, None), (1.6, "warning")])
def test_memory_of_others(more, told):
    """Without NVML's word for the process, its allocator and 840 MiB of context are its own."""
    used = 44_436_553_728 + 840 * 2**20 + more * GIB
    steps = step_events(gpu_memory_bytes=used, gpu_process_memory_bytes=None)
    assert level("other-process", steps) == told


@pytest.mark.parametrize(("graphs", "told"), [(2, None), (5, None), (7, "warning")])
def test_graphs_after_the_warm_up(graphs, told):
    """In 60 updates."""
    assert level("recompiling", step_events(recompiles=graphs)) == told


@pytest.mark.parametrize(
    ("weights", "seconds", "told"),
    [(9e6, 0.2, None), (11e6, 0.05, "note"), (11e6, 0.2, "warning")],
)
def test_a_plain_optimizer(weights, seconds, told):
    changes = {"optim__optimizer": "adamw_torch", "adapter__trainable_parameters": int(weights)}
    assert level("plain-optimizer", step_events(time_optimizer=seconds), planned(**changes)) == told


@pytest.mark.parametrize(("gib", "told"), [(13, "note"), (14, "warning")])
def test_whole_logits(gib, told):
    plan = planned(kernels__fused_loss=False, memory__parts={"loss": gib * GIB})
    assert level("whole-logits", step_events(), plan) == told


@pytest.mark.parametrize(("kind", "gain"), [("full", 1.35), ("selective", 1.175)])
def test_the_gain_of_keeping_activations(kind, gain):
    plan = planned(
        ("kernels.checkpointing",), kernels__checkpointing=kind, kernels__recomputed_blocks=2
    )
    plan["memory"] = {**plan["memory"], "parts": {"activations": GIB}}
    found = found_in(record(finished_events(step_events()), plan))["needless-recomputing"]
    assert found.gain == pytest.approx(gain)


@each(
    ("seconds", "asked", "told"),
    [
        ((2.0, 2.0), True, None),  # 4 s beside 17.9 s of training: under a quarter
        ((4.0, 4.0), True, "warning"),
        ((4.0, 4.0), False, None),  # nobody asked, and it costs less than half a minute
        ((16.0, 16.0), False, "warning"),
    ],
)
@each(
    ("kind", "name", "path"),
    [
        ("eval", "evaluation-often", "watch.eval_steps"),
        ("saved", "saving-often", "watch.save_steps"),
    ],
)
def test_evaluating_and_saving(kind, name, path, seconds, asked, told):
    plan = planned((path,) if asked else ())
    assert level(name, step_events(), plan, *pauses(kind, *seconds)) == told


def test_the_gain_of_evaluating_less_leaves_it_a_twentieth():
    plan = planned(("watch.eval_steps",))
    run = record(finished_events(step_events(), *pauses("eval", 9.0, 9.0)), plan)
    training = 12 * 1.4934
    expected = (training + 18) / (training + 0.05 * training)
    assert found_in(run)["evaluation-often"].gain == pytest.approx(expected)


def test_pauses_of_a_moment_are_not_worth_a_word():
    steps = step_events(3, every=1, updates=1, seconds=0.1)
    plan = planned(("watch.save_steps",))
    short, long = pauses("saved", 0.9, 0.9), pauses("saved", 1.1, 1.1)
    assert level("saving-often", steps, plan, *short) is None
    assert level("saving-often", steps, plan, *long) == "warning"
    assert judge(evidence(record(finished_events(steps, *short)))).kind == "compute-bound"
    assert judge(evidence(record(finished_events(steps, *long)))).kind == "saving-bound"


@pytest.mark.parametrize(("seconds", "kind"), [(45.0, "compute-bound"), (55.0, "start-bound")])
def test_a_start_of_a_minute(seconds, kind):
    """Nine seconds of loading come to it."""
    compiled = {"event": "compiled", "time": 99.0, "step": 1, "seconds": seconds}
    assert judge(evidence(record(finished_events(step_events(4), compiled)))).kind == kind


@pytest.mark.parametrize(
    ("seconds", "every", "told"), [(0.04, 1, "note"), (0.06, 1, None), (0.04, 10, None)]
)
def test_log_lines_a_second(seconds, every, told):
    part = {"time_forward": seconds / 2, "time_backward": 0.0, "time_optimizer": 0.0}
    steps = step_events(every=1, updates=1, seconds=seconds, **part)
    assert level("logging-often", steps, planned(watch__logging_steps=every)) == told


@pytest.mark.parametrize(("skipped", "told"), [(0, None), (2, "note"), (3, "warning")])
def test_float16_that_overflows(skipped, told):
    steps = step_events(40 - skipped) + step_events(skipped, grad_norm="inf")
    assert level("fp16-skips", steps, planned(kernels__precision="fp16")) == told


@pytest.mark.parametrize(("rate", "told"), [(71_000.0, None), (69_000.0, "warning")])
def test_seven_tenths_of_a_measured_rate(rate, told):
    plan = planned(length__tokens_per_second=100_000.0)
    assert level("below-measured-rate", step_events(tokens_per_second=rate), plan) == told


@pytest.mark.parametrize(("last", "told"), [(1.04, None), (1.06, "note")])
def test_a_validation_loss_that_rises(last, told):
    evals = [
        {"event": "eval", "split": "validation", "step": n, "loss": loss, "seconds": 0.1}
        for n, loss in enumerate([1.5, 1.0, last])
    ]
    assert level("overfits", step_events(), None, *evals) == told

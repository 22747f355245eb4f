"""One sentence: what a run is bound by. Cards' numbers are made up or from docs/benchmarks."""

from __future__ import annotations

import pytest

from expert.insight.findings.verdict import feeding_verdict, judge, judge_step
from expert.insight.step.anatomy import StepAnatomy
from tests.insight.records import (
    CPU,
    evidence,
    finished_events,
    found_in,
    planned,
    record,
    step_events,
)
from tests.wording import wording


def judged(events, plan=None):
    return judge(evidence(record(events, plan)))


def test_tokenising_late_without_overlap_is_the_case_of_the_notes():
    """50 ms of computing, 200 of tokenising, 30 of copying, one after the other."""
    step = StepAnatomy(phases={"data_wait": 0.200, "copy": 0.030, "compute": 0.050})
    found = feeding_verdict(step)
    assert found.kind == "data-bound"
    assert found.sentence == wording("data-bound-device-computes-ms")
    assert [str(gain) for gain in found.gains] == [
        "pre-tokenise: 3.5x (280 ms / 80 ms)",
        wording("copies-beside-computation-up"),
    ]
    assert found.gain == pytest.approx(5.6)
    assert "training.config.tokenize: ahead" in found.fix
    assert "dataloader_pin_memory: true" in found.fix


def test_a_healthy_run_is_compute_bound_with_its_share_of_the_peak():
    found = judged(finished_events(step_events()))
    assert found.kind == "compute-bound"
    assert found.sentence == wording("compute-bound-good-gpu")
    assert (found.fix, found.gains) == ("", ())


def test_a_cpu_has_no_peak_to_compare_with():
    plan = planned(**{f"kernels__{key}": value for key, value in CPU.items()})
    found = judged(finished_events(step_events(mfu=None, gpu_utilization=None)), plan)
    assert found.sentence.startswith("compute-bound: good. The CPU computes 100 % of")


@pytest.mark.parametrize(
    ("kind", "fix"),
    [
        ("late", "tokenize: ahead"),
        ("padded", "packing: true"),
        ("stream", "streaming: false"),
        ("packed", "pretokenized_cache"),
    ],
)
def test_what_mends_a_device_that_waits_depends_on_the_feed(kind, fix):
    steps = step_events(time_data_wait=1.5, seconds=3.0)
    feed = {"event": "feed", "step": 0, "kind": kind, "workers": 0}
    found = judged(finished_events(steps, feed))
    assert found.kind == "data-bound"
    assert fix in found.fix
    assert found.gain == pytest.approx(2.0, abs=0.01)


def test_a_device_that_waits_for_its_copies_is_copy_bound():
    plan = planned(("loader.pin_memory",), loader__pin_memory=False)
    steps = step_events(time_data_wait=1.5, time_copy=1.6, seconds=3.0)
    found = judged(finished_events(steps), plan)
    assert found.kind == "copy-bound"
    assert "dataloader_pin_memory: true" in found.fix


def test_copies_without_a_pause_set_the_pace_wherever_the_device_stands_still():
    """As measured on an H200: slow copies in docs/benchmarks/planted-faults-h200.json."""
    phases = {"copy": 1.01, "forward": 0.29, "backward": 0.13, "other": 0.58}
    step = StepAnatomy(phases=phases, copies_beside=True, gpu_utilization=1.0, ran_dry=1.0)
    found = feeding_verdict(step)
    assert found.kind == "copy-bound"
    assert found.sentence == wording("copy-bound-copying-batches-takes")
    assert found.gain == pytest.approx(1.0 / 0.42)
    assert "dataloader_pin_memory: true" in found.fix
    narrow = feeding_verdict(step, pinned=True)
    assert "nvidia-smi -q" in narrow.fix


def test_copies_beside_a_device_that_computes_all_the_time_are_no_matter():
    phases = {"copy": 0.95, "forward": 0.40, "backward": 0.56, "other": 0.04}
    assert feeding_verdict(StepAnatomy(phases=phases, copies_beside=True)) is None


def test_reads_from_the_device_make_a_run_sync_bound():
    syncs = {"event": "syncs", "step": 4, "count": 3, "places": ["step.py:40", "step.py:41"]}
    found = judged(finished_events(step_events(ran_dry=1.0, gpu_utilization=50.0), syncs))
    assert found.kind == "sync-bound"
    assert wording("times-an-update") in found.sentence
    assert "step.py:40, step.py:41" in found.fix
    assert found.gain == pytest.approx(2.0)


def test_a_device_that_runs_dry_without_reads_is_launch_bound():
    found = judged(finished_events(step_events(ran_dry=0.9, gpu_utilization=60.0)))
    assert found.kind == "launch-bound"
    assert "batch_size" in found.fix


def test_waiting_for_data_comes_before_everything_else():
    found = judged(finished_events(step_events(ran_dry=1.0, time_data_wait=1.5, seconds=3.0)))
    assert found.kind == "data-bound"


def test_an_allocator_that_asks_again_and_again_is_memory_bound():
    steps = step_events()
    for number, step in enumerate(steps):
        step["allocator_retries"] = 5 * number
    assert judged(finished_events(steps)).kind == "memory-bound"


def test_recomputation_that_the_machine_chose_is_memory_bound():
    plan = planned(kernels__checkpointing="full", kernels__recomputed_blocks=28)
    found = judged(finished_events(step_events()), plan)
    assert found.kind == "memory-bound"
    assert found.gain == pytest.approx(1.35)
    assert "int4" in found.fix


def test_recomputation_that_was_asked_for_is_not():
    plan = planned(("kernels.checkpointing",), kernels__checkpointing="full")
    assert judged(finished_events(step_events()), plan).kind == "compute-bound"


@pytest.mark.parametrize(
    ("event", "kind", "key"),
    [("eval", "evaluation-bound", "eval_steps"), ("saved", "saving-bound", "save_steps")],
)
def test_a_run_that_hardly_trains_is_bound_by_what_it_does_instead(event, kind, key):
    steps = step_events(12)
    others = [{"event": event, "time": 101.0 + n, "step": n, "seconds": 4.0} for n in range(12)]
    found = judged(finished_events(steps, *others))
    assert found.kind == kind
    # 12 lines of 5 updates; 5 % of their 17.9 s is not even one of 4 s: once at the end.
    assert found.overrides == (f"training.config.{key}=60",)
    assert judge_step(evidence(record(finished_events(steps, *others)))).kind == "compute-bound"


def test_a_start_longer_than_the_training_is_told_when_the_run_has_ended():
    steps = step_events(3)
    compiled = {"event": "compiled", "time": 180.0, "step": 1, "seconds": 80.0}
    events = finished_events(steps, compiled)
    found = judged(events)
    assert found.kind == "start-bound"
    assert "torch_compile: false" in found.fix
    assert judged(events[:-1]).kind != "start-bound"


def test_a_run_without_an_update_says_how_it_ended():
    events = [{"event": "started"}, {"event": "failed", "error": "OSError: no such file"}]
    found = judged(events)
    assert found.kind == "unknown"
    assert found.fix == wording("run-ended-with-oserror")


def test_a_run_without_a_log_line_says_so():
    found = judged([{"event": "started", "step": 0}, {"event": "saved", "step": 4}])
    assert found.sentence == wording("unknown-steps-made-but")
    assert found.overrides == ("training.config.logging_steps=1",)


def test_without_phases_only_the_use_of_the_card_speaks():
    gone = dict.fromkeys(
        f"time_{name}"
        for name in ("data_wait", "copy", "forward", "backward", "optimizer", "other", "feed")
    )
    old = finished_events(step_events(**gone, ran_dry=None, gpu_utilization=98.0))
    assert "The GPU computes 98 % of" in judged(old).sentence
    torn = finished_events(step_events(**gone, ran_dry=None, gpu_utilization=None))
    assert judged(torn).kind == "unknown"


def test_a_run_that_compiled_and_saved_longer_than_its_lines_cover_is_judged():
    compiled = {"event": "compiled", "time": 99.0, "step": 1, "seconds": 70.0}
    saves = [{"event": "saved", "time": 101.0, "step": 5, "seconds": 19.0}] * 2
    run = record(finished_events(step_events(3), compiled, *saves))
    assert found_in(run)["saving-often"].gain is None
    assert judge(evidence(run)).kind == "start-bound"

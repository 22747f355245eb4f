"""What limits a run, in one sentence. GPU numbers are made up or from docs/benchmarks."""

from __future__ import annotations

from typing import Any

import pytest

from expert.insight.findings.verdict import Verdict
from tests.each import each
from tests.insight import records
from tests.insight.records import (
    CPU,
    finished_events,
    planned,
    record,
    step_events,
)

WAITS = {"time_data_wait": 1.5, "seconds": 3.0}
RETRIES = [step | {"allocator_retries": 5 * n} for n, step in enumerate(step_events())]
RECOMPUTED = {"kernels__checkpointing": "full", "kernels__recomputed_blocks": 28}
UNPINNED = planned(("loader.pin_memory",), loader__pin_memory=False)
COMPILED = {"event": "compiled", "time": 99.0, "step": 1, "seconds": 70.0}
SAVES = [{"event": "saved", "time": 101.0, "step": 5, "seconds": 19.0}] * 2


def judged(events: list[Any], plan: dict[str, Any] | None = None) -> Verdict:
    return records.judged(record(events, plan))


def feed(kind: str) -> dict[str, Any]:
    return {"event": "feed", "step": 0, "kind": kind, "workers": 0}


@each(
    ("steps", "events", "plan", "kind", "fix", "gain"),
    [
        # The fix for a device that waits depends on how batches are made.
        *(
            (WAITS, [feed(kind)], None, "data-bound", fix, 2.0)
            for kind, fix in (
                ("late", "tokenize: ahead"),
                ("padded", "packing: true"),
                ("stream", "streaming: false"),
                ("packed", "pretokenized_cache"),
            )
        ),
        ({**WAITS, "ran_dry": 1.0}, [], None, "data-bound", "", 2.0),  # comes first
        ({**WAITS, "time_copy": 1.6}, [], UNPINNED, "copy-bound", "pin_memory: true", 2.0),
        ({"ran_dry": 0.9, "gpu_utilization": 60.0}, [], None, "launch-bound", "batch_size", 1.67),
        (RETRIES, [], None, "memory-bound", "", None),
        ({}, [], planned(**RECOMPUTED), "memory-bound", "int4", 1.35),  # the planner's choice
        ({}, [], planned(("kernels.checkpointing",), **RECOMPUTED), "compute-bound", "", None),
        # A start of a minute; nine seconds of loading are added.
        (step_events(4), [COMPILED | {"seconds": 45.0}], None, "compute-bound", "", None),
        (step_events(4), [COMPILED | {"seconds": 55.0}], None, "start-bound", "", None),
        (step_events(3), [COMPILED, *SAVES], None, "start-bound", "torch_compile: false", None),
    ],
)
def test_a_run_is_bound_by_one_thing_that_has_a_fix(steps, events, plan, kind, fix, gain):
    lines = steps if isinstance(steps, list) else step_events(**steps)
    found = judged(finished_events(lines, *events), plan)
    assert found.kind == kind
    assert fix in found.fix
    assert gain is None or found.gain == pytest.approx(gain, abs=0.01)


def test_a_healthy_run_is_compute_bound_with_its_share_of_the_peak_which_a_cpu_has_not():
    found = judged(finished_events(step_events()))
    assert found.kind == "compute-bound"
    assert found.sentence.startswith(
        "compute-bound: good. The GPU computes 100 % of a step's 299 ms"
    )
    assert "29 % of the peak of NVIDIA H200 (MFU); the peak is 3.4x away." in found.sentence
    assert (found.fix, found.gain) == ("", None)
    plan = planned(**{f"kernels__{key}": value for key, value in CPU.items()})
    found = judged(finished_events(step_events(mfu=None, gpu_utilization=None)), plan)
    assert found.sentence.startswith("compute-bound: good. The CPU computes 100 % of")


def test_a_start_longer_than_the_training_is_told_when_the_run_has_ended():
    events = finished_events(step_events(3), COMPILED | {"time": 180.0, "seconds": 80.0})
    found = judged(events)
    assert (found.kind, "torch_compile: false" in found.fix) == ("start-bound", True)
    assert judged(events[:-1]).kind != "start-bound"


COPIES = {"time_copy": 5.0, "time_forward": 1.5, "time_backward": 0.6, "time_optimizer": 0.05}


def test_back_to_back_copies_are_copy_bound():
    """As measured on an H200: slow copies in docs/benchmarks/planted-faults-h200.json."""
    slow = finished_events(step_events(seconds=5.0, ran_dry=1.0, **COPIES))
    found = judged(slow, UNPINNED)
    assert found.kind == "copy-bound"
    assert "dataloader_pin_memory: true" in found.fix
    assert "nvidia-smi -q" in judged(slow).fix
    busy = {**COPIES, "time_forward": 2.0, "time_backward": 2.8}
    assert judged(finished_events(step_events(seconds=5.0, **busy))).kind == "compute-bound"


@each(
    ("event", "kind", "key"),
    [("eval", "evaluation-bound", "eval_steps"), ("saved", "saving-bound", "save_steps")],
)
def test_a_run_that_hardly_trains_is_bound_by_what_it_does_instead(event, kind, key):
    others = [{"event": event, "time": 101.0 + n, "step": n, "seconds": 4.0} for n in range(12)]
    events = finished_events(step_events(12), *others)
    # 12 lines of 5 steps; 5 % of their 17.9 s is less than one of 4 s: once, at the end.
    assert (judged(events).kind, judged(events).overrides) == (kind, (f"training.config.{key}=60",))


def test_a_run_without_an_update_or_a_log_line_says_so():
    found = judged([{"event": "started"}, {"event": "failed", "error": "OSError: no such file"}])
    assert (found.kind, found.fix) == ("unknown", "the run ended with: OSError: no such file")
    found = judged([{"event": "started", "step": 0}, {"event": "saved", "step": 4}])
    assert found.sentence.startswith("unknown: 4 steps finished, but no log line shows")
    assert found.overrides == ("training.config.logging_steps=1",)

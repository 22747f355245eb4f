"""Every threshold on both sides: what lies just below is left alone, what lies above is told.

The runs are made up from a healthy one; the numbers stand beside the rules, with their reasons.
"""

from __future__ import annotations

from typing import Any

from tests.each import each
from tests.insight.records import (
    GIB,
    finished_events,
    found_in,
    planned,
    record,
    step_events,
)

CARD = 150_754_820_096
OWN = 44_436_553_728 + 840 * 2**20
"""Memory of a run of records.py, with the CUDA context."""
ALONE = {"data__packing": "none"}
MICRO = {"batch__micro_batch": 1, "batch__accumulation": 16, "memory__parts": {"loss": GIB}}
SMALL = {"time_backward": 0.0, "time_optimizer": 0.0}
NO_NAME = {"gpu_process_memory_bytes": None}
PLAIN = {"optim__optimizer": "adamw_torch"}


def level(name: str, steps: list[Any], plan: dict[str, Any] | None = None, *others: Any) -> Any:
    """The severity of one finding of a run; None if it is not found."""
    found = found_in(record(finished_events(steps, *others), plan)).get(name)
    return None if found is None else found.severity


def waiting(waited: float, **more: Any) -> dict[str, Any]:
    return {"time_data_wait": waited, "time_feed": 0.5, **more}


SHORT = {"seconds": 0.05, "time_forward": 0.02, **SMALL}


def parts(loss: float) -> dict[str, Any]:
    return {"memory__parts": {"loss": loss * GIB}}


def weights(count: int) -> dict[str, Any]:
    return PLAIN | {"adapter__trainable_parameters": count}


@each(("name", "steps", "plan", "told"), [
    ("padding-waste", {"padding": 0.19, "samples_per_second": 100.0}, ALONE, None),
    ("padding-waste", {"padding": 0.21, "samples_per_second": 100.0}, ALONE, "warning"),
    # A tenth of a step, and longer than a thread switch in steps of 10 ms.
    ("slow-disk", waiting(0.15, seconds=1.6434), {}, None),
    ("slow-disk", waiting(0.18, seconds=1.6734), {}, "warning"),
    ("slow-disk", waiting(0.020, **SHORT), {}, None),
    ("slow-disk", waiting(0.030, **SHORT), {}, "warning"),
    ("launch-bound", {"ran_dry": 0.4, "gpu_utilization": 90.0}, {}, None),
    ("small-micro-batch", {"tokens": 8193 * 16 * 5}, MICRO, "note"),
    # 139 GiB hold 44 and one sequence of 70 GiB, or two of 45.
    ("small-micro-batch", {"peak_reserved_bytes": 71 * GIB}, MICRO | parts(70), None),
    ("small-micro-batch", {"peak_reserved_bytes": 46 * GIB, "tokens": 1}, MICRO | parts(45),
     "warning"),
    ("throttled", {"throttled_heat": 0.19}, {}, None),
    # If NVML does not report the process, its allocator and CUDA context are used.
    ("other-process", {"gpu_memory_bytes": OWN + 1.4 * GIB, **NO_NAME}, {}, None),
    # In 60 steps.
    ("recompiling", {"recompiles": 2}, {}, None),
    ("recompiling", {"recompiles": 7}, {}, "warning"),
    ("plain-optimizer", {"time_optimizer": 0.2}, weights(9_000_000), None),
    ("plain-optimizer", {"time_optimizer": 0.05}, weights(11_000_000), "note"),
])  # fmt: skip
def test_findings_on_both_sides_of_their_threshold(name, steps, plan, told):
    requested = ("batch.micro_batch",) if "batch__micro_batch" in plan else ()
    assert level(name, step_events(**steps), planned(requested, **plan)) == told


@each(
    ("seconds", "requested", "told"),
    [
        ((2.0, 2.0), True, None),  # 4 s beside 17.9 s of training: under a quarter
        ((4.0, 4.0), True, "warning"),
        ((4.0, 4.0), False, None),  # not set in the manifest, and less than half a minute
        ((16.0, 16.0), False, "warning"),
        ((100.0,), True, None),  # once, at the end
    ],
)
@each(
    ("kind", "name", "path"),
    [
        ("eval", "evaluation-often", "watch.eval_steps"),
        ("saved", "saving-often", "watch.save_steps"),
    ],
)
def test_evaluating_and_saving(kind, name, path, seconds, requested, told):
    plan = planned((path,) if requested else ())
    pauses = [{"event": kind, "time": 101.0, "step": 5, "seconds": each} for each in seconds]
    assert level(name, step_events(), plan, *pauses) == told

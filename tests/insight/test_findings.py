"""Rules about GPU runs: made-up events, each a change of a healthy run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from expert.insight.findings import course, feeding, kernels, memory
from expert.insight.findings.table import RULES
from expert.insight.record import RunRecord
from tests.each import each
from tests.insight.records import (
    CPU,
    GIB,
    H200,
    PLAN,
    finished_events,
    found_in,
    judged,
    planned,
    record,
    step_events,
)

ALARMS = ("error", "warning")
FP32 = {"kernels__precision": "fp32"}
FULL = {"kernels__checkpointing": "full", "kernels__recomputed_blocks": 28}


def alarms(run: RunRecord) -> set[str]:
    return {name for name, finding in found_in(run).items() if finding.severity in ALARMS}


def test_a_healthy_gpu_run_has_no_warnings():
    assert alarms(record(finished_events(step_events()))) == set()


DRY = {"ran_dry": 1.0, "gpu_utilization": 85.0}
SLOW_COPY = {"time_data_wait": 1.5, "time_copy": 1.6, "seconds": 3.0}
PACED_BY_COPIES = {"time_copy": 3.0, "time_forward": 0.3, "seconds": 3.0}
MICRO = {"batch__micro_batch": 1, "batch__accumulation": 16}
SMALL_PARTS = {"memory__parts": {"activations": 2 * GIB}}
ON_CPU = {f"kernels__{name}": value for name, value in CPU.items()}
NO_FLASH = {"event": "fell_back", "failure": "KernelUnavailable", "reason": "no flash"}
PADDED = {"event": "feed", "kind": "padded", "workers": 4}
SPIKE = {"event": "spike", "step": 4, "loss": 9.0, "median": 2.0}
WAITS = {"time_data_wait": 1.0, "seconds": 2.5}
NO_NAME = {"gpu_process_memory_bytes": None}


SLOW_ADAM = {"optim__optimizer": "adamw_torch"}
UNPINNED, NO_TF32 = {"loader__pin_memory": False}, FP32 | {"kernels__tf32": False}
RECOMPUTED = FULL | SMALL_PARTS
BUSY_CARD = {"gpu_memory_bytes": 60 * GIB}
UNPACKED = {"data__packing": "none"}


@each(("name", "says", "steps", "events", "requested", "plan"), [
    ("launch-bound", "ran dry in 100 %", DRY, [], "", {}),
    ("other-process", "14.5 GiB by other", BUSY_CARD, [], "", {}),
    ("other-process", "by other", BUSY_CARD | NO_NAME, [], "", {}),
    ("fp32-on-a-bf16-card", "NVIDIA H200", {}, [], "", FP32),
    ("tf32-off", "you set use_tf32: false", {}, [], "kernels.tf32", NO_TF32),
    # 61.8 GiB: 5, 0.8 of the CUDA context, and 28 times 2
    ("needless-recomputing", "61.8 GiB", {"peak_reserved_bytes": 5 * GIB}, [],
     "kernels.checkpointing", RECOMPUTED),
    ("throttled", "50 %", {"throttled_heat": 0.5}, [], "", {}),
    ("small-micro-batch", "you set micro_batch_size: 1", {"tokens": 5 * 16 * 500}, [],
     "batch.micro_batch", MICRO | SMALL_PARTS),
    ("slow-copies", "you set dataloader_pin_memory: false", SLOW_COPY, [], "loader.pin_memory",
     UNPINNED),
    ("slow-copies", "the device waits 375 ms of 600 ms", PACED_BY_COPIES, [], "", {}),
    ("plain-optimizer", "you set optim: adamw_torch", {"time_optimizer": 0.2}, [],
     "optim.optimizer", SLOW_ADAM),
    ("gpu-unused", "NVIDIA H200 is there", {}, [], "", ON_CPU),
    ("compile-off", "you set torch_compile: false", {"count": 100}, [], "kernels.compile", {}),
    ("too-many-workers", "64 workers on 16 cores", WAITS, [PADDED | {"workers": 64}], "", UNPACKED),
    ("too-few-workers", "4 workers on 16", WAITS, [PADDED], "", UNPACKED),
    ("kernel-fell-back", "no flash", {}, [NO_FLASH], "", {}),
    ("loss-spikes", "1 spikes; the last one to 9 from 2", {}, [SPIKE], "", {}),
    ("below-the-band", "20,000 tokens/s", {"tokens_per_second": 20_000.0}, [], "", {}),
])  # fmt: skip
def test_a_fault_is_named_with_its_evidence(name, says, steps, events, requested, plan):
    lines = step_events(steps.get("count", 12), **steps)
    run = record(
        finished_events(lines, *events), planned((requested,) if requested else (), **plan)
    )
    check_told(name, run, says)


def check_told(name: str, run: RunRecord, says: str) -> None:
    found = found_in(run)[name]
    assert found.severity in ALARMS
    assert says in found.evidence
    assert found.fix
    assert found.consequence


@each(
    ("name", "field", "each_line", "says"),
    [
        ("recompiling", "recompiles", 5, "55 graphs"),
        ("memory-full", "allocator_retries", 4, "44 times"),
    ],
)
def test_growing_counts_are_found(name, field, each_line, says):
    steps = [step | {field: each_line * place} for place, step in enumerate(step_events())]
    check_told(name, record(finished_events(steps)), says)


def test_a_run_that_failed_is_told_with_its_error():
    error = {"event": "failed", "error": "ValueError: a row"}
    check_told("failed", record([*step_events(4), error]), "ValueError: a row")


def test_recomputing_is_left_alone_where_memory_is_short():
    parts = {"activations": 20 * GIB}
    steps = step_events(peak_reserved_bytes=60 * GIB)
    plan = planned(("kernels.checkpointing",), **FULL, memory__parts=parts)
    assert "needless-recomputing" not in found_in(record(finished_events(steps), plan))


def test_a_run_whose_every_step_is_clipped_is_told_and_a_few_are_not():
    plan = planned(optim__max_grad_norm=1.0)
    clipped = found_in(record(finished_events(step_events(20, grad_norm=3.2)), plan))
    assert clipped["always-clipped"].severity == "note"
    assert clipped["always-clipped"].overrides == ("training.config.max_grad_norm=6",)
    some = [*step_events(18, grad_norm=3.0), *step_events(2, grad_norm=0.5)]
    assert "always-clipped" not in found_in(record(finished_events(some), plan))


def preferences(chosen: float, rejected: float, right: float) -> RunRecord:
    """Twelve log lines, in the last of which the answers have this log-probability."""
    steps = [
        step
        | {
            "logps/chosen": -20 + (chosen + 20) * place / 11,
            "logps/rejected": -20 + (rejected + 20) * place / 11,
            "rewards/accuracies": 0.0 if not place else right,
        }
        for place, step in enumerate(step_events())
    ]
    return record(finished_events(steps))


def test_preferred_answers_that_become_less_likely_are_told():
    found = found_in(preferences(-40, -60, 0.7))
    assert found["both-less-likely"].evidence.startswith("the log-probability of preferred answers")
    assert "told-apart-at-once" not in found
    assert "both-less-likely" not in found_in(preferences(-19, -60, 0.7))
    assert "told-apart-at-once" in found_in(preferences(-19, -60, 1.0))


def test_other_holders_are_named_as_the_start_saw_them():
    holders = [{"pid": 7, "name": "python"}, {"pid": 99, "name": "blender"}]
    card = {**H200, "holders": {"value": holders, "source": "NVML"}}
    steps = step_events(gpu_memory_bytes=60 * GIB)
    found = found_in(record(finished_events(steps), gpus=(card,)))["other-process"]
    assert found.evidence.endswith("at the start: blender (pid 99)")


def test_every_rule_is_in_the_table_and_has_a_test():
    written = [
        name.replace("_", "-")
        for file in (course, feeding, kernels, memory)
        for name, function in vars(file).items()
        if getattr(function, "__module__", "") == file.__name__
        and not name.startswith("_")
        and function.__annotations__.get("return") == "Answer"
    ]
    assert sorted(written) == sorted(RULES)
    assert len(RULES) > 30
    tests = Path(__file__).parents[1]
    files = [*tests.glob("insight/test_*.py"), *tests.glob("jobs/**/test_planted*.py")]
    texts = "".join(file.read_text(encoding="utf-8") for file in files)
    assert [name for name in RULES if f'"{name}"' not in texts] == []


# --- a run on a crowded CPU ------------------------------------------------------------------


def test_a_thread_whose_core_is_taken_is_told_and_nobody_calls_that_good():
    """A run was once called good while others used 80 % of two cores."""
    told = {"event": "threads", "step": 0, "threads": 1, "cores": 2, "because": "x"}
    gone = {"gpu_utilization": None, "gpu_memory_bytes": None, "gpu_process_memory_bytes": None}
    steps = step_events(cpu_others=0.8, mfu=None, **gone)
    run = record(finished_events(steps, told), planned(**ON_CPU), gpus=())
    finding, verdict = found_in(run)["busy-cores"], judged(run)
    assert finding.evidence.startswith("1 thread on 2 cores, of which other processes used 1.6")
    assert finding.fix.startswith("stop the other processes")
    assert "good" not in verdict.sentence


@each(("dry", "severity"), [(0.9, "warning"), (0.0, "note")])
def test_beside_a_gpu_cores_that_are_all_taken_are_told(dry, severity):
    steps = step_events(cpu_others=0.99, ran_dry=dry, gpu_utilization=60.0 if dry else 99.0)
    finding = found_in(record(finished_events(steps)))["busy-cores"]
    assert finding.severity == severity
    assert "the device waits where the host has no core" in finding.consequence
    free = record(finished_events(step_events(cpu_others=0.5)))
    assert "busy-cores" not in found_in(free)


ODD: tuple[Any, ...] = ("odd", ["odd", None], {"odd": 1}, [], -1, True)


def test_odd_values_in_the_plan_or_the_machine_of_a_foreign_run_do_no_harm():
    """A run folder may come from anyone, and its files may hold anything."""
    steps = [e | {"allocator_retries": 9 * n} for n, e in enumerate(step_events(100))]
    lines, wrong = finished_events(steps), []
    for odd in ODD:
        plans = {
            f"{part}.{key}": planned(**{f"{part}__{key}": odd})
            for part, values in PLAN.items()
            if isinstance(values, dict)
            for key in {**values, "expected_seconds": 0, "precision": 0}
        }
        runs = {name: record(lines, plan) for name, plan in plans.items()}
        for name in H200:
            gpu = {**H200, name: {"value": odd}}
            runs[f"gpu {name}"] = record(lines, planned(kernels__precision="fp32"), gpus=(gpu,))
        for name, run in runs.items():
            try:
                judged(run)
            except Exception as error:  # noqa: BLE001 - any error is a fault
                wrong.append(f"{name}={odd!r}: {type(error).__name__}: {error}")
    assert "\n".join(wrong) == ""

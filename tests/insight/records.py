"""Runs made up of events and a plan, for what no CPU can show: numbers as a card tells them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from expert.core.events import Event
from expert.insight.findings.evidence import Evidence
from expert.insight.findings.finding import Finding
from expert.insight.findings.table import find
from expert.insight.record import RunRecord
from expert.insight.step.anatomy import dissect

GIB = 2**30
HEALTHY_STEP: Event = {
    # As an H200 told them of a 0.6B model (docs/benchmarks/training-speed-h200.json), an update.
    "updates": 5,
    "loss": 2.0,
    "tokens": 130_000,
    "tokens_per_second": 108_997.0,
    "samples_per_second": 300.0,
    "mfu": 0.2917,
    "padding": 0.02,
    "seconds": 1.4934,
    "grad_norm": 1.0,
    "time_data_wait": 6.6e-6,
    "time_copy": 8.0e-5,
    "time_forward": 0.668,
    "time_backward": 0.821,
    "time_optimizer": 0.0032,
    "time_other": 7.0e-5,
    "time_feed": 0.006,
    "ran_dry": 0.0,
    "gpu_utilization": 100.0,
    "gpu_memory_bytes": 46 * GIB,
    "gpu_process_memory_bytes": 45.5 * GIB,
    "peak_reserved_bytes": 44_436_553_728,
    "power_watts": 690.0,
    "sm_clock_mhz": 1700.0,
    "throttled_power": 0.6,
    "throttled_heat": 0.0,
    "allocator_retries": 0,
    "recompiles": 0,
}
PLAN: dict[str, Any] = {
    "model": {"name": "Qwen/Qwen3-0.6B", "parameters": 596_049_920, "quantization": "none"},
    "adapter": {"type": "lora", "trainable_parameters": 10_092_544},
    "kernels": {
        "device": "cuda",
        "precision": "bf16",
        "tf32": True,
        "attention": "flash",
        "fused_loss": True,
        "compile": False,
        "checkpointing": "none",
        "recomputed_blocks": 0,
    },
    "data": {"max_seq_length": 2048, "packing": "best-fit", "tokenize": "ahead"},
    "batch": {
        "examples_per_update": 100,
        "sequences_per_update": 16,
        "micro_batch": 16,
        "accumulation": 1,
    },
    "loader": {"workers": 0, "prefetch": 4, "pin_memory": True},
    "optim": {"optimizer": "adamw_torch_fused"},
    "length": {
        "epochs": 3.0,
        "max_steps": None,
        "flops_per_token": 2.6e9,
        "peak_flops": 989e12,
        "tokens_per_epoch": 1_000_000,
        "seconds": None,
    },
    "watch": {"logging_steps": 5, "eval_steps": None, "save_steps": None},
    "memory": {
        "budget_bytes": 139 * GIB,
        "peak_bytes": 45 * GIB,
        "parts": {"activations": 38 * GIB, "workspace": 2 * GIB, "loss": GIB},
    },
    "decisions": [],
    "remarks": [],
}
H200: dict[str, Any] = {
    "name": {"value": "NVIDIA H200", "source": "NVML"},
    "memory_total_bytes": {"value": 150_754_820_096, "source": "NVML"},
    "capability": {"value": [9, 0], "source": "NVML"},
    "holders": {"value": [], "source": "NVML"},
}
CPU = {
    "device": "cpu",
    "precision": "fp32",
    "tf32": False,
    "attention": "sdpa",
}


def step_events(count: int = 12, /, *, every: Any = 5, **changes: Any) -> list[Event]:
    """Log lines of a healthy run, with changes; a value of None leaves a field out."""
    fields = {**HEALTHY_STEP, **changes}
    kept = {name: value for name, value in fields.items() if value is not None}
    return [
        {"event": "step", "time": 100.0 + line, "step": every * line, **kept}
        for line in range(1, count + 1)
    ]


def finished_events(steps: list[Event], *others: Event) -> list[Event]:
    """A run with a start and an end around its lines."""
    began: Event = {"event": "started", "time": 90.0, "step": 0, "pid": 7}
    loaded: Event = {"event": "loaded", "time": 99.0, "step": 0, "seconds": 9.0}
    feed: Event = {"event": "feed", "time": 99.0, "step": 0, "kind": "packed", "workers": 0}
    last = steps[-1]["time"] + 1 if steps else 100.0
    return [
        began,
        loaded,
        feed,
        *others,
        *steps,
        {"event": "finished", "time": last, "step": steps[-1]["step"] if steps else 0},
    ]


def planned(asked: tuple[str, ...] = (), /, **changes: Any) -> dict[str, Any]:
    """The plan of a healthy run with values by path; those in `asked` are the manifest's."""
    tree = {name: dict(part) if isinstance(part, dict) else part for name, part in PLAN.items()}
    for path, value in changes.items():
        slice_name, _, key = path.partition("__")
        tree[slice_name][key] = value
    tree["decisions"] = [
        {"path": path, "because": "set in the manifest", "source": "manifest"} for path in asked
    ]
    return tree


def record(
    events: list[Event], plan: dict[str, Any] | None = None, *, gpus: tuple[Any, ...] = (H200,)
) -> RunRecord:
    return RunRecord(
        folder=Path("run"),
        manifest={},
        plan=PLAN if plan is None else plan,
        environment={
            "cuda": "12.8",
            "machine": {"gpus": list(gpus), "cores_available": {"value": 16, "source": "x"}},
        },
        events=tuple(events),
        damaged_lines=0,
        validation=None,
    )


def evidence(run: RunRecord) -> Evidence:
    return Evidence(run=run, anatomy=dissect(run))


def found_in(run: RunRecord) -> dict[str, Finding]:
    return {finding.name: finding for finding in find(evidence(run))}

"""What the events of a short run show: rates over windows of steps, and the loss."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.insight.ladder.ladder import Measured
from expert.planning.memory.workload import CAPTURED_WIDTHS
from expert.run.session.short_run import SETTLING

if TYPE_CHECKING:
    from expert.planning.run_plan import RunPlan

Event = dict[str, Any]
CAPTURE_STEPS = 6
"""Steps: CUDA graphs are captured at the third batch, the optimizer's once its gradients have kept
their addresses for two."""
CAPTURE_STEPS_PER_WIDTH = 8
"""More of them for each width that is captured when it first comes: most come within 30 steps."""


class TooFewSteps(ExpertError):
    """A run that ended before anything could be measured."""


def first_timed_step(plan: RunPlan) -> int:
    """Steps before the first timed one: they compile, fill caches and capture graphs."""
    if not plan.kernels.cuda_graphs:
        return SETTLING
    return CAPTURE_STEPS + CAPTURE_STEPS_PER_WIDTH * (CAPTURED_WIDTHS if plan.data.flat else 0)


def measured_of(
    plan: RunPlan,
    events: list[Event],
    judged: Event | None,
    first: int,
    *,
    window: float,
    rows: int,
) -> Measured:
    """What the events of a run show: rates over windows of steps after the first ones, and the loss
    of one evaluation."""
    steps = [event for event in events if event["event"] == "step"]
    timed = [event for event in steps if event["step"] > first]
    if not timed:
        raise TooFewSteps("the run ended before a step could be timed")

    def mean(key: str) -> float | None:
        known = [event[key] for event in timed if event.get(key) is not None]
        return statistics.fmean(known) if known else None

    rates, tokens, seconds = [], 0, 0.0
    for event in timed:
        tokens, seconds = tokens + event["tokens"], seconds + event["seconds"]
        if seconds >= window:
            rates.append(tokens / seconds)
            tokens, seconds = 0, 0.0
    if not rates:  # too fast for a whole window
        rates = [tokens / seconds]
    total = sum(event["seconds"] for event in timed)
    updates = sum(event["updates"] for event in timed)
    samples = sum(event["examples"] for event in timed) / total
    fell_back = [event for event in events if event["event"] == "fell_back"]
    sizes = [
        c["value"] for e in fell_back for c in e["changes"] if c["path"] == "batch.micro_batch"
    ]
    micro_batch = int(sizes[-1]) if sizes else plan.batch.micro_batch
    peaks = [event["peak_reserved_bytes"] for event in steps if event.get("peak_reserved_bytes")]
    peaks = peaks or [e["cpu_peak_memory_bytes"] for e in steps if e.get("cpu_peak_memory_bytes")]
    low, middle, high = (
        statistics.quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else rates * 3
    )
    return Measured(
        tokens_per_second=middle,
        windows=rates,
        spread=high - low,
        samples_per_second=samples,
        seconds_per_update=total / updates,
        seconds_per_epoch=rows / samples,
        gpu_utilization=mean("gpu_utilization"),
        peak_memory_bytes=max(peaks, default=None),
        mfu=mean("mfu"),
        padding=mean("padding"),
        data_wait=mean("data_wait"),
        examples_per_update=sum(event["examples"] for event in timed) / updates,
        updates_measured=updates,
        updates_learnt=judged["step"] if judged is not None else timed[-1]["step"],
        compile_seconds=next((e["seconds"] for e in events if e["event"] == "compiled"), None),
        loss=judged["loss"] if judged is not None and type(judged["loss"]) is float else None,
        micro_batch=micro_batch,
        accumulation=plan.batch.accumulation or 1,
        fallbacks=[str(event.get("reason", "")) for event in fell_back],
    )

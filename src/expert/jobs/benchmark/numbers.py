"""What was measured of a setting: its windows, and what the log lines of its run add to them."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from expert.jobs.benchmark.processes import Window
from expert.telemetry.cpu import peak_memory_bytes

if TYPE_CHECKING:
    from expert.data.feed.order import DataOrder
    from expert.data.pack.pack_index import PackIndex
    from expert.planning.run_plan import RunPlan
    from expert.run.session.session import Session

FIRST_STEPS = 3
"""Not settled: they compile and fill caches."""


def numbers_of(
    run: Session, events: list[dict[str, Any]], windows: list[Window], trained: int
) -> dict[str, Any]:
    """The fields of `Measured`, but for the loss; `trained`: steps before the loss was judged."""
    steps = _steady(events, windows, trained)
    plan, train, order = run.plan, run.data.train, run.data.order
    assert train is not None
    assert order is not None
    rates = [window.rate for window in windows]
    speed = statistics.median(rates)
    samples = statistics.median(window.examples / window.seconds for window in windows)
    used = [w.gpu_percent for w in windows if w.gpu_percent is not None]
    waited, lasted = (sum(e.get(key) or 0 for e in steps) for key in ("time_data_wait", "seconds"))
    mfu, because = _mfu(plan, speed)
    return {
        "tokens_per_second": speed,
        "windows": rates,
        "samples_per_second": samples,
        "seconds_per_update": statistics.median(w.seconds / w.steps for w in windows),
        "seconds_per_epoch": train.index.examples / samples,
        "gpu_utilization": statistics.fmean(used) if used else None,
        "peak_memory_bytes": _peak_memory([e for e in events if (e.get("step") or 0) <= trained]),
        "mfu": mfu,
        "mfu_because": because,
        "padding": _share(steps, "padding"),
        "data_wait": min(1.0, waited / lasted) if lasted else None,
        "examples_per_update": train.index.examples * order.bins_per_update / order.count,
        "updates_measured": sum(window.steps for window in windows),
        "updates_before": windows[0].first,
        "updates_learnt": trained,
        "others": statistics.median(window.others for window in windows),
        "compile_seconds": next((e["seconds"] for e in events if e["event"] == "compiled"), None),
        "micro_batch": plan.batch.micro_batch,
        "accumulation": plan.batch.accumulation or 1,
        "fallbacks": [str(e.get("reason", "")) for e in events if e["event"] == "fell_back"],
        "training_rows": train.index.examples,
        "clumping": _clumping(train.index, order),
    }


def _clumping(index: PackIndex, order: DataOrder) -> float | None:
    """Whether rows of one length share steps."""
    import numpy as np

    from expert.data.feed.order import clumping

    steps = np.repeat(order.step_of_bins(), np.diff(index.bin_offsets))
    return clumping(index.piece_stop - index.piece_start, steps)


def _steady(
    events: list[dict[str, Any]], windows: list[Window], trained: int
) -> list[dict[str, Any]]:
    """Log lines that lie inside a window, without its first step, which waited for the window to
    start. Where windows are too short for any, those before the loss was judged, without the first
    steps."""
    lines = [event for event in events if event["event"] == "step"]
    inside = [
        line
        for line in lines
        for window in windows
        if window.first + 1 <= line["step"] - (line.get("updates") or 1)
        and line["step"] <= window.first + window.steps
    ]
    before = [line for line in lines if line["step"] <= trained]
    return inside or [line for line in before if line["step"] >= FIRST_STEPS] or before


def _share(steps: list[dict[str, Any]], key: str) -> float | None:
    known = [event for event in steps if event.get(key) is not None]
    weight = sum(event.get("updates") or 1 for event in known)
    total = float(sum(e[key] * (e.get("updates") or 1) for e in known))
    return total / weight if weight else None


def _mfu(plan: RunPlan, tokens_per_second: float) -> tuple[float | None, str]:
    why = {decision.path: decision.because for decision in plan.decisions}
    flops, peak = plan.length.flops_per_token, plan.length.peak_flops
    if peak is None or flops is None:
        unknown = "peak_flops" if peak is None else "flops_per_token"
        return None, why.get(f"length.{unknown}", "unknown")
    return tokens_per_second * flops / peak, ""


def _peak_memory(events: list[dict[str, Any]]) -> int | None:
    """Of the card as the allocator holds it before the loss is judged; on a CPU of the process."""
    held = [e["peak_reserved_bytes"] for e in events if e.get("peak_reserved_bytes") is not None]
    return int(max(held)) if held else peak_memory_bytes()

"""Results of a setting: its windows, values from its log lines, and its loss on the held-out rows,
evaluated the same way for all settings."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from expert.jobs.benchmark.processes import Job, Window
from expert.manifest.schema.manifest import CHAR_GPT
from expert.run.build import build
from expert.telemetry.cpu import peak_memory_bytes

if TYPE_CHECKING:
    from expert.data.feed.order import DataOrder
    from expert.data.feed.run_data import RunData
    from expert.data.pack.pack_index import PackIndex
    from expert.data.prepared import PreparedSplit
    from expert.parallel.engine import Groups
    from expert.planning.run_plan import RunPlan
    from expert.run.session.session import Session
    from expert.training.evaluation import EvalSums

FIRST_STEPS = 3
"""Warm-up: they compile and fill caches."""


def measured_fields(
    run: Session, events: list[dict[str, Any]], windows: list[Window], trained: int
) -> dict[str, Any]:
    """The fields of `Measured` except the loss; `trained`: steps before the loss was evaluated."""
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
        "examples_per_update": train.index.examples * order.bins_per_step / order.count,
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
    """Log lines inside a window, without its first step, which waited for the window to start. If
    windows are too short for any, the lines before the loss was evaluated, without warm-up."""
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
    """GPU memory reserved before the loss is evaluated; on a CPU the process's RAM."""
    held = [e["peak_reserved_bytes"] for e in events if e.get("peak_reserved_bytes") is not None]
    return int(max(held)) if held else peak_memory_bytes()


# --- the loss ------------------------------------------------------------------------------------

BECAUSE = "all settings are judged in the same way"


def judged(run: Session, weights: Groups, job: Job) -> dict[str, Any]:
    """Loss of the weights on the first held-out rows: not packed, SDPA, nothing compiled. With
    `own_loss_too` also as the setting trains. The model is built again next to the trained one."""
    if run.data.validation is None:
        return {"loss": None, "held_out_rows": 0, "held_out_tokens": 0}
    own = {
        # Whether these compute the same is a setting of its own.
        "kernels.compile": False,
        "kernels.fused_blocks": False,
        "kernels.loss_scaling": False,
        "kernels.checkpointing": "none",
    }
    common = {
        "data.packing": "none",
        "kernels.attention": "sdpa",
        "kernels.fused_loss": True,
        "kernels.precision": job.eval_precision,
    }
    sums = _evaluated(run.plan.with_values(own | common, BECAUSE, "preset"), run, weights, job)
    found = {
        "loss": _mean(sums),
        "held_out_rows": sums.examples,
        "held_out_tokens": sums.weight,
    }
    if job.own_loss_too:
        other = _evaluated(run.plan.with_values(own, BECAUSE, "preset"), run, weights, job)
        found["own_loss"] = _mean(other)
    return found


def _mean(sums: EvalSums) -> float | None:
    """None also if not finite: JSON cannot hold that, and it agrees with nothing."""
    loss = sums.sums["loss"].item() / sums.weight if sums.weight else math.nan
    return loss if math.isfinite(loss) else None


def _evaluated(plan: RunPlan, run: Session, weights: Groups, job: Job) -> EvalSums:
    """Evaluate the held-out rows under a plan, with a temporary model."""
    from itertools import islice

    from expert.data.feed.run_data import split_batches
    from expert.training.evaluation import evaluate
    from expert.training.objectives.next_token import NextToken

    split, rows, batches_of = _held_out(plan, run.data, job.pace.held_out)
    built = build(plan, run.data.encoder, device=run.device)
    built.load(weights)
    built.loaded.module.eval()
    with split_batches(plan, split, rows=rows, device=run.device) as batches:
        sums = evaluate(built.engine, NextToken(), islice(batches, batches_of))
    assert sums is not None
    return sums


def _held_out(plan: RunPlan, data: RunData, most: int) -> tuple[PreparedSplit, int, int]:
    """The first validation rows as the plan lays them out, the batch size, and the batch count."""
    import numpy as np

    from expert.data.pack.pack import pack_best_fit, pack_none

    split = data.validation
    assert split is not None
    rows = max(1, min(8, plan.batch.eval_batch, most))
    if plan.model.name == CHAR_GPT:  # blocks of one document, not rows
        return split, rows, math.ceil(min(most, split.index.bins) / rows)
    documents = np.unique(split.index.piece_document)[:most]
    lengths = split.open().lengths[documents]
    soft, overlong = split.index.soft_tokens, plan.data.overlong
    length = plan.data.max_seq_length
    if plan.is_padded:
        index = pack_none(lengths, length, overlong=overlong, soft_tokens=soft)
    else:
        index = pack_best_fit(lengths, length, 0, overlong=overlong, soft_tokens=soft)
    index = replace(index, piece_document=documents[index.piece_document].astype("int32"))
    return replace(split, index=index), rows, math.ceil(index.bins / rows)

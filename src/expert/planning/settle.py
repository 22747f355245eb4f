"""Settles a plan by its data: counts that were estimates until the rows were prepared or read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from expert.core.errors import ManifestError, Problem
from expert.manifest.schema.kinds import SCHEDULES
from expert.planning.choose.expected_time import scaled, total_range
from expert.planning.choose.length import MAX_STEPS, max_steps_not_reached
from expert.planning.choose.parallel import RANKS_PATH, too_few_sequences
from expert.planning.choose.sanity import sanity_warnings
from expert.planning.decisions import Remark
from expert.planning.memory.calibration import Calibrations
from expert.planning.memory.fitting import even_split, max_micro_batch
from expert.planning.run_plan import LengthPlan, RunPlan


@dataclass(frozen=True, kw_only=True)
class PackedCounts:
    """Packed training rows, and the steps they make."""

    rows: int
    sequences: int
    length: int
    """Positions in a sequence."""
    tokens: int
    """In all sequences together."""
    sequences_per_step: int
    steps_per_epoch: int
    steps: int
    """Over all epochs of the plan."""


def with_counted_rows(plan: RunPlan, counted: PackedCounts, known: Calibrations) -> RunPlan:
    """The plan with the counts of the prepared rows; `known`: memory measured by earlier runs on
    the card."""
    total = counted.steps
    plan = _with_remark_on_max_steps(plan, total)
    if plan.length.max_steps:
        total = min(total, plan.length.max_steps)
    values: dict[str, Any] = {
        "data.sequence_length": counted.length,
        "length.tokens_per_epoch": counted.tokens,
        "length.steps_per_epoch": counted.steps_per_epoch,
        "length.total_steps": total,
    }
    rate = plan.length.tokens_per_second
    if rate is not None:
        values["length.seconds"] = counted.tokens * total / counted.steps_per_epoch / rate
    most = plan.batch.micro_batch
    if _source_of(plan, "batch.micro_batch") == "machine":
        as_packed = plan.with_values({"data.sequence_length": counted.length}, "", "measurement")
        most = max_micro_batch(as_packed, known, plan.parallel.share_of(counted.sequences_per_step))
    values |= _batches_of(plan, counted.sequences_per_step, most)
    changed = {path: value for path, value in values.items() if attrgetter(path)(plan) != value}
    because = f"prepared: {counted.rows:,} rows in {counted.sequences:,} sequences"
    before, doubted = plan.length, _doubts(plan)
    plan = plan.with_values(changed, because, "measurement") if changed else plan
    others = tuple(remark for remark in plan.remarks if remark not in doubted)
    plan = plan.model_copy(update={"remarks": (*others, *_doubts(plan))})
    return _with_time_of(_with_idle_ranks(plan), before)


def _doubts(plan: RunPlan) -> list[Remark]:
    return sanity_warnings(lambda path: attrgetter(path)(plan), plan.length.total_steps)


def with_stream_rows(plan: RunPlan, sequences: int) -> RunPlan:
    """The plan with the sequences per step from the first rows of a stream: larger micro-batches
    would be partly empty."""
    values = _batches_of(plan, sequences, plan.batch.micro_batch)
    return _with_idle_ranks(plan.with_values(values, "the first rows of the stream", "measurement"))


def _with_idle_ranks(plan: RunPlan) -> RunPlan:
    """The plan with the warning about idle ranks based on its actual steps."""
    sequences, rows = plan.batch.sequences_per_update, plan.batch.examples_per_update
    remarks = tuple(remark for remark in plan.remarks if remark.path != RANKS_PATH)
    fewer = too_few_sequences(plan.parallel.ranks, sequences, rows) if sequences else None
    return plan.model_copy(update={"remarks": (*remarks, fewer) if fewer else remarks})


def _with_time_of(plan: RunPlan, before: LengthPlan) -> RunPlan:
    """The plan with its expected time scaled to the actual number of tokens."""
    old, new = _tokens_of(before), _tokens_of(plan.length)
    parts = plan.length.expected_parts
    if not parts or not old or not new or old == new:
        return plan
    decision = next(entry for entry in plan.decisions if entry.path == "length.expected_seconds")
    now = scaled(parts, new / old)
    values = {
        "length.expected_seconds": total_range(now),
        "length.expected_parts": now,
    }
    return plan.with_values(values, decision.because, decision.source)


def _tokens_of(length: LengthPlan) -> float | None:
    if not length.tokens_per_epoch or not length.steps_per_epoch or not length.total_steps:
        return None
    return length.tokens_per_epoch * length.total_steps / length.steps_per_epoch


def _with_remark_on_max_steps(plan: RunPlan, steps: int) -> RunPlan:
    """The plan with the max_steps warning based on the actual steps of the epochs instead of an
    estimate."""
    limit, epochs = plan.length.max_steps, plan.length.epochs
    others = tuple(remark for remark in plan.remarks if remark.path != MAX_STEPS)
    if limit and limit > steps:
        others = (*others, max_steps_not_reached(limit, updates=steps, epochs=epochs))
    return plan.model_copy(update={"remarks": others})


def _batches_of(plan: RunPlan, sequences: int, most: int) -> dict[str, int]:
    """How a rank's sequences of a step are divided into micro-batches of at most `most`; the
    manifest's size is kept, but never exceeds the number of sequences."""
    share = plan.parallel.share_of(sequences)
    micro = min(plan.batch.micro_batch, share)
    if _source_of(plan, "batch.micro_batch") != "manifest":
        micro, _ = even_split(share, most, on_gpu=plan.kernels.device == "cuda")
    return {
        "batch.sequences_per_update": sequences,
        "batch.micro_batch": micro,
        "batch.accumulation": math.ceil(share / micro),
    }


def _source_of(plan: RunPlan, path: str) -> str:
    """The source of a plan value."""
    return next((entry.source for entry in plan.decisions if entry.path == path), "machine")


def with_endless_schedule(plan: RunPlan) -> RunPlan:
    """The plan with a schedule that works if the last step is unknown.

    A constant rate replaces a default schedule; one from the manifest is kept and needs max_steps.
    """
    if plan.length.total_steps is not None:
        return plan
    optim, because = plan.optim, "the number of steps is not known; set max_steps"
    needs_end = SCHEDULES[optim.scheduler].needs_end
    asked = [
        f"training.config.{name}"
        for name, path, needs in (
            ("lr_scheduler", "optim.scheduler", needs_end),
            ("warmup_ratio", "optim.warmup_ratio", optim.warmup_ratio is not None),
        )
        if needs and _source_of(plan, path) == "manifest"
    ]
    if asked:
        what = "needs the total number of steps, which a stream does not have"
        fix = "set training.config.max_steps"
        raise ManifestError(plan.expert, [Problem(path, what, fix) for path in asked])
    values: dict[str, Any] = {}
    if needs_end:
        values |= {"optim.scheduler": "constant", "optim.scheduler_options": {}}
    if optim.warmup_ratio is not None:
        values["optim.warmup_ratio"] = None
    return plan.with_values(values, because, "machine") if values else plan

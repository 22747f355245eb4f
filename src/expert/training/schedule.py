"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from expert.planning.run_plan import OptimPlan

# Where a cosine reaches zero on an actual step (whole waves), this fraction of the peak remains. A
# cosine over a million steps ends at 2.5e-12 of its peak, so no usual schedule is affected.
LEAST_SHARE_OF_PEAK = 1e-12
DEFAULT_COSINE_WAVES = 0.5  # once from the peak down to the floor
DEFAULT_RESTARTS = 1.0
DEFAULT_POWER = 1.0
DEFAULT_POLYNOMIAL_END = 1e-7  # as in transformers
ROLLBACK_FACTOR = 0.5
REWARM_SHARE, LEAST_REWARM_STEPS, MOST_REWARM_STEPS = 0.1, 5, 100
_OF_ROLLBACKS = ("rate_factor", "restart_warmup_at", "restart_warmup_steps")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning-rate curve of a run, including changes by rollbacks."""

    kind: str
    peak: float
    warmup_steps: int
    total_steps: int
    options: Mapping[str, float] = field(default_factory=dict)
    rate_factor: float = 1.0
    """Multiplies every rate; below one after a rollback."""
    restart_warmup_at: int | None = None
    """The step at which the warm-up after a rollback starts."""
    restart_warmup_steps: int = 0


def schedule_of(plan: OptimPlan, total_steps: int) -> Schedule:
    """A plan's schedule for a run of `total_steps` steps; a warm-up ratio is rounded up."""
    warmup = plan.warmup_steps or 0
    if plan.warmup_ratio is not None:
        # 0.07 * 100 is 7.000000000000001 in floating point and should be seven.
        warmup = math.ceil(plan.warmup_ratio * total_steps - 1e-9)
    return Schedule(
        kind=plan.scheduler,
        peak=plan.learning_rate,
        warmup_steps=warmup,
        total_steps=total_steps,
        options=dict(plan.scheduler_options),
    )


def rollbacks_of(schedule: Schedule) -> dict[str, Any]:
    """Changes by rollbacks, for a checkpoint; the rest comes from the plan, which may change."""
    return {name: getattr(schedule, name) for name in _OF_ROLLBACKS}


def with_rollbacks(schedule: Schedule, record: Mapping[str, Any]) -> Schedule:
    """A plan's schedule with the changes saved by `rollbacks_of`."""
    return replace(schedule, **{name: record[name] for name in _OF_ROLLBACKS if name in record})


def after_rollback(schedule: Schedule, *, at: int) -> Schedule:
    """The same curve, lower, with a warm-up again that starts at `at`: a tenth of the steps to go,
    as a hundred in a run of 120 would leave nothing to train with."""
    share = round(REWARM_SHARE * (schedule.total_steps - at))
    return replace(
        schedule,
        rate_factor=schedule.rate_factor * ROLLBACK_FACTOR,
        restart_warmup_at=at,
        restart_warmup_steps=min(max(share, LEAST_REWARM_STEPS), MOST_REWARM_STEPS),
    )


def learning_rate(step: int, schedule: Schedule) -> float:
    """The rate of the next step; `step` counts from 0."""
    rate = _planned_rate(step, schedule) * schedule.rate_factor
    if schedule.restart_warmup_at is None:
        return rate
    risen = step - schedule.restart_warmup_at + 1
    if not 0 < risen < schedule.restart_warmup_steps:
        return rate
    return rate * risen / schedule.restart_warmup_steps


def _planned_rate(step: int, schedule: Schedule) -> float:
    """The rate without rollbacks; past the last step it stays constant."""
    warmup, total, peak = schedule.warmup_steps, schedule.total_steps, schedule.peak
    if step >= total:
        return max(_decayed(1.0, schedule), LEAST_SHARE_OF_PEAK * peak)
    if step < warmup:
        return peak * ((step + 1) / warmup)
    # The last step is at (n - 1) / n: only the one after it would reach the floor.
    done = (step - warmup) / (total - warmup)
    return max(_decayed(done, schedule), LEAST_SHARE_OF_PEAK * peak)


def _decayed(done: float, schedule: Schedule) -> float:
    """The rate after this fraction, 0 to 1, of the steps that follow the warm-up."""
    peak, options = schedule.peak, schedule.options
    share: float
    if schedule.kind == "constant":
        return peak
    if schedule.kind == "linear":
        return peak * (1.0 - done)
    if schedule.kind == "polynomial":
        floor = min(options.get("lr_end", DEFAULT_POLYNOMIAL_END), peak)
        share = (1.0 - done) ** options.get("power", DEFAULT_POWER)
    elif schedule.kind == "cosine":
        floor = min(options.get("min_lr", 0.0), peak)
        waves = options.get("num_cycles", DEFAULT_COSINE_WAVES)
        share = _half_wave(2.0 * waves * done)
    elif schedule.kind == "cosine_with_restarts":
        floor = min(options.get("min_lr", 0.0), peak)
        restarts = options.get("num_cycles", DEFAULT_RESTARTS)
        share = 0.0 if done >= 1.0 else _half_wave(restarts * done % 1.0)
    else:
        raise ValueError(f"lr_scheduler: {schedule.kind} is not known")
    return min(peak, floor + (peak - floor) * share)


def _half_wave(turns: float) -> float:
    """A cosine between 1 (at 0, 2, ...) and 0 (at 1, 3, ...)."""
    return 0.5 * (1.0 + math.cos(math.pi * turns))

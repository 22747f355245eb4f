"""The result of a setting: what was measured, compared with what, and its status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from expert.insight.ladder.ladder import Measured, SettingResult, Status, difference, verdict
from expert.planning.benchmark_settings import (
    BASELINE,
    THE_REST,
    Setting,
    SettingContext,
    changes,
    cost_of,
    plan_hash,
    tolerance,
    why_not_comparable,
)

if TYPE_CHECKING:
    from expert.insight.ladder.pairs import Paired
    from expert.jobs.benchmark.compare import Timed
    from expert.planning.run_plan import RunPlan

ROWS_PER_STEP_TOLERANCE = 0.02
"""Tolerance for the rows of a step relative to the other settings."""


@dataclass(frozen=True, kw_only=True)
class KeptSettings:
    """The settings kept so far; the next one is compared with them."""

    ground: SettingContext
    values: dict[str, Any]
    """Keys of training.config."""
    plan: RunPlan | None = None
    result: SettingResult | None = None
    gains: dict[str, float] = field(default_factory=dict)
    timed: Timed | None = None
    """None if nothing could be measured yet."""


def notes_on(results: Sequence[SettingResult], planned: int) -> list[str]:
    """Which settings were measured together, or had different rows per step than `planned`."""
    said: dict[str, list[str]] = {}
    for result in results:
        if result.measured is None:
            continue
        rows = result.measured.examples_per_update
        # The average number of rows in packed sequences is rarely a whole number.
        if abs(rows - planned) > max(0.5, ROWS_PER_STEP_TOLERANCE * planned):
            said.setdefault(f"{rows:.1f} rows a step, not {planned}", []).append(result.name)
        elif result.same_rows is False:
            said.setdefault(f"{rows:.1f} rows a step on average, in different batches", []).append(
                result.name
            )
    rest = [f"{one.name}: {one.adds}" for one in results if one.name == THE_REST]
    return [*rest, *(f"{', '.join(names)}: {words}" for words, names in said.items())]


def judged(
    kept_settings: KeptSettings,
    setting: Setting,
    plan: RunPlan,
    here: Measured,
    paired: Paired | None,
    seconds: float,
) -> SettingResult:
    """The status of a measured setting."""
    before, below = kept_settings.plan, kept_settings.result
    if paired is None or below is None or below.measured is None or before is None:
        cumulative = 1.0 if setting is BASELINE else None
        more: dict[str, Any] = {"measured": here, "cumulative": cumulative}
        return result_of(kept_settings, setting, "kept", "", plan, seconds, **more)
    allowed, because = tolerance(before, plan)
    reason, cost = why_not_comparable(before, plan), cost_of(before, plan)
    status, why = verdict(
        below.measured, here, allowed, paired=paired, cost=cost, comparable=not reason
    )
    return result_of(
        kept_settings,
        setting,
        status,
        why,
        plan,
        seconds,
        measured=here,
        below=below.name,
        gain=paired.gain,
        paired=paired,
        cumulative=cumulative_speedup(below.cumulative, paired.gain, status),
        loss_difference=difference(here.loss, below.measured.loss),
        own_difference=difference(here.own_loss, here.loss) if reason else None,
        tolerance=allowed,
        tolerance_because=f"{reason}: judged by its own loss" if reason else because,
        same_rows="data.packing" not in changes(before, plan),
    )


def cumulative_speedup(below: float | None, gain: float, status: Status) -> float | None:
    """Speedup over the baseline. A setting without a measured difference counts as 1: windows that
    look faster end the timing while others are timed longer, so that the gains of settings that
    change nothing multiply to more than 1. For seven settings on two cores the product was 2.6,
    where 1.6 was measured against the baseline."""
    if below is None:
        return None
    return below if status == "no difference" else below * gain


def result_of(
    kept_settings: KeptSettings,
    setting: Setting,
    status: Status,
    because: str,
    plan: RunPlan | None = None,
    seconds: float = 0.0,
    **more: Any,
) -> SettingResult:
    before = kept_settings.plan
    return SettingResult(
        name=setting.name,
        adds=setting.adds,
        status=status,
        because=because,
        changes=changes(before, plan) if before is not None and plan is not None else {},
        settings=setting.values(kept_settings.ground),
        plan_hash=plan_hash(plan) if plan is not None else "",
        seconds=seconds,
        **more,
    )

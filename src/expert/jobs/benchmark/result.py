"""A climb as a result: what was measured, on what, and whether it is to be relied on."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from expert.insight.ladder.doubts import doubts_of
from expert.planning.ladder import BASELINE, THE_REST, Rung, changes, cost_of, plan_hash, tolerance

if TYPE_CHECKING:
    from expert.insight.ladder.ladder import Ladder, RungResult, Status
    from expert.insight.ladder.pairs import Paired
    from expert.jobs.benchmark.climbing import Climb
    from expert.jobs.benchmark.rig import Seen
    from expert.planning.run_plan import RunPlan

SAME_ROWS_AN_UPDATE = 0.02
"""How far the rows of an update may be from those of the other rungs, as a share."""


def ladder_of(climb: Climb, environment: Mapping[str, Any]) -> Ladder:
    """What was found so far."""
    from expert.core.version import __version__
    from expert.insight.ladder.ladder import Ladder

    top, counts = climb.top, climb.counts
    ladder = Ladder(
        name=top.expert,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=climb.asked.command,
        version=__version__,
        card=top.target,
        device=top.kernels.device,
        model=top.model.name,
        parameters=top.model.parameters,
        adapter=top.adapter.type,
        quantization=top.model.quantization,
        dataset=str(top.data.dataset.get("path") or "several tasks"),
        training_rows=counts.get("training_rows", 0),
        max_seq_length=top.data.max_seq_length,
        examples_per_update=climb.footing.examples,
        held_out_rows=counts.get("held_out_rows", 0),
        held_out_tokens=counts.get("held_out_tokens", 0),
        quick=climb.asked.quick,
        seconds=climb.time.elapsed,
        environment=dict(environment),
        notes=[*climb.footing.notes, *_what_the_rest_is(climb), *_rows_an_update(climb)],
        rungs=climb.results,
        against_baseline=climb.against_baseline,
    )
    return ladder.model_copy(update={"doubts": doubts_of(ladder)})


def _what_the_rest_is(climb: Climb) -> list[str]:
    return [f"{one.name}: {one.adds}" for one in climb.results if one.name == THE_REST]


def _rows_an_update(climb: Climb) -> list[str]:
    """Whether every rung had as many rows in an update, and which did not."""
    planned = climb.footing.examples
    said: dict[str, list[str]] = {}
    for result in climb.results:
        if result.measured is None:
            continue
        rows = result.measured.examples_per_update
        # Packed sequences hold a number of rows on average that is seldom a whole one.
        if abs(rows - planned) > max(0.5, SAME_ROWS_AN_UPDATE * planned):
            said.setdefault(f"{rows:.1f} rows an update, not {planned}", []).append(result.name)
        elif result.same_rows is False:
            said.setdefault(f"{rows:.1f} rows an update on average, other ones", []).append(
                result.name
            )
    return [f"{', '.join(names)}: {words}" for words, names in said.items()]


def judged(
    climb: Climb,
    rung: Rung,
    plan: RunPlan,
    seen: Seen,
    paired: Paired | None,
    seconds: float,
) -> RungResult:
    """What becomes of a rung that was measured."""
    from expert.insight.ladder.ladder import loss_difference, own_difference, verdict

    here, below = seen.measured, climb.standing.result
    if paired is None or below is None or below.measured is None or climb.standing.plan is None:
        alone = {"cumulative": 1.0 if rung is BASELINE else None}
        return result_of(climb, rung, "kept", "", plan, seconds, measured=here, **alone)
    before = climb.standing.plan
    allowed, because = tolerance(before, plan)
    reason = climb.not_comparable(plan)
    status, why = verdict(
        below.measured,
        here,
        allowed,
        paired=paired,
        cost=cost_of(before, plan),
        comparable=not reason,
    )
    return result_of(
        climb,
        rung,
        status,
        why,
        plan,
        seconds,
        measured=here,
        below=below.name,
        gain=paired.gain,
        paired=paired,
        cumulative=in_all(below.cumulative, paired.gain, status),
        loss_difference=loss_difference(below.measured, here),
        own_difference=own_difference(here) if reason else None,
        tolerance=allowed,
        tolerance_because=f"{reason}: held to itself" if reason else because,
        same_rows="data.packing" not in changes(before, plan),
    )


def in_all(below: float | None, gain: float, status: Status) -> float | None:
    """Times as fast as the baseline. A rung of which no difference was measured counts for nothing:
    of those that change nothing, windows that looked faster end the timing and others are looked at
    longer, so that their gains come to more than 1. Of seven rungs on two cores they came to 2.6
    in all, where 1.6 was measured against the baseline."""
    if below is None:
        return None
    return below if status == "no difference" else below * gain


def result_of(
    climb: Climb,
    rung: Rung,
    status: Status,
    because: str,
    plan: RunPlan | None,
    seconds: float,
    **more: Any,
) -> RungResult:
    """A rung as it is told, measured or not."""
    from expert.insight.ladder.ladder import RungResult

    before = climb.standing.plan
    return RungResult(
        name=rung.name,
        adds=rung.adds,
        status=status,
        because=because,
        changes=changes(before, plan) if before is not None and plan is not None else {},
        settings=rung.values(climb.footing.ground),
        plan_hash=plan_hash(plan) if plan is not None else "",
        seconds=seconds,
        **more,
    )

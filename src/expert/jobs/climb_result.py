"""A climb as a result: what was measured, on what, and whether it is to be relied on."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from expert.insight.doubts import doubts_of

if TYPE_CHECKING:
    from expert.insight.ladder import Ladder
    from expert.jobs.climbing import Climb

SAME_ROWS_AN_UPDATE = 0.02
"""How far the rows of an update may be from those of the other rungs, as a share."""


def ladder_of(climb: Climb, environment: Mapping[str, Any]) -> Ladder:
    """What was found so far."""
    from expert import __version__
    from expert.insight.ladder import Ladder

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
        notes=[*climb.footing.notes, *_rows_an_update(climb)],
        rungs=climb.results,
        against_baseline=climb.against_baseline,
    )
    return ladder.model_copy(update={"doubts": doubts_of(ladder)})


def _rows_an_update(climb: Climb) -> list[str]:
    """Whether every rung had as many rows in an update, and which did not."""
    planned, said = climb.footing.examples, []
    for result in climb.results:
        if result.measured is None:
            continue
        rows = result.measured.examples_per_update
        # Packed sequences hold a number of rows on average that is seldom a whole one.
        if abs(rows - planned) > max(0.5, SAME_ROWS_AN_UPDATE * planned):
            said.append(f"{result.name}: {rows:.1f} rows an update, not {planned}")
        elif result.same_rows is False:
            said.append(f"{result.name}: {rows:.1f} rows an update on average, other ones")
    return said

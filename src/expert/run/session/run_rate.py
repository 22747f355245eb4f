"""The rate of a finished run, remembered for the plans of runs like it."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expert.insight.findings.evidence import Evidence
    from expert.planning.measurements import MeasuredRate
    from expert.run.session.session import Session

LEAST_UPDATES = 20
LEAST_SECONDS = 10.0
"""Of settled steps: what is shorter says little, and nobody waits for it."""


def remember_run(session: Session) -> None:
    """Let later plans count on what this run reached. Only the rate: its settings were compared
    with nothing."""
    from expert.insight.findings.evidence import Evidence
    from expert.insight.record import read_run
    from expert.insight.step.anatomy import dissect
    from expert.planning.measurements import measurements_file, remember_rate

    run = read_run(session.folder.path)
    reached = settled_rate(Evidence(run=run, anatomy=dissect(run)))
    rate = _measured(session, reached) if reached is not None else None
    if rate is None:
        return
    try:
        remember_rate(measurements_file(), rate)
    except OSError as error:
        session.emit("warning", text=f"the rate was not remembered: {error.strerror}")


def settled_rate(found: Evidence) -> float | None:
    """Tokens a second of a run that went its way undisturbed and long enough; else None."""
    step = found.step
    if step is None or not step.settled or step.updates < LEAST_UPDATES:
        return None
    # What fell back was made with two settings, what was resumed perhaps on two machines.
    disturbed = found.run.of("fell_back") or found.run.of("resumed") or found.had_neighbours
    if disturbed or step.updates * step.wall < LEAST_SECONDS:
        return None
    return step.tokens_per_second


def _measured(session: Session, reached: float) -> MeasuredRate | None:
    """The record; None where the rows are not counted, or somebody else was on the card."""
    from expert.planning.machine.machine import describe_machine
    from expert.planning.machine.target import choose_target
    from expert.planning.measurements import MeasuredRate, speed_settings
    from expert.planning.models.resolve import basename

    plan = session.plan
    rows, tokens = plan.length.rows, plan.length.tokens_per_epoch
    shared = any(remark.path == "memory.budget_bytes" for remark in plan.remarks)
    if not rows or not tokens or shared or plan.data.tokenize == "late":
        return None
    machine = session.start.machine or describe_machine(session.folder.path)
    target = choose_target(machine, vram=session.start.vram, device=plan.kernels.device)
    settled = {each.path: each for each in plan.decisions}
    on_gpu = target.device == "cuda"
    return MeasuredRate(
        card=target.card.slug if target.card else target.name,
        model=basename(plan.model.name).lower(),
        parameters=plan.model.parameters,
        adapter=plan.adapter.type,
        quantization=plan.model.quantization,
        tokens_per_second=reached,
        measured_on=datetime.date.today().isoformat(),
        command="expert train",
        max_seq_length=plan.data.max_seq_length,
        packing=plan.data.packing,
        settings=speed_settings(settled, cores=None if on_gpu else target.cores),
        row_tokens=tokens / rows,
    )

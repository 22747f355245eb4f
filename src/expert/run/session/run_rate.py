"""Stores the rate of a finished run and its compile time, for plans of similar runs."""

from __future__ import annotations

import datetime
import sys
from typing import TYPE_CHECKING, Any

from expert.insight.findings.evidence import Evidence
from expert.insight.record import RunRecord, read_run
from expert.insight.step.anatomy import dissect
from expert.planning.compilations import compilations_file, remember_compilation
from expert.planning.machine.target import choose_target
from expert.planning.measurements import (
    MeasuredRate,
    measurements_file,
    remember_rate,
    speed_settings,
)
from expert.planning.memory.calibration import workload_of
from expert.planning.models.resolve import basename

if TYPE_CHECKING:
    from expert.run.session.session import Session

LEAST_STEPS = 20
LEAST_SECONDS = 10.0
"""Of settled steps: shorter runs say little, and nobody waits for them."""


def remember_run(session: Session) -> None:
    """Store the measured rate and compile time for later plans. Only the rate: its settings were
    not compared with others."""
    run = read_run(session.folder.path)
    _remember_compiling(session, run)
    reached = settled_rate(Evidence(run=run, anatomy=dissect(run)))
    rate = _measured(session, reached) if reached is not None else None
    if rate is None:
        return
    try:
        remember_rate(measurements_file(), rate)
    except OSError as error:
        session.emit("warning", text=f"the rate could not be stored: {error.strerror}")


def _remember_compiling(session: Session, run: RunRecord) -> None:
    """Store the time of the first step, which compiled all blocks, if nothing changed meanwhile."""
    seconds, work = compile_seconds(run), workload_of(session.plan)
    warm = was_compiled_before()
    if seconds is None or work is None or warm is None or session.plan.kernels.device != "cuda":
        return
    try:
        file, card = compilations_file(), _target(session)[0]
        remember_compilation(file, work, card, seconds=seconds, warm=warm)
    except OSError as error:
        session.emit("warning", text=f"the compile time could not be stored: {error.strerror}")


def compile_seconds(run: RunRecord) -> float | None:
    """Seconds of the one compiling step; None if there were none or several, or plans changed."""
    seconds = [event.get("seconds") for event in run.of("compiled")]
    changed = run.of("fell_back") or run.of("resumed")
    return float(seconds[0]) if len(seconds) == 1 and seconds[0] and not changed else None


def was_compiled_before() -> bool | None:
    """Whether torch's caches held everything this process compiled; None if nothing was compiled or
    torch does not report it."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters: Any = {} if utils is None else utils.counters
    kinds = (("inductor", "fxgraph_cache"), ("aot_autograd", "autograd_cache"))
    hits, misses = (
        sum(counters[of][f"{cache}_{what}"] for of, cache in kinds if of in counters)
        for what in ("hit", "miss")
    )
    return None if not hits and not misses else not misses


def _target(session: Session) -> tuple[str, int | None]:
    """The device of a run as named in measurements, and its cores if it is a CPU."""
    from expert.planning.machine.machine import describe_machine

    machine = session.start.machine or describe_machine(session.folder.path)
    device = session.plan.kernels.device
    target = choose_target(machine, vram=session.start.vram, device=device)
    card = target.card.slug if target.card else target.name
    return card, None if target.device == "cuda" else target.cores


def settled_rate(found: Evidence) -> float | None:
    """Tokens per second of an undisturbed, long enough run; else None."""
    step = found.step
    if step is None or not step.settled or step.updates < LEAST_STEPS:
        return None
    # A fallback means two settings, a resume perhaps two machines.
    disturbed = found.run.of("fell_back") or found.run.of("resumed") or found.was_slowed_by_others
    if disturbed or step.updates * step.wall < LEAST_SECONDS:
        return None
    return step.tokens_per_second


def _measured(session: Session, reached: float) -> MeasuredRate | None:
    """The measurement; None if rows were not counted, or the card was shared."""
    plan = session.plan
    rows, tokens = plan.length.rows, plan.length.tokens_per_epoch
    shared = any(remark.path == "memory.budget_bytes" for remark in plan.remarks)
    if not rows or not tokens or shared or plan.data.tokenize == "late":
        return None
    card, cores = _target(session)
    settled = {decision.path: decision for decision in plan.decisions}
    return MeasuredRate(
        card=card,
        model=basename(plan.model.name).lower(),
        parameters=plan.model.parameters,
        adapter=plan.adapter.type,
        quantization=plan.model.quantization,
        tokens_per_second=reached,
        measured_on=datetime.date.today().isoformat(),
        command="expert train",
        max_seq_length=plan.data.max_seq_length,
        packing=plan.data.packing,
        settings=speed_settings(settled, cores=cores),
        row_tokens=tokens / rows,
    )

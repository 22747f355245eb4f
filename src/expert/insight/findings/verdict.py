"""What limits a run's speed, in one sentence with numbers, and what fixing it would gain.

It is what the first finding says whose row names a bound, in the order of the table: a device that
waits for data says nothing about its kernels, so feeding comes before computing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from expert.core.text import percent, span, times
from expert.insight.findings.evidence import Evidence
from expert.insight.findings.finding import Finding
from expert.insight.findings.kernels import gain_without_checkpointing
from expert.insight.findings.table import TABLE
from expert.insight.step.anatomy import StepAnatomy, number

MIN_START_SECONDS = 60.0
"""A shorter start (loading and compiling) is not reported."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What limits the run."""

    kind: str
    """data-, copy-, launch-, sync-, memory-, compute-, evaluation-, saving- or start-bound, or
    unknown."""
    sentence: str
    fix: str = ""
    overrides: tuple[str, ...] = ()
    """The fix as `--set` takes it, if a key alone fixes it."""
    gain: float | None = None
    """The largest possible speedup, if anything can be gained."""


def judge(found: Evidence, findings: Sequence[Finding]) -> Verdict:
    """The verdict on a run with these findings."""
    step, spent = found.step, found.anatomy.run
    if step is None or step.wall <= 0:
        # No log line: the run ended before the first, or logging_steps is too large.
        done = max((number(event, "step") or 0 for event in found.run.events), default=0)
        if done:
            why = f"{done:.0f} steps finished, but no log line shows how long they took."
            return Verdict(
                kind="unknown",
                sentence=f"unknown: {why}",
                fix="training.config.logging_steps: 1",
                overrides=("training.config.logging_steps=1",),
            )
        error = found.newest("failed").get("error") or found.newest("stopped").get("reason")
        why = "no step was finished, so there is nothing to judge by."
        fix = f"the run ended with: {error}" if error else ""
        return Verdict(kind="unknown", sentence=f"unknown: {why}", fix=fix)
    ended = any(found.run.of(kind) for kind in ("finished", "stopped"))
    if ended and spent.start >= max(MIN_START_SECONDS, spent.training):
        return Verdict(
            kind="start-bound",
            sentence=f"start-bound: loading and compiling took {span(spent.start)} of "
            f"{span(spent.total)}, training only {span(spent.training)}.",
            fix="train longer, or training.config.torch_compile: false",
        )
    pauses = {"evaluation-bound": spent.evaluating, "saving-bound": spent.saving}
    by_name = {one.name: one for one in findings}
    for name, row in TABLE.items():
        one = by_name.get(name)
        if not row.bound or one is None or one.severity == "note":
            continue
        if pauses.get(row.bound, spent.total) >= spent.training:
            sentence = f"{row.bound}: {one.title}: {one.evidence}."
            return Verdict(kind=row.bound, sentence=sentence, fix=one.fix,
                           overrides=one.overrides, gain=one.gain)  # fmt: skip
    if found.recomputes and not found.requested("kernels.checkpointing"):
        return Verdict(
            kind="memory-bound",
            sentence="memory-bound: blocks are checkpointed because memory is short.",
            fix="base_model.quantization: int4, a shorter training.config.max_seq_length, or a "
            "card with more memory",
            gain=gain_without_checkpointing(found),
        )
    return _computing(found, step, by_name)


def _computing(found: Evidence, step: StepAnatomy, findings: Mapping[str, Finding]) -> Verdict:
    """Compute-bound, and whether what is computed is of use."""
    reached = step.tokens_per_second
    names = ("padding-waste", "below-the-band") if found.on_gpu else ("busy-cores", "padding-waste")
    bad = next((findings[name] for name in names if name in findings), None)
    sentence = "compute-bound: good." if bad is None else f"compute-bound, but {bad.title}."
    busy = percent(1 - (step.idle_share or 0.0))
    rate = f" at {reached:,.0f} tokens/s" if reached else ""
    device = "GPU" if found.on_gpu else "CPU"
    sentence += f" The {device} computes {busy} of a step's {span(step.wall)}{rate}"
    if found.on_gpu and step.mfu:
        card = found.gpu_fact("name") or "the card"
        sentence += f", which is {percent(step.mfu)} of the peak of {card} (MFU)"
        sentence += f"; the peak is {times(1 / step.mfu)} away"
    sentence += f"; {bad.evidence}." if bad is not None else "."
    return Verdict(kind="compute-bound", sentence=sentence, fix=bad.fix if bad is not None else "")

"""A run that was bound by something other than training: evaluating, saving, or starting."""

from __future__ import annotations

from expert.core.text import percent, span
from expert.insight.findings.evidence import Evidence
from expert.insight.step.bound import Gain, Kind, Verdict

START_MATTERS_SECONDS = 60.0
"""Loading and compiling of a shorter start are not worth a word."""
PAUSES_MATTER_SECONDS = 2.0
"""Evaluating and saving that took less in all are nothing to change, whatever their share."""
CADENCE_SHARE = 0.05
"""What evaluating or saving may take beside the training; the advised interval comes from it."""


def judge_run(found: Evidence) -> Verdict | None:
    """A verdict where something else took longer than the training itself."""
    spent = found.anatomy.run
    parts: dict[str, float] = {}
    if len(found.run.of("eval")) > 1:  # a single one at the end is not too many
        parts["evaluation"] = spent.evaluating
    if len(found.run.of("saved")) > 1:
        parts["saving"] = spent.saving
    ended = any(found.run.of(kind) for kind in ("finished", "stopped"))
    if ended and spent.start >= START_MATTERS_SECONDS:
        parts["start"] = spent.start
    name = max(parts, key=lambda part: parts[part], default="")
    seconds = parts.get(name, 0.0)
    if found.step is None or seconds < max(PAUSES_MATTER_SECONDS, spent.training):
        return None
    if name == "start":
        return _start_bound(found)
    kind: Kind = "evaluation-bound" if name == "evaluation" else "saving-bound"
    word = "evaluating" if name == "evaluation" else "saving checkpoints"
    rarer = CADENCE_SHARE * spent.training
    factor = spent.total / (spent.total - seconds + rarer)
    key, interval = advised_interval(found, "eval" if name == "evaluation" else "saved", seconds)
    return Verdict(
        kind=kind,
        sentence=f"{kind}: {word} took {span(seconds)} of {span(spent.total)} "
        f"({percent(seconds / spent.total)}), training only {span(spent.training)}.",
        fix=f"training.config.{key}: {interval}",
        overrides=(f"training.config.{key}={interval}",),
        gains=(
            Gain(
                what=f"{key}: {interval}",
                factor=factor,
                reckoned=f"{span(spent.total)} / ({span(spent.total)} - {span(seconds)} + "
                f"{percent(CADENCE_SHARE)} of {span(spent.training)})",
            ),
        ),
    )


def advised_interval(found: Evidence, event: str, seconds: float) -> tuple[str, int]:
    """The key and the steps between two, so that all of them take a twentieth of the training."""
    key = "eval_steps" if event == "eval" else "save_steps"
    updates = sum(line.updates for line in found.anatomy.lines)
    count = max(1, len(found.run.of(event)))
    training = found.anatomy.run.training
    allowed = max(1.0, CADENCE_SHARE * training / (seconds / count)) if seconds else 1.0
    return key, max(1, round(updates / allowed))


def _start_bound(found: Evidence) -> Verdict:
    spent = found.anatomy.run
    fix = "train longer, or several experts one after the other on the same machine"
    gains: tuple[Gain, ...] = ()
    if spent.compiling > spent.loading:
        fix = "training.config.torch_compile: false (a run this short does not win it back)"
        factor = spent.total / (spent.total - spent.compiling)
        reckoned = f"{span(spent.total)} / ({span(spent.total)} - {span(spent.compiling)})"
        gains = (Gain(what="not compiling, at most", factor=factor, reckoned=reckoned),)
    return Verdict(
        kind="start-bound",
        sentence=f"start-bound: loading took {span(spent.loading)} and compiling "
        f"{span(spent.compiling)} of {span(spent.total)}, training only {span(spent.training)}.",
        fix=fix,
        gains=gains,
    )

"""How a run goes: its end, its loss, and the time it spends outside training."""

from __future__ import annotations

import statistics

from expert.core.rundir import named_manifest
from expert.core.text import percent, shell_quoted, span
from expert.insight.findings.evidence import Evidence
from expert.insight.findings.finding import Answer, Noted
from expert.insight.step.anatomy import number

MIN_PAUSE_SECONDS = 2.0
"""Less evaluating and saving in total is not worth a change, whatever its share."""
PAUSE_BUDGET_SHARE = 0.05
"""Allowed time of evaluating or saving relative to training; sets the advised interval."""
PAUSING_SHARE = 0.25
"""Share of the time; evaluating or saving for longer is too often."""
PAUSING_SECONDS = 30.0
"""An interval the planner chose is reported only if it costs this much."""
CLIPPED_SHARE = 0.95
"""A few clipped steps are what the limit is for; nearly all of them point to the learning rate."""
CLIPPED_LINES = 10
BOTH_FALL_SHARE = 0.1
"""Preferred answers usually lose a little; a tenth of their log-probability is more than that."""


FEWEST_LINES = 6
"""Log lines from which the course of preferences says something."""
TOLD_APART = 0.99


def both_less_likely(found: Evidence) -> Answer:
    """Preferred answers lose likelihood too: the margin grows because rejected ones lose more."""
    lines = [e for e in found.run.of("step") if number(e, "logps/chosen") is not None]
    if len(lines) < FEWEST_LINES:
        return None
    part = len(lines) // 3
    means = {
        name: [
            statistics.fmean(number(e, f"logps/{name}") or 0.0 for e in some)
            for some in (lines[:part], lines[-part:])
        ]
        for name in ("chosen", "rejected")
    }
    fell = {name: first - last for name, (first, last) in means.items()}
    if fell["chosen"] < BOTH_FALL_SHARE * abs(means["chosen"][0]) or fell["rejected"] <= 0:
        return None
    return (
        f"the log-probability of preferred answers fell by {fell['chosen']:.3g} to "
        f"{means['chosen'][1]:.3g}, that of rejected ones by {fell['rejected']:.3g}"
    )


def told_apart_at_once(found: Evidence) -> Answer:
    """The answers are told apart from the first steps on."""
    lines = [e for e in found.run.of("step") if number(e, "rewards/accuracies") is not None]
    early = lines[1:4]
    if len(lines) < FEWEST_LINES or any(
        (number(e, "rewards/accuracies") or 0.0) < TOLD_APART for e in early
    ):
        return None
    last = max(number(e, "step") or 0 for e in early)
    return f"nearly every pair has the larger reward preferred from step {last:.0f} on"


def failed(found: Evidence) -> Answer:
    error = found.newest("failed").get("error")
    continued = found.run.events and found.run.events[-1].get("event") != "failed"
    if not error or continued:
        return None
    command = found.resume_command or (
        f"expert train --manifest {shell_quoted(named_manifest(found.newest('started')))} "
        f"--resume {shell_quoted(found.run.folder)}"
    )
    return Noted(str(error).strip(), fix=f"fix it and continue: {command}")


def not_finite(found: Evidence) -> Answer:
    events = found.run.of("not_finite")
    if not events:
        return None
    stopped = any(event.get("policy") == "stop" for event in events)
    rows = events[-1].get("rows")
    behind = f"; rows {', '.join(map(str, rows[:5]))}" if isinstance(rows, list) and rows else ""
    steps = ", ".join(str(event.get("step")) for event in events[:5])
    text = f"{len(events)} times, at step {steps}{behind}"
    return Noted(text, severity="error" if stopped else "warning")


def loss_spikes(found: Evidence) -> Answer:
    events, back = found.run.of("spike"), found.run.of("rolled_back")
    if not events and not back:
        return None
    lost = sum(max(0.0, (number(e, "from_step") or 0) - (number(e, "to_step") or 0)) for e in back)
    last = events[-1] if events else {}
    loss, usual = number(last, "loss"), number(last, "median")
    known = loss is not None and usual is not None
    how_far = f"; the last one to {loss:.3g} from {usual:.3g}" if known else ""
    rollbacks = f"{len(back)} rollbacks to a checkpoint, {lost:.0f} steps lost"
    return f"{len(events)} spikes{how_far}; {rollbacks}"


def evaluation_often(found: Evidence) -> Answer:
    requested = found.requested("watch.eval_steps") or found.requested("watch.evaluation_strategy")
    seconds = found.anatomy.run.evaluating
    return _pauses(found, "eval", "watch.eval_steps", seconds, requested=requested)


def saving_often(found: Evidence) -> Answer:
    requested = found.requested("watch.save_steps") or found.requested("watch.save_strategy")
    seconds = found.anatomy.run.saving
    return _pauses(found, "saved", "watch.save_steps", seconds, requested=requested)


def _pauses(found: Evidence, event: str, path: str, seconds: float, *, requested: bool) -> Answer:
    spent = found.anatomy.run
    whole = spent.training + spent.evaluating + spent.saving
    if whole <= 0 or seconds < PAUSING_SHARE * whole or found.step is None:
        return None
    count = len(found.run.of(event))
    if seconds < (MIN_PAUSE_SECONDS if requested else PAUSING_SECONDS) or count < 2:
        return None  # a single one at the end is not too many
    asker = f"; {found.setting_words(path)}" if found.requested(path) else ""
    kept = whole - seconds + PAUSE_BUDGET_SHARE * spent.training
    # The interval at which they take 5 % of the training time in total.
    updates = sum(line.updates for line in found.anatomy.lines)
    allowed = max(1.0, PAUSE_BUDGET_SHARE * spent.training / (seconds / count))
    return Noted(
        f"{count} times for {span(seconds)}, next to {span(spent.training)} of training "
        f"({percent(seconds / whole)}){asker}",
        keys=(f"{path.removeprefix('watch.')}={max(1, round(updates / allowed))}",),
        gain=whole / kept if whole > seconds else None,
    )


def below_the_band(found: Evidence) -> Answer:
    """Slower than models of this size run on this card, according to the shipped measurements."""
    step, band = found.step, found.band
    rate = step.tokens_per_second if step is not None else None
    if band is None or not rate or rate >= band.acceptable_from:
        return None
    return Noted(
        f"{rate:,.0f} tokens/s where {band.reference:,.0f} can be reached; {band.because}",
        severity="warning" if band.measured and rate < band.wrong_below else "note",
        gain=band.reference / rate,
    )


def always_clipped(found: Evidence) -> Answer:
    """Gradients above max_grad_norm in nearly every step, so all steps have the same length."""
    limit = found.amount("optim.max_grad_norm")
    known = (number(line.event, "grad_norm") for line in found.anatomy.lines)
    norms = [norm for norm in known if norm is not None]
    if not limit or len(norms) < CLIPPED_LINES:
        return None
    clipped, usual = sum(norm > limit for norm in norms), statistics.median(norms)
    if clipped < CLIPPED_SHARE * len(norms):
        return None
    text = f"{clipped} of {len(norms)} log lines have a gradient norm above max_grad_norm {limit:g}"
    wider = float(f"{2 * usual:.1g}")
    return Noted(f"{text}; the median is {usual:.3g}", keys=(f"max_grad_norm={wider:g}",))


def damaged_files(found: Evidence) -> Answer:
    files = [("plan.json", found.run.plan), ("environment.json", found.run.environment)]
    if found.run.validation is not None:
        files.append(("validation.json", found.run.validation))
    lines = found.run.damaged_lines
    problems = [f"{lines} lines of events.jsonl cannot be read"] if lines else []
    problems += [f"{name} is missing or damaged" for name, content in files if not content]
    return "; ".join(problems) if problems and found.before is None else None


# --- before a run --------------------------------------------------------------------------------


def saves_only_at_the_end(found: Evidence) -> Answer:
    strategy, total = found.planned("watch.save_strategy"), found.amount("length.total_steps")
    every = found.amount("watch.save_steps") or 0
    if found.before is None:
        return None
    if strategy == "no":
        return "save_strategy: no"
    if strategy == "steps" and total and every >= total:
        return f"save_steps {every:.0f}, and the run has {total:.0f} steps"
    return None

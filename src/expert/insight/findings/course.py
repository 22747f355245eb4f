"""Faults in the course of a run: how it ended, what it learnt, what it did besides training."""

from __future__ import annotations

import statistics

from expert.core.rundir import named_manifest
from expert.core.text import percent, span
from expert.insight.findings.evidence import Evidence
from expert.insight.findings.finding import Finding
from expert.insight.outcome import FAR_OVERFITTED, held_out_losses, judge_learning
from expert.insight.step.anatomy import number
from expert.insight.step.bands import expected_band
from expert.insight.step.pauses import CADENCE_SHARE, PAUSES_MATTER_SECONDS, advised_interval
from expert.planning.machine.cards import card_named

PAUSING_SHARE = 0.25
"""Evaluating or saving for a quarter of the time is more than looking on."""
PAUSING_SECONDS = 30.0
"""Where nobody asked for the interval, it is told of only when it costs this much."""
LINES_PER_SECOND = 20.0
LOGGING_SHARE = 0.2
SKIPPED_SHARE = 0.05
"""float16 finds its scale in a few skipped updates; one in twenty is more than finding it."""
LINES_TO_JUDGE = 20
BELOW_MEASURED = 0.7
"""Two runs of one setting differ by a few percent on a card; this is not chance."""
CLIPPED_SHARE = 0.95
"""A few clipped steps are what the limit is for; nearly all of them are another learning rate."""
CLIPPED_LINES = 10
FAR_CLIPPED = 10.0
"""Gradients so many times the limit: what is left of them is their direction alone."""


def failed(found: Evidence) -> Finding | None:
    error = found.newest("failed").get("error")
    went_on = found.run.events and found.run.events[-1].get("event") != "failed"
    if not error or went_on:
        return None
    command = found.go_on or (
        f"expert train --manifest {named_manifest(found.newest('started'))} "
        f"--resume {found.run.folder}"
    )
    return Finding(
        name="failed",
        severity="error",
        title="the run ended with an error",
        evidence=str(error).strip(),
        consequence="what was learnt since the last checkpoint is lost",
        fix=f"mend it and go on: {command}",
    )


def not_finite(found: Evidence) -> Finding | None:
    seen = found.run.of("not_finite")
    if not seen:
        return None
    stopped = any(event.get("policy") == "stop" for event in seen)
    rows = seen[-1].get("rows")
    behind = f"; rows {', '.join(map(str, rows[:5]))}" if isinstance(rows, list) and rows else ""
    steps = ", ".join(str(event.get("step")) for event in seen[:5])
    return Finding(
        name="not-finite",
        severity="error" if stopped else "warning",
        title="a loss or gradient was not finite",
        evidence=f"{len(seen)} times, at update {steps}{behind}",
        consequence="the update is never made; on_not_finite says what follows",
        fix="look at these rows; lower training.config.learning_rate or lengthen warmup_steps",
        numbers={"count": float(len(seen))},
    )


def spikes(found: Evidence) -> Finding | None:
    seen, back = found.run.of("spike"), found.run.of("rolled_back")
    if not seen and not back:
        return None
    lost = sum(max(0.0, (number(e, "from_step") or 0) - (number(e, "to_step") or 0)) for e in back)
    last = seen[-1] if seen else {}
    leapt = ""
    loss, usual = number(last, "loss"), number(last, "median")
    if loss is not None and usual is not None:
        leapt = f"; the last one to {loss:.3g} from {usual:.3g}"
    return Finding(
        name="loss-spikes",
        severity="warning",
        title="the loss leapt far above its own noise",
        evidence=f"{len(seen)} leaps{leapt}; {len(back)} times back to a checkpoint, {lost:.0f} "
        "updates lost",
        consequence="the run goes on with half the rate, and the rows are left out",
        fix="lower training.config.learning_rate, lengthen warmup_steps, or look at the rows",
        numbers={"spikes": float(len(seen)), "rollbacks": float(len(back))},
    )


def skipped_updates(found: Evidence) -> Finding | None:
    """float16 that overflows: the scale is halved and the update left out."""
    if found.run.planned("kernels.precision") != "fp16":
        return None
    lines = found.anatomy.lines
    lost = [line for line in lines if line.event.get("grad_norm") in ("inf", "nan", "-inf")]
    if not lost:
        return None
    share = len(lost) / len(lines)
    return Finding(
        name="fp16-skips",
        severity="warning" if share >= SKIPPED_SHARE and len(lost) > 2 else "note",
        title="float16 gradients overflowed and their updates were left out",
        evidence=f"{len(lost)} of {len(lines)} log lines ({percent(share)}) have a gradient that "
        "is not finite",
        consequence="these rows taught nothing",
        fix="training.config.bf16: auto and fp16: auto, or a lower learning_rate",
        overrides=("training.config.bf16=auto", "training.config.fp16=auto"),
        numbers={"share": share},
    )


def evaluates_often(found: Evidence) -> Finding | None:
    asked = found.asked("watch.eval_steps") or found.asked("watch.evaluation_strategy")
    return _pauses(
        found,
        "evaluation-often",
        "evaluating takes much of the run",
        seconds=found.anatomy.run.evaluating,
        event="eval",
        asked=asked,
    )


def saves_often(found: Evidence) -> Finding | None:
    asked = found.asked("watch.save_steps") or found.asked("watch.save_strategy")
    return _pauses(
        found,
        "saving-often",
        "saving checkpoints takes much of the run",
        seconds=found.anatomy.run.saving,
        event="saved",
        asked=asked,
    )


def _pauses(
    found: Evidence, name: str, title: str, *, seconds: float, event: str, asked: bool
) -> Finding | None:
    spent = found.anatomy.run
    whole = spent.training + spent.evaluating + spent.saving
    if whole <= 0 or seconds < PAUSING_SHARE * whole or found.step is None:
        return None
    if seconds < (PAUSES_MATTER_SECONDS if asked else PAUSING_SECONDS):
        return None
    count = len(found.run.of(event))
    if count < 2:  # a single one at the end is not too many
        return None
    key, interval = advised_interval(found, event, seconds)
    path = "watch.eval_steps" if event == "eval" else "watch.save_steps"
    asker = f"; {found.who(path)}" if found.asked(path) else ""
    return Finding(
        name=name,
        severity="warning",
        title=title,
        evidence=f"{count} times for {span(seconds)} beside {span(spent.training)} of training "
        f"({percent(seconds / whole)}){asker}",
        consequence="the device trains nothing meanwhile",
        fix=f"training.config.{key}: {interval}",
        overrides=(f"training.config.{key}={interval}",),
        gain=whole / (whole - seconds + CADENCE_SHARE * spent.training),
        numbers={"seconds": seconds, "count": float(count)},
    )


def logs_often(found: Evidence) -> Finding | None:
    step, every = found.step, found.amount("watch.logging_steps")
    if step is None or not every or step.wall <= 0:
        return None
    lines = 1 / (every * step.wall)
    if lines < LINES_PER_SECOND or step.share("other") < LOGGING_SHARE:
        return None
    return Finding(
        name="logging-often",
        severity="note",
        title="log lines come faster than anybody reads",
        evidence=f"{lines:.0f} lines a second ({found.who('watch.logging_steps')}); "
        f"{percent(step.share('other'))} of an update is neither feeding nor computing",
        consequence="each line costs the host time in which it launches nothing",
        fix=f"training.config.logging_steps: {max(10, round(1 / step.wall))}",
        overrides=(f"training.config.logging_steps={max(10, round(1 / step.wall))}",),
        numbers={"lines_per_second": lines, "other_share": step.share("other")},
    )


def below_measured_rate(found: Evidence) -> Finding | None:
    """Slower than this card was in a run like this one: the plan has looked for the same model,
    length, packing and settings, and here the threads must be those of a free machine."""
    expected, step = found.amount("length.tokens_per_second"), found.step
    reached = step.tokens_per_second if step is not None else None
    if not expected or reached is None or reached >= BELOW_MEASURED * expected:
        return None
    if found.had_neighbours:
        return None  # they are another finding
    because = found.decision("length.tokens_per_second").get("because")
    return Finding(
        name="below-measured-rate",
        severity="warning",
        title="slower than this card was before",
        evidence=f"{reached:,.0f} tokens/s; {expected:,.0f} tokens/s {because}",
        consequence=f"{percent(reached / expected)} of the speed it had",
        fix="expert diagnose --manifest FILE looks at the machine; expert benchmark measures anew",
        gain=expected / reached if reached else None,
        numbers={"tokens_per_second": reached, "expected": expected},
    )


def below_the_band(found: Evidence) -> Finding | None:
    """Slower than models of this size are on this card, by what was measured for the package."""
    step, size = found.step, found.gpu_fact("memory_total_bytes")
    card = card_named(str(found.gpu_fact("name")), size) if isinstance(size, int) else None
    parameters = found.amount("model.parameters")
    if not found.run.on_gpu or card is None or step is None or not parameters:
        return None
    band = expected_band(
        card=card.slug,
        parameters=int(parameters),
        flops_per_token=found.amount("length.flops_per_token"),
        peak_flops=found.amount("length.peak_flops"),
    )
    rate = step.tokens_per_second
    if band is None or rate is None or rate >= band.acceptable_from:
        return None
    wrong = band.measured and rate < band.wrong_below
    return Finding(
        name="below-the-band",
        severity="warning" if wrong else "note",
        title=f"throughput on this card: {band.word(rate)}",
        evidence=f"{rate:,.0f} tokens/s where {band.reference:,.0f} can be had; {band.because}",
        consequence=f"{percent(rate / band.reference)} of what this card does with such a model",
        fix="mend what else is found here; expert benchmark shows what each setting is worth",
        gain=band.reference / rate if rate else None,
        numbers={"tokens_per_second": rate, "expected": band.reference},
    )


def loss_stays(found: Evidence) -> Finding | None:
    known = (number(line.event, "loss") for line in found.anatomy.lines)
    losses = [loss for loss in known if loss is not None]
    if len(losses) < LINES_TO_JUDGE:
        return None
    fifth = len(losses) // 5
    first, last = statistics.mean(losses[:fifth]), statistics.mean(losses[-fifth:])
    if last < first:
        return None
    return Finding(
        name="loss-stays",
        severity="note",
        title="the loss does not fall",
        evidence=f"{first:.4g} in the first fifth of the run, {last:.4g} in the last",
        consequence="nothing was learnt that the loss could show",
        fix="another training.config.learning_rate; look at the rows: expert dataset",
        numbers={"first": first, "last": last},
    )


def overfits(found: Evidence) -> Finding | None:
    held_out, told = held_out_losses(found), judge_learning(found)
    if told.kind != "overfitted":
        return None
    best, last = min(held_out, key=lambda one: one[1]), held_out[-1]
    far = last[1] >= FAR_OVERFITTED * best[1] and not told.kept_best
    kept = "; the best weights were kept" if told.kept_best else ""
    return Finding(
        name="overfits",
        severity="warning" if far else "note",
        title="the validation loss rises again",
        evidence=f"best {best[1]:.4g} at step {best[0]}, {last[1]:.4g} at step {last[0]}{kept}",
        consequence="what comes after the best only learns the training rows by heart",
        fix=told.fix,
        numbers={"best": best[1], "last": last[1]},
    )


def always_clipped(found: Evidence) -> Finding | None:
    """Gradients above max_grad_norm in nearly every step: all steps have the same length."""
    limit = found.amount("optim.max_grad_norm")
    known = (number(line.event, "grad_norm") for line in found.anatomy.lines)
    norms = [norm for norm in known if norm is not None]
    if not limit or len(norms) < CLIPPED_LINES:
        return None
    clipped = sum(norm > limit for norm in norms)
    if clipped < CLIPPED_SHARE * len(norms):
        return None
    usual = statistics.median(norms)
    wider = float(f"{2 * usual:.1g}")
    return Finding(
        name="always-clipped",
        severity="warning" if usual >= FAR_CLIPPED * limit else "note",
        title="nearly every step was clipped",
        evidence=f"{clipped} of {len(norms)} log lines have a gradient norm above max_grad_norm "
        f"{limit:g}; the median is {usual:.3g}",
        consequence="every step has the length of the limit, however large its gradient is: the "
        "learning rate means something else than it says",
        fix=f"training.config.max_grad_norm: {wider:g} where the loss falls steadily; a lower "
        "learning_rate or a longer warmup_steps where it does not",
        overrides=(f"training.config.max_grad_norm={wider:g}",),
        numbers={"share": clipped / len(norms), "median": usual, "limit": limit},
    )


def damaged(found: Evidence) -> Finding | None:
    missing = [
        name
        for name, content in (
            ("plan.json", found.run.plan),
            ("environment.json", found.run.environment),
        )
        if not content
    ]
    lines = found.run.damaged_lines
    if not lines and not missing:
        return None
    told = [f"{lines} lines of events.jsonl cannot be read"] if lines else []
    told += [f"{name} is missing or damaged" for name in missing]
    return Finding(
        name="damaged-files",
        severity="note",
        title="a part of the run folder cannot be read",
        evidence="; ".join(told),
        consequence="what was in it is not judged",
        numbers={"damaged_lines": float(lines)},
    )


RULES = (
    failed,
    not_finite,
    spikes,
    skipped_updates,
    evaluates_often,
    saves_often,
    logs_often,
    below_measured_rate,
    below_the_band,
    loss_stays,
    overfits,
    always_clipped,
    damaged,
)

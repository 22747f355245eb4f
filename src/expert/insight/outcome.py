"""Whether the model learned, in one sentence with numbers: the first thing to know about a run.

A run at full speed that memorises its rows is not a good run: one with a training loss of 0.009 and
a validation loss that rose from 1.01 to 1.80 was once headed "Good.".
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Literal

from expert.core.text import counted, loss
from expert.insight.findings.evidence import Evidence
from expert.insight.step.anatomy import number

OVERFITTED = 1.05
"""Last validation loss over the best; evaluations of a few hundred rows differ by 1 to 2 %."""
LINES_TO_JUDGE = 10
"""Fewer log lines do not show a trend."""
HARDLY = 0.99
"""A loss that stays above this share of its first value has not fallen."""
DIVERGED = 1.5
DIVERGED_OF_FIRST = 0.25
"""Risen by half above its lowest and by a quarter of its first value: a loss near zero may double
without meaning anything."""
FAR_APART = 3.0
FAR_APART_LEAST = 0.5
"""A validation loss this many times the training loss, and this far above it, is worth a note."""

LOWER_RATE = "training.config.learning_rate: lower, or a longer warmup_steps; look at the rows"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How learning went; `unknown` if too little was logged."""

    kind: Literal["learning", "overfitted", "not learning", "diverged", "unknown"]
    sentence: str
    fix: str = ""
    kept_best: bool = False
    """The run ended with the weights of the best evaluation."""

    @property
    def is_good(self) -> bool:
        return self.kind == "learning" or (self.kind == "overfitted" and self.kept_best)


def judge_learning(found: Evidence) -> Outcome:
    """The first that applies: diverged, overfitted, not learning, learning."""
    lines = {number(line.event, "step") or 0.0: line.event for line in found.anatomy.lines}
    known = (number(lines[step], "loss") for step in sorted(lines))
    trained = [value for value in known if value is not None]
    evaluated = [(event["step"], number(event, "loss")) for event in found.run.evals]
    held_out = [(step, value) for step, value in evaluated if value is not None]
    fifths: list[float] = []
    """Means of five equal parts of the run; none if there are too few lines."""
    if len(trained) >= LINES_TO_JUDGE:
        size = len(trained) // 5
        ends = [size, 2 * size, 3 * size, 4 * size, len(trained)]
        fifths = [statistics.mean(trained[n * size : end]) for n, end in enumerate(ends)]
    newest = lines[max(lines)] if lines else {}
    recorded = newest.get("loss")
    lost = isinstance(recorded, str) or (isinstance(recorded, float) and recorded != recorded)
    if lost or any(event.get("policy") == "stop" for event in found.run.of("not_finite")):
        what = "The loss is no longer a number: the run diverged."
        return Outcome(kind="diverged", sentence=what, fix=LOWER_RATE)
    if fifths:
        first, lowest, last = fifths[0], min(fifths), fifths[-1]
        if last >= DIVERGED * lowest and last - lowest >= DIVERGED_OF_FIRST * first:
            what = f"The training loss rose again: first {loss(first)}, lowest {loss(lowest)}"
            what += f", last fifth {loss(last)}."
            return Outcome(kind="diverged", sentence=what, fix=LOWER_RATE)
        fifths[-1] = number(newest, "smoothed_loss") or last  # the loss shown everywhere else
    training = f"training loss {loss(trained[-1])}" if trained else ""
    if fifths:
        training = f"training loss {loss(fifths[0])} → {loss(fifths[-1])}"
    if len(held_out) >= 2:
        best_step, best = min(held_out, key=lambda one: one[1])
        step, last = held_out[-1]
        if last >= OVERFITTED * best and best_step != step:
            return _overfitted(found, held_out, training)

    what, values = "validation loss", [value for _, value in held_out]
    if len(held_out) < 2:
        what, values = "training loss", fifths
    if not values:
        logged = f"{counted(len(trained), 'log line')} with a loss" if trained else "no loss"
        evals = counted(len(held_out), "evaluation") if held_out else "no evaluations"
        return Outcome(kind="unknown", sentence=f"Too early to judge: {logged} and {evals}.")
    first, last = values[0], values[-1]
    if min(values) >= HARDLY * first and (not fifths or fifths[-1] >= HARDLY * fifths[0]):
        text = f"The {what} did not fall: first {loss(first)}, last {loss(last)}."
        fix = "training.config.learning_rate: another one; expert dataset check shows the rows as "
        return Outcome(kind="not learning", sentence=text, fix=f"{fix}the model sees them")
    text = f"The {what} fell from {loss(first)} to {loss(last)}"
    text += f" ({training})." if what == "validation loss" and training else "."
    if not held_out:
        none = found.planned("data.validation") in (None, "none")
        why = "No rows were held out" if none else "The held-out rows have not been evaluated"
        text += f" {why}, so the loss on new rows is unknown."
        return Outcome(kind="learning", sentence=text)
    new, old = held_out[-1][1], (fifths or trained or [held_out[-1][1]])[-1]
    if new >= FAR_APART * old and new - old >= FAR_APART_LEAST:
        text += f" The validation loss ({loss(new)}) is far above the training loss "
        text += f"({loss(old)}): much of it is memorised."
    return Outcome(kind="learning", sentence=text)


def _overfitted(found: Evidence, held_out: list[tuple[int, float]], training: str) -> Outcome:
    best_step, best = min(held_out, key=lambda one: one[1])
    step, last = held_out[-1]
    kept = number(found.newest("took_best"), "step") == best_step
    first_is_best = best_step == held_out[0][0] and len(held_out) > 2
    began = "from the first evaluation on" if first_is_best else f"after step {best_step:,}"
    text = f"The validation loss rose {began}: {loss(best)} → {loss(last)} at step {step:,}"
    text += f" ({training})" if training else ""
    text += ": the model memorises the training rows. "
    fix = "training.config.early_stopping_patience: 3, fewer epochs, or more rows"
    if kept:
        text += f"The weights of step {best_step:,} were kept."
    else:
        text += "The final weights are the last ones, not the best."
        fix = f"training.config.load_best_model_at_end: true; {fix}"
    return Outcome(kind="overfitted", sentence=text, fix=fix, kept_best=kept)

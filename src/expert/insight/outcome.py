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
FAR_OVERFITTED = 1.2
"""From here on the last weights are worth a warning, unless the best ones were kept."""
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

Kind = Literal["learning", "overfitted", "not learning", "diverged", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How learning went; `unknown` if too little was logged."""

    kind: Kind
    sentence: str
    fix: str = ""
    kept_best: bool = False
    """The run ended with the weights of the best evaluation."""

    @property
    def is_good(self) -> bool:
        return self.kind == "learning" or (self.kind == "overfitted" and self.kept_best)


def judge_learning(found: Evidence) -> Outcome:
    """The first that applies: diverged, overfitted, not learning, learning."""
    seen = _Losses(found)
    return seen.diverged() or seen.overfitted() or seen.learning() or _unknown(seen)


def _unknown(seen: _Losses) -> Outcome:
    lines = len(seen.trained)
    logged = f"{counted(lines, 'log line')} with a loss" if lines else "no loss"
    evals = counted(len(seen.held_out), "evaluation") if seen.held_out else "no evaluations"
    return Outcome(kind="unknown", sentence=f"Too early to judge: {logged} and {evals}.")


def held_out_losses(found: Evidence) -> list[tuple[int, float]]:
    """Step and loss of the validations in order; if a step was evaluated twice, the second."""
    recorded: dict[int, float] = {}
    for event in found.run.of("eval"):
        value, step = number(event, "loss"), number(event, "step")
        if value is not None and step is not None and event.get("split") in (None, "validation"):
            recorded[int(step)] = value
    return sorted(recorded.items())


class _Losses:
    """The losses of a run, and what follows from them."""

    def __init__(self, found: Evidence) -> None:
        self.found = found
        lines = {number(line.event, "step") or 0.0: line.event for line in found.anatomy.lines}
        self.newest = lines[max(lines)] if lines else {}
        known = (number(lines[step], "loss") for step in sorted(lines))
        self.trained = [value for value in known if value is not None]
        self.held_out = held_out_losses(found)

    def _fifths(self) -> list[float]:
        """Means of five equal parts of the run; empty if there are too few lines."""
        if len(self.trained) < LINES_TO_JUDGE:
            return []
        size = len(self.trained) // 5
        return [
            statistics.mean(self.trained[place * size : (place + 1) * size]) for place in range(4)
        ] + [statistics.mean(self.trained[4 * size :])]

    @property
    def _training(self) -> str:
        parts = self._fifths()
        if not parts:
            return f"training loss {loss(self.trained[-1])}" if self.trained else ""
        return f"training loss {loss(parts[0])} → {loss(parts[-1])}"

    def diverged(self) -> Outcome | None:
        fix = "training.config.learning_rate: lower, or a longer warmup_steps; look at the rows"
        recorded = self.newest.get("loss")
        lost = isinstance(recorded, str) or (isinstance(recorded, float) and recorded != recorded)
        stopped = any(event.get("policy") == "stop" for event in self.found.run.of("not_finite"))
        if lost or stopped:
            what = "The loss is no longer a number: the run diverged."
            return Outcome(kind="diverged", sentence=what, fix=fix)
        parts = self._fifths()
        if not parts:
            return None
        first, lowest, last = parts[0], min(parts), parts[-1]
        if last < DIVERGED * lowest or last - lowest < DIVERGED_OF_FIRST * first:
            return None
        what = f"The training loss rose again: first {loss(first)}, lowest {loss(lowest)}"
        return Outcome(kind="diverged", sentence=f"{what}, last fifth {loss(last)}.", fix=fix)

    def overfitted(self) -> Outcome | None:
        if len(self.held_out) < 2:
            return None
        best_step, best = min(self.held_out, key=lambda one: one[1])
        step, last = self.held_out[-1]
        if last < OVERFITTED * best or best_step == step:
            return None
        kept = number(self.found.newest("took_best"), "step") == best_step
        first_is_best = best_step == self.held_out[0][0] and len(self.held_out) > 2
        began = "from the first evaluation on" if first_is_best else f"after step {best_step:,}"
        text = f"The validation loss rose {began}: {loss(best)} → {loss(last)} at step {step:,}"
        if self._training:
            text += f" ({self._training})"
        text += ": the model memorises the training rows. "
        text += (
            f"The weights of step {best_step:,} were kept."
            if kept
            else "The final weights are the last ones, not the best."
        )
        fix = "training.config.early_stopping_patience: 3, fewer epochs, or more rows"
        if not kept:
            fix = f"training.config.load_best_model_at_end: true; {fix}"
        return Outcome(kind="overfitted", sentence=text, fix=fix, kept_best=kept)

    def learning(self) -> Outcome | None:
        parts = self._fifths()
        if len(self.held_out) >= 2:
            first, last = self.held_out[0][1], self.held_out[-1][1]
            what, best = "validation loss", min(value for _, value in self.held_out)
        elif parts:
            first, last, best, what = parts[0], parts[-1], min(parts), "training loss"
        else:
            return None
        if best >= HARDLY * first and (not parts or parts[-1] >= HARDLY * parts[0]):
            return Outcome(
                kind="not learning",
                sentence=f"The {what} did not fall: first {loss(first)}, last {loss(last)}.",
                fix="training.config.learning_rate: another one; expert dataset check shows the "
                "rows as the model sees them",
            )
        text = f"The {what} fell from {loss(first)} to {loss(last)}"
        if what == "validation loss" and self._training:
            text += f" ({self._training})"
        return Outcome(kind="learning", sentence=f"{text}.{self._gap()}{self._early()}")

    def _gap(self) -> str:
        """A note if held-out rows are predicted far worse than training rows."""
        if not self.held_out and self.found.planned("data.validation") not in (None, "none"):
            return " The held-out rows have not been evaluated, so the loss on new rows is unknown."
        if not self.held_out:
            return " No rows were held out, so the loss on new rows is unknown."
        held_out, parts = self.held_out[-1][1], self._fifths()
        trained = parts[-1] if parts else (self.trained[-1] if self.trained else held_out)
        apart = held_out >= FAR_APART * trained and held_out - trained >= FAR_APART_LEAST
        if len(self.held_out) == 1 and not apart:
            return f" The one validation gave {loss(held_out)}."
        if not apart:
            return ""
        return (
            f" The validation loss ({loss(held_out)}) is far above the training loss "
            f"({loss(trained)}): much of it is memorised."
        )

    def _early(self) -> str:
        if self.found.newest("finished").get("early") is not True:
            return ""
        return " Early stopping ended it: the validation loss no longer fell."

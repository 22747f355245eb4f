"""The gate: whether an expert is good enough to be let out."""

from __future__ import annotations

from dataclasses import dataclass

from expert.core.words import loss
from expert.judging.score import Score

MIN_ACCURACY = 0.95
MAX_REGRESSION = 0.05
MOST_WITHOUT_ORACLE = 0.05
"""Share of the cases. They are no part of the accuracy; with more of them it says too little."""
ENOUGH_NEW_CASES = 10
"""So many cases must be left for those that were learnt to be left out: of fewer one alone decides,
at an accuracy of 95 % that is asked for."""


@dataclass(frozen=True, kw_only=True)
class Demands:
    """What is asked of an expert."""

    min_accuracy: float = MIN_ACCURACY
    """Of the answers that could be judged; the share itself is held to it, not its interval."""
    max_regression: float = MAX_REGRESSION
    """How much worse than the baseline it may be, as a share of the baseline's accuracy."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What a model reached."""

    score: Score
    loss: float | None


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The verdict, and what speaks against it; empty where it passed."""

    passed: bool | None
    """None: there was nothing to judge, neither an answer nor a baseline."""
    reasons: tuple[str, ...]


def score_for_the_gate(every: Score, new: Score) -> Score:
    """What an expert is held to: the cases it has not learnt, where enough of them are left."""
    return new if new.cases >= min(ENOUGH_NEW_CASES, every.cases) else every


def gate_of(demands: Demands, now: Standing, before: Standing | None) -> Gate:
    """Hold what a model reached to what is asked, and to the baseline where there is one. Rows
    without answers have no accuracy that could be asked for; answers without an oracle have."""
    if not now.score.cases and before is None:
        return Gate(passed=None, reasons=())
    reasons = _of_accuracy(demands, now.score) if now.score.cases else []
    if before is not None:
        reasons += _of_regression(demands, now, before)
    return Gate(passed=not reasons, reasons=tuple(reasons))


def _of_accuracy(demands: Demands, score: Score) -> list[str]:
    if score.share_without_oracle > MOST_WITHOUT_ORACLE:
        return [
            f"{score.without_oracle} of {score.cases} cases have no oracle, "
            f"{score.share_without_oracle:.1%}; at most {MOST_WITHOUT_ORACLE:.0%} may"
        ]
    if score.accuracy is not None and score.accuracy < demands.min_accuracy:
        return [f"accuracy {score.accuracy:.1%} is below {demands.min_accuracy:.1%}"]
    return []


def _of_regression(demands: Demands, now: Standing, before: Standing) -> list[str]:
    """Accuracy where both have one, else the loss on the held-out rows."""
    ours, theirs = now.score.accuracy, before.score.accuracy
    if ours is not None and theirs is not None:
        least = theirs * (1 - demands.max_regression)
        if ours < least:
            text = f"accuracy {ours:.1%} is below the baseline's {theirs:.1%}"
            return [f"{text} by more than {demands.max_regression:.0%} of it"]
        return []
    if now.loss is not None and before.loss is not None:
        if not now.loss <= before.loss * (1 + demands.max_regression):  # nor where it is NaN
            text = f"loss {loss(now.loss)} is above the baseline's {loss(before.loss)}"
            return [f"{text} by more than {demands.max_regression:.0%} of it"]
        return []
    return ["the baseline could not be compared: no answer of one of the two was judged"]

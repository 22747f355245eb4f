"""The quality gate: whether an expert is good enough to be released."""

from __future__ import annotations

from dataclasses import dataclass, field

from expert.core.text import loss
from expert.judging.judge_command import MIN_SCORE
from expert.judging.score import Score

MIN_ACCURACY = 0.95
MAX_REGRESSION = 0.05
MAX_SHARE_WITHOUT_ORACLE = 0.05
"""Share of the cases. They do not count for accuracy, and with more of them it means too little."""
MIN_NEW_CASES = 10
"""New cases needed to leave out those that were trained on: with fewer, a single case decides
whether 95 % are reached."""


@dataclass(frozen=True, kw_only=True)
class GateRequirements:
    """What the gate requires."""

    min_accuracy: float = MIN_ACCURACY
    """Of the judged answers; the accuracy itself is compared, not its interval."""
    max_regression: float = MAX_REGRESSION
    """How much worse than the baseline it may be, as a share of the baseline's accuracy."""
    min_improvement: float = 0.0
    """For open text: required reduction of the loss, as a share of the base's loss; 0: any."""
    min_token_accuracy: float | None = None
    """For open text: required share of correct tokens; None: at least the base's share."""
    min_score: float = MIN_SCORE
    """Required mean score of a judge command."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    mean: float | None
    scored: int
    cases: int


@dataclass(frozen=True, kw_only=True)
class ModelResult:
    loss: float | None
    score: Score = field(default_factory=Score)
    token_accuracy: float | None = None
    scores: Scores | None = None
    """Set if a judge command scored the answers."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The verdict, the requirements, and the reasons against; no reasons if it passes."""

    passed: bool | None
    """None: there was nothing to judge, neither answers nor a baseline."""
    reasons: tuple[str, ...]
    asked: tuple[str, ...] = ()


def gate_score(every: Score, new: Score) -> Score:
    """The score the gate uses: of cases that were not trained on, if enough of them are left."""
    return new if new.cases >= min(MIN_NEW_CASES, every.cases) else every


def evaluate_gate(
    demands: GateRequirements,
    now: ModelResult,
    before: ModelResult | None,
    *,
    base: ModelResult | None = None,
) -> Gate:
    """Compare a model's results with the requirements, and with the baseline if there is one. Rows
    without answers have no accuracy to require; answers without an oracle do. Open text is compared
    with its `base`."""
    parts = []
    if now.scores is not None:
        parts.append(_check_scores(demands, now.scores))
    elif now.score.cases:
        parts.append(_check_accuracy(demands, now.score))
    if base is not None:
        parts += [_check_improvement(demands, now, base), _check_token_accuracy(demands, now, base)]
    if before is not None:
        parts.append(_check_regression(demands, now, before))
    reasons = tuple(fault for _, fault in parts if fault)
    passed = not reasons if parts else None
    return Gate(passed=passed, reasons=reasons, asked=tuple(asked for asked, _ in parts))


Part = tuple[str, str]
"""The requirement, and the reason against; "" if it is met."""


def _check_accuracy(demands: GateRequirements, score: Score) -> Part:
    asked = f"accuracy of at least {demands.min_accuracy:.1%}"
    if score.share_without_oracle > MAX_SHARE_WITHOUT_ORACLE:
        return asked, (
            f"{score.without_oracle} of {score.cases} cases have no oracle, "
            f"{score.share_without_oracle:.1%}; at most {MAX_SHARE_WITHOUT_ORACLE:.0%} may"
        )
    if score.accuracy is not None and score.accuracy < demands.min_accuracy:
        return asked, f"accuracy {score.accuracy:.1%} is below {demands.min_accuracy:.1%}"
    return asked, ""


def _check_scores(demands: GateRequirements, scores: Scores) -> Part:
    asked = f"mean score of at least {demands.min_score:g} by the judge command"
    without = scores.cases - scores.scored
    if without > MAX_SHARE_WITHOUT_ORACLE * scores.cases or scores.mean is None:
        return asked, (
            f"{without} of {scores.cases} cases have no score of the judge command; at most "
            f"{MAX_SHARE_WITHOUT_ORACLE:.0%} may"
        )
    if scores.mean < demands.min_score:
        return asked, f"mean score {scores.mean:.3g} is below {demands.min_score:g}"
    return asked, ""


def _check_improvement(demands: GateRequirements, now: ModelResult, base: ModelResult) -> Part:
    least = demands.min_improvement
    by = f" by at least {least:.1%} of it" if least else ""
    asked = f"loss on the held-out answers below the base's{by}"
    if now.loss is None or base.loss is None:
        return asked, "the loss on the held-out answers is not a number"
    if now.loss < base.loss and now.loss <= base.loss * (1 - least):  # False for NaN
        return asked, ""
    return asked, f"loss {loss(now.loss)} is not below the base's {loss(base.loss)}{by}"


def _check_token_accuracy(demands: GateRequirements, now: ModelResult, base: ModelResult) -> Part:
    asked_for = demands.min_token_accuracy
    least = base.token_accuracy if asked_for is None else asked_for
    whose = "the base's " if asked_for is None else ""
    asked = f"token accuracy of at least {whose or f'{least:.1%}'}".strip()
    if now.token_accuracy is None or least is None:
        return asked, ""
    if now.token_accuracy < least:
        return asked, f"token accuracy {now.token_accuracy:.1%} is below {whose}{least:.1%}"
    return asked, ""


def _check_regression(demands: GateRequirements, now: ModelResult, before: ModelResult) -> Part:
    """By score or accuracy if both have them, else by the loss on the held-out rows."""
    most = f"by more than {demands.max_regression:.0%} of it"
    asked = f"at most {demands.max_regression:.0%} worse than the baseline"
    mean = (
        (now.scores.mean if now.scores else None),
        (before.scores.mean if before.scores else None),
    )
    for name, (ours, theirs), form in (
        ("mean score", mean, "{:.3g}"),
        ("accuracy", (now.score.accuracy, before.score.accuracy), "{:.1%}"),
    ):
        if ours is not None and theirs is not None:
            if ours >= theirs * (1 - demands.max_regression):
                return asked, ""
            said = f"{name} {form.format(ours)} is below the baseline's {form.format(theirs)}"
            return asked, f"{said} {most}"
    if now.loss is not None and before.loss is not None:
        if now.loss <= before.loss * (1 + demands.max_regression):  # False for NaN
            return asked, ""
        return asked, (f"loss {loss(now.loss)} is above the baseline's {loss(before.loss)} {most}")
    return asked, "the baseline could not be compared: no answer of one of the two was judged"

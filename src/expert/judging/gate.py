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
    parts: list[tuple[str, str]] = []
    """Requirements, each with the reason against; "" if it is met."""
    most = f"at most {MAX_SHARE_WITHOUT_ORACLE:.0%} may"
    if (scores := now.scores) is not None:
        without, fault = scores.cases - scores.scored, ""
        if without > MAX_SHARE_WITHOUT_ORACLE * scores.cases or scores.mean is None:
            fault = f"{without} of {scores.cases} cases have no score of the judge command; {most}"
        elif scores.mean < demands.min_score:
            fault = f"mean score {scores.mean:.3g} is below {demands.min_score:g}"
        asked = f"mean score of at least {demands.min_score:g} by the judge command"
        parts.append((asked, fault))
    elif now.score.cases:
        score, least, fault = now.score, demands.min_accuracy, ""
        if score.share_without_oracle > MAX_SHARE_WITHOUT_ORACLE:
            fault = f"{score.without_oracle} of {score.cases} cases have no oracle, "
            fault += f"{score.share_without_oracle:.1%}; {most}"
        elif score.accuracy is not None and score.accuracy < least:
            fault = f"accuracy {score.accuracy:.1%} is below {least:.1%}"
        parts.append((f"accuracy of at least {least:.1%}", fault))
    if base is not None:
        least, asked_for = demands.min_improvement, demands.min_token_accuracy
        by, fault = f" by at least {least:.1%} of it" if least else "", ""
        if now.loss is None or base.loss is None:
            fault = "the loss on the held-out answers is not a number"
        elif not (now.loss < base.loss and now.loss <= base.loss * (1 - least)):  # also for NaN
            fault = f"loss {loss(now.loss)} is not below the base's {loss(base.loss)}{by}"
        parts.append((f"loss on the held-out answers below the base's{by}", fault))
        share = base.token_accuracy if asked_for is None else asked_for
        whose, fault = "the base's " if asked_for is None else "", ""
        if now.token_accuracy is not None and share is not None and now.token_accuracy < share:
            fault = f"token accuracy {now.token_accuracy:.1%} is below {whose}{share:.1%}"
        parts.append((f"token accuracy of at least {whose.strip() or f'{share:.1%}'}", fault))
    if before is not None:
        asked = f"at most {demands.max_regression:.0%} worse than the baseline"
        parts.append((asked, _regression(demands.max_regression, now, before)))
    reasons = tuple(fault for _, fault in parts if fault)
    passed = not reasons if parts else None
    return Gate(passed=passed, reasons=reasons, asked=tuple(asked for asked, _ in parts))


def _regression(most: float, now: ModelResult, before: ModelResult) -> str:
    """How much worse than the baseline, by score or accuracy if both have them, else by the loss on
    the held-out rows; "" if not by more than `most`."""
    means = [each.scores.mean if each.scores else None for each in (now, before)]
    for name, (ours, theirs), form in (
        ("mean score", means, "{:.3g}"),
        ("accuracy", (now.score.accuracy, before.score.accuracy), "{:.1%}"),
    ):
        if ours is not None and theirs is not None:
            below = f"{name} {form.format(ours)} is below the baseline's {form.format(theirs)}"
            return "" if ours >= theirs * (1 - most) else f"{below} by more than {most:.0%} of it"
    if now.loss is None or before.loss is None:
        return "the baseline could not be compared: no answer of one of the two was judged"
    if now.loss <= before.loss * (1 + most):  # False for NaN
        return ""
    above = f"loss {loss(now.loss)} is above the baseline's {loss(before.loss)}"
    return f"{above} by more than {most:.0%} of it"

"""The quality gate: whether an expert is good enough to be released."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from expert.core.text import counted, loss
from expert.judging.judge_command import MIN_SCORE
from expert.judging.score import Score, loss_reduction, rows_needed, wilson

MIN_ACCURACY = 0.95
MIN_IMPROVEMENT = 0.05
"""Nearly any training lowers the loss a little: the first steps teach the format of the answers."""
MIN_OPEN_ROWS = 30
"""With fewer rows the interval of the loss means little."""
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
    """Of the judged answers; the accuracy itself is compared. Its interval decides how many rows
    are needed."""
    max_regression: float = MAX_REGRESSION
    """How much worse than the baseline it may be, as a share of the baseline's accuracy."""
    min_improvement: float = MIN_IMPROVEMENT
    """For open text: required reduction of the loss, as a share of the base's loss. Its 95 %
    interval must lie above."""
    min_token_accuracy: float | None = None
    """For open text: required share of correct tokens; None: at least the base's share."""
    min_score: float = MIN_SCORE
    """Required mean score of a judge command."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    mean: float | None
    scored: int
    cases: int
    rows: int
    """Distinct rows behind the scores."""


@dataclass(frozen=True, kw_only=True)
class ModelResult:
    loss: float | None
    score: Score = field(default_factory=Score)
    token_accuracy: float | None = None
    scores: Scores | None = None
    """Set if a judge command scored the answers."""
    row_losses: Sequence[float] = ()
    """For open text: the loss of every row, in the same order as the base's."""
    unusable: str = ""
    """For open text: why the answers are unusable, whatever their loss."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The verdict, the requirements, and the reasons against; no reasons if it passes."""

    passed: bool | None
    """None: there were too few rows to tell, or, without reasons, nothing to judge: neither answers
    nor a baseline."""
    reasons: tuple[str, ...]
    asked: tuple[str, ...] = ()

    @property
    def undecided(self) -> bool:
        """Whether there were too few rows to tell."""
        return self.passed is None and bool(self.reasons)


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
    unknown = ""
    """Why it cannot be told whether one is met."""
    most = f"at most {MAX_SHARE_WITHOUT_ORACLE:.0%} may"
    if (scores := now.scores) is not None:
        without, fault = scores.cases - scores.scored, ""
        if without > MAX_SHARE_WITHOUT_ORACLE * scores.cases or scores.mean is None:
            fault = f"{without} of {scores.cases} cases have no score of the judge command; {most}"
        elif unknown := _too_few("mean score", scores.mean, scores.rows, demands.min_score):
            pass
        elif scores.mean < demands.min_score:
            fault = f"mean score {scores.mean:.3g} is below {demands.min_score:g}"
        asked = f"mean score of at least {demands.min_score:g} by the judge command"
        parts.append((asked, fault))
    elif now.score.cases:
        score, least, fault = now.score, demands.min_accuracy, ""
        if score.share_without_oracle > MAX_SHARE_WITHOUT_ORACLE:
            fault = f"{score.without_oracle} of {score.cases} cases have no oracle, "
            fault += f"{score.share_without_oracle:.1%}; {most}"
        elif unknown := _too_few("accuracy", score.accuracy, score.sample, least):
            pass
        elif score.accuracy is not None and score.accuracy < least:
            fault = f"accuracy {score.accuracy:.1%} is below {least:.1%}"
        parts.append((f"accuracy of at least {least:.1%}", fault))
    if base is not None:
        least, asked_for = demands.min_improvement, demands.min_token_accuracy
        by = f" by at least {least:.1%} of it" if least else ""
        fault, few = _lower_loss(now, base, least, by)
        unknown = unknown or few
        parts.append((f"loss on the held-out answers below the base's{by}", fault))
        parts.append(("answers that are not empty, repetitive or all the same", now.unusable))
        share = base.token_accuracy if asked_for is None else asked_for
        whose, fault = "the base's " if asked_for is None else "", ""
        if now.token_accuracy is not None and share is not None and now.token_accuracy < share:
            fault = f"token accuracy {now.token_accuracy:.1%} is below {whose}{share:.1%}"
        parts.append((f"token accuracy of at least {whose.strip() or f'{share:.1%}'}", fault))
    if before is not None:
        asked = f"at most {demands.max_regression:.0%} worse than the baseline"
        parts.append((asked, _regression(demands.max_regression, now, before)))
    reasons = tuple(fault for _, fault in parts if fault)
    passed = False if reasons else None if unknown or not parts else True
    reasons = (unknown,) if unknown and not reasons else reasons
    return Gate(passed=passed, reasons=reasons, asked=tuple(asked for asked, _ in parts))


def _too_few(what: str, share: float | None, rows: int, least: float) -> str:
    """Why so few rows cannot show that a share is at least `least`, or ""; a share whose interval
    lies below it fails however few they are."""
    needed = rows_needed(least)
    if share is None or rows >= needed:
        return ""
    low, high = wilson(share * rows, rows)
    if high < least:
        return ""
    seen = f"{counted(rows, 'row')}: {what} {low:.1%} to {high:.1%}"
    return f"{seen}; to show {least:.1%} takes {needed} rows"


def _lower_loss(now: ModelResult, base: ModelResult, least: float, by: str) -> tuple[str, str]:
    """Why the loss is not below the base's by `least` of it, and why that cannot be told; "" each
    if its interval lies above `least`."""
    if now.loss is None or base.loss is None or not abs(now.loss) < float("inf"):
        return "the loss on the held-out answers is not a number", ""
    rows, found = len(base.row_losses), loss_reduction(now.row_losses, base.row_losses)
    if found is None:
        return "", f"{counted(rows, 'row')}: too few to compare losses; at least {MIN_OPEN_ROWS}"
    share, (low, high) = found
    text = f"loss {loss(now.loss)}, {share:.1%} ({low:.1%} to {high:.1%}) below the base's"
    if share <= 0 or (high < least and rows >= MIN_OPEN_ROWS):
        text = f"loss {loss(now.loss)} is not below the base's {loss(base.loss)}{by}"
        return f"{text} (reduction {low:.1%} to {high:.1%}, 95 % interval)", ""
    if rows < MIN_OPEN_ROWS:
        return "", f"{text} on {counted(rows, 'row')}: too few; at least {MIN_OPEN_ROWS}"
    return "", "" if low > least else f"{text}; {least:.1%} is not certain"


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

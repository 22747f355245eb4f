"""Answers held to the checks of `expert validate`, for tests and for the baseline."""

from __future__ import annotations

from collections.abc import Sequence

from data_making.rows import Made
from expert.judging.cases import Case
from expert.judging.oracles.oracle import Judgement, JudgeOptions, oracle_for


def judge(domain: str, row: Made, answer: str) -> Judgement:
    """What the oracle of a domain says of an answer."""
    case = Case(
        id=row.task,
        turns=(("user", row.prompt),),
        expected=row.output,
        task=row.task,
        check=row.check,
    )
    return oracle_for(domain)(case, answer, JudgeOptions())


def share_right(domain: str, rows: Sequence[Made], answers: Sequence[str]) -> float:
    """The share of answers that pass; what has no oracle does not."""
    pairs = zip(rows, answers, strict=True)
    return sum(judge(domain, row, answer).passed is True for row, answer in pairs) / len(rows)

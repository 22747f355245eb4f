"""Open text: many answers are right and a comparison cannot decide; the loss is used instead."""

from __future__ import annotations

from expert.judging.cases import Case
from expert.judging.oracles.oracle import Judgement, JudgeOptions

OPEN_KIND = "open"
"""Kind of a judgement that is neither right nor wrong and does not count for accuracy."""


def judge(case: Case, answer: str, how: JudgeOptions) -> Judgement:
    """Neither right nor wrong, whatever the answer."""
    how.begin()
    return Judgement(passed=None, reason="", kind=OPEN_KIND)

"""Plain text: the answer equals the expected one, except for whitespace. Open text: many answers
are right and a comparison cannot decide; the loss is used instead."""

from __future__ import annotations

from expert.judging.answers import normalised
from expert.judging.cases import Case
from expert.judging.oracles.oracle import Judgement, JudgeOptions, right, wrong

OPEN_KIND = "open"
"""Kind of a judgement that is neither right nor wrong and does not count for accuracy."""


def judge(case: Case, answer: str, how: JudgeOptions) -> Judgement:
    """For tasks with one right answer; others need a domain with its own oracle."""
    how.begin()
    same = answer == case.expected
    if not how.strict:
        same = normalised(answer) == normalised(case.expected)
    return right("equal") if same else wrong("equal", "the text differs from the expected one")


def judge_open(case: Case, answer: str, how: JudgeOptions) -> Judgement:
    """Neither right nor wrong, whatever the answer."""
    how.begin()
    return Judgement(passed=None, reason="", kind=OPEN_KIND)

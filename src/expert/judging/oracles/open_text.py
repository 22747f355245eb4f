"""Open text: many answers are right, and no text alone tells which; the loss on it does."""

from __future__ import annotations

from expert.judging.cases import Case
from expert.judging.oracles.oracle import Begin, Judgement

OPEN_KIND = "open"
"""Kind of a judgement that is none: the case is part of no accuracy."""


class OpenOracle:
    """Says of no answer that it is right or wrong."""

    def __init__(self, *, strict: bool = False) -> None: ...

    def judge(self, case: Case, answer: str, begin: Begin) -> Judgement:
        begin()
        return Judgement(passed=None, reason="", kind=OPEN_KIND)

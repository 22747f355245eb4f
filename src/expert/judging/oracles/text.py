"""Plain text: the answer is the expected one but for white space."""

from __future__ import annotations

from expert.judging.answers import normalised
from expert.judging.cases import Case
from expert.judging.oracles.oracle import Begin, Judgement, right, wrong


class TextOracle:
    """For tasks with one right answer; others need a domain that can tell."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict

    def judge(self, case: Case, answer: str, begin: Begin) -> Judgement:
        begin()
        same = (
            answer == case.expected
            if self._strict
            else normalised(answer) == normalised(case.expected)
        )
        return right("equal") if same else wrong("equal", "the text is another one")

"""Several answers to each prompt, of which the one is taken that most of them agree with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from expert.answer.writer import Answer
from expert.judging.answers import normalised
from expert.judging.domain import TEXT
from expert.judging.judge_pool import JudgeProcess, judge_all
from expert.judging.oracles.calls import CALLS

if TYPE_CHECKING:
    from expert.judging.cases import Case

TEMPERATURE = 0.7
"""Of the answers that vote, unless the manifest samples anyway."""


def vote(
    cases: Sequence[Case],
    answers: Sequence[Sequence[Answer]],
    *,
    domain: str,
    strict: bool = False,
    processes: Sequence[JudgeProcess] = (),
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> list[Answer]:
    """For each case the answer whose result most of its answers share; of equals the first.

    Two answers agree if the judge of the case takes each for right where the other is expected:
    queries by what they return, JSON by its value, text and calls as they stand. The expected
    answer has no part in it. `processes`: as in `judge_all`.
    """
    # The check of calls holds the expected ones.
    cases = [replace(e, domain=TEXT, check={}) if e.domain == CALLS else e for e in cases]
    votes = [Counter(normalised(each.text) for each in own if each.ended) for own in answers]
    texts = [{normalised(each.text): each.text for each in own} for own in answers]
    pairs = [
        (place, one, other)
        for place, own in enumerate(votes)
        if 2 * max(own.values(), default=0) <= own.total()  # else one text has won
        for one, other in combinations(own, 2)
    ]
    both = [(place, *two) for place, one, other in pairs for two in ((one, other), (other, one))]
    verdicts = judge_all(
        [replace(cases[place], expected=texts[place][one]) for place, one, _ in both],
        [texts[place][other] for place, _, other in both],
        domain=domain,
        strict=strict,
        processes=processes,
        tell=tell,
    )
    agreeing = [Counter(own) for own in votes]
    for (place, one, other), there, back in zip(pairs, verdicts[::2], verdicts[1::2], strict=True):
        if there.passed and back.passed:
            agreeing[place][one] += votes[place][other]
            agreeing[place][other] += votes[place][one]
    return [
        max(own, key=lambda each: (each.ended, count[normalised(each.text)]))
        for own, count in zip(answers, agreeing, strict=True)
    ]

"""Prompts that stand in the test set too, or nearly: answers to them would be learnt by heart."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

Asked = tuple[str, str]
"""A prompt, and the answer that is expected."""

WORDS = 3
"""Neighbouring words that are compared as one."""
NEARLY = 0.8
"""Share of the uncommon word groups of two prompts that is in both of a near-copy."""
COMMON_SHARE, COMMON_LEAST = 0.01, 10
"""Word groups of more tests than this are of the form of the prompts, such as a schema that many
questions share, and say nothing about copies."""
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+|!?[<>=]+|[+*/%-]")
"""A word, a character of a script without spaces, or an operator: `a < b` does not ask `a > b`."""


def overlapping(prompts: Sequence[Asked], tests: Sequence[Asked]) -> list[bool]:
    """Whether each prompt is one of `tests` but for case and punctuation, or nearly one and the
    same is expected: two prompts of one form that differ in a name ask for different answers."""
    known, groups_of, answers = set[tuple[str, ...]](), list[set[str]](), list[list[str]]()
    for prompt, answer in tests:
        known.add(tuple(words := _words(prompt)))
        groups_of.append(_groups(words))
        answers.append(_words(answer))
    count = Counter(group for groups in groups_of for group in groups)
    common = max(COMMON_LEAST, COMMON_SHARE * len(tests))
    uncommon = [{group for group in groups if count[group] <= common} for groups in groups_of]
    places: dict[str, list[int]] = {}
    for place, groups in enumerate(uncommon):
        # Two sets this similar share one of the first groups of either, in any fixed order.
        for group in _first(groups, count):
            places.setdefault(group, []).append(place)

    def is_known(prompt: str, answer: str) -> bool:
        words = _words(prompt)
        if tuple(words) in known:
            return True
        own = {group for group in _groups(words) if count[group] <= common}
        candidates = {place for group in _first(own, count) for place in places.get(group, ())}
        expected = _words(answer) if candidates else []
        return any(
            answers[place] == expected and _similarity(own, uncommon[place]) >= NEARLY
            for place in candidates
        )

    return [is_known(prompt, answer) for prompt, answer in prompts]


def _words(text: str) -> list[str]:
    return WORD.findall(text.casefold())


def _groups(words: Sequence[str]) -> set[str]:
    return {" ".join(words[at : at + WORDS]) for at in range(len(words) - WORDS + 1)}


def _first(groups: Iterable[str], count: Counter[str]) -> list[str]:
    """As many of the rarest groups as two similar sets cannot both lack."""
    rarest = sorted(groups, key=lambda group: (count[group], group))
    return rarest[: len(rarest) - math.ceil(NEARLY * len(rarest)) + 1] if rarest else []


def _similarity(one: set[str], other: set[str]) -> float:
    return len(one & other) / len(one | other) if one or other else 0.0

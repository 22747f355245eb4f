"""Prompts that stand in the test set too, or nearly: answers to them would be learnt by heart."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

WORDS = 3
"""Neighbouring words that are compared as one."""
NEARLY = 0.8
"""Share of the uncommon word groups of two prompts that is in both of a near-copy."""
COMMON_SHARE, COMMON_LEAST = 0.01, 10
"""Word groups of more prompts than this are of the form of the prompts, such as a schema that
hundreds of questions share, and say nothing about copies."""


def overlapping(prompts: Sequence[str], tests: Sequence[str]) -> list[bool]:
    """Whether each prompt is, but for case and punctuation, or nearly, one of `tests`."""
    ours, theirs = ([_words(text) for text in texts] for texts in (prompts, tests))
    known = {tuple(words) for words in theirs}
    groups, of_tests = ([_groups(words) for words in each] for each in (ours, theirs))
    count = Counter(group for each in (*groups, *of_tests) for group in each)
    common = max(COMMON_LEAST, COMMON_SHARE * (len(groups) + len(of_tests)))
    places: dict[str, list[int]] = {}
    uncommon = [{group for group in each if count[group] <= common} for each in of_tests]
    for place, each in enumerate(uncommon):
        # Two sets this similar share one of the first groups of either, in any fixed order.
        for group in _first(each, count):
            places.setdefault(group, []).append(place)
    found = []
    for words, each in zip(ours, groups, strict=True):
        own = {group for group in each if count[group] <= common}
        candidates = {place for group in _first(own, count) for place in places.get(group, ())}
        near = any(_similarity(own, uncommon[place]) >= NEARLY for place in candidates)
        found.append(tuple(words) in known or near)
    return found


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _groups(words: Sequence[str]) -> set[str]:
    return {" ".join(words[at : at + WORDS]) for at in range(len(words) - WORDS + 1)}


def _first(groups: Iterable[str], count: Counter[str]) -> list[str]:
    """As many of the rarest groups as two similar sets cannot both lack."""
    rarest = sorted(groups, key=lambda group: (count[group], group))
    return rarest[: len(rarest) - math.ceil(NEARLY * len(rarest)) + 1] if rarest else []


def _similarity(one: set[str], other: set[str]) -> float:
    return len(one & other) / len(one | other) if one or other else 0.0

"""Whether the answers of a set are short and closed, or open text: by the expected answers.

A label, a number or a date is right or wrong letter by letter. Of a paragraph there are as many
right versions as writers: whether a model has the one that stands in the row says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from expert.judging.answers import normalised

TEXT, OPEN = "text", "open"
MOST_WORDS = 5
MOST_CHARACTERS = 60
"""Of a short answer: a date, a number with its unit, a name, a label. Some languages write no
blanks between words."""
NEARLY_ALL = 0.9
REPEATED = 0.2
"""Different answers as a share of all, at most, where they are taken for labels …"""
ENOUGH_TO_REPEAT = 20
LONGEST_LABEL = 200
"""… of at most so many characters: one sentence."""


def kind_of_answers(expected: Sequence[str]) -> tuple[str, str]:
    """ "text" for answers that are held to the expected one, "open" for others; and why."""
    answers = [normalised(text) for text in expected]
    count, different = len(answers), len(set(answers))
    short = sum(
        len(text.split()) <= MOST_WORDS and len(text) <= MOST_CHARACTERS for text in answers
    )
    if short >= NEARLY_ALL * count:
        return TEXT, f"{short:,} of {count:,} expected answers have at most {MOST_WORDS} words"
    labels = sum(len(text) <= LONGEST_LABEL for text in answers) >= NEARLY_ALL * count
    if count >= ENOUGH_TO_REPEAT and different <= REPEATED * count and labels:
        return TEXT, f"{count:,} expected answers are only {different:,} different ones"
    return OPEN, (
        f"{count - short:,} of {count:,} expected answers are longer than {MOST_WORDS} words or "
        f"{MOST_CHARACTERS} characters, and {different:,} are different: no exact match can tell"
    )

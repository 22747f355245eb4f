"""Answers are what a model wrote: text of any length and kind, read with care."""

from __future__ import annotations

import re

MOST_CHARACTERS = 100_000
"""Longer answers are not looked at: no parser here needs to see more."""
DEEPEST = 200
"""Brackets inside brackets: far more than people write, far less than breaks a parser."""

_FENCE = re.compile(r"\s*```[\w+-]*[ \t]*\n(.*?)\n?[ \t]*```\s*", re.DOTALL)
_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")


def unfenced(answer: str) -> str:
    """The inside of a Markdown fence around the whole answer; without one the answer itself."""
    found = _FENCE.fullmatch(answer)
    return found[1] if found and "```" not in found[1] else answer


def normalised(text: str) -> str:
    """The text with every run of white space as one blank."""
    return " ".join(text.split())


def unreadable(answer: str) -> str:
    """Why an answer is not given to a parser; "" where it may be."""
    if not answer.strip():
        return "the answer is empty"
    if len(answer) > MOST_CHARACTERS:
        return f"the answer has {len(answer):,} characters, more than {MOST_CHARACTERS:,}"
    if "\x00" in answer:
        return "the answer has a null character"
    if depth(answer) > DEEPEST:
        return f"the answer nests brackets more than {DEEPEST} deep"
    return ""


def depth(text: str) -> int:
    """How deep brackets nest, those in strings counted too: never less than a parser will see."""
    now = deepest = 0
    for character in text:
        if character in _OPENING:
            now += 1
            deepest = max(deepest, now)
        elif character in _CLOSING:
            now = max(0, now - 1)
    return deepest

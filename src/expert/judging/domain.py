"""Which domain the answers of an expert belong to, by what its manifest says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from expert.judging.answers import normalised

NAMES = {
    "json": "json",
    "sql": "sql",
    "cypher": "cypher",
    "neo4j": "cypher",
    "typescript": "typescript",
    "ts": "typescript",
    "tsx": "typescript",
}
WRITTEN = {**NAMES, "text": "text", "open": "open"}
"""What grammar_type may say besides. A tag like format:text does not say how to judge."""
STRICT = ("parser-strict", "schema-strict")


def domain_of(capabilities: Iterable[str], decoding: Mapping[str, Any]) -> str:
    """By grammar_type or validation of the decoding, else by a tag like language:sql; "" where the
    manifest does not say."""
    grammar = str(decoding.get("grammar_type") or "").lower().partition("-")[0]
    if grammar in WRITTEN:
        return WRITTEN[grammar]
    if decoding.get("validation") == "tsc":
        return "typescript"
    tags = (str(tag).lower().rpartition(":")[2] for tag in capabilities)
    return next((NAMES[tag] for tag in tags if tag in NAMES), "")


def is_strict(decoding: Mapping[str, Any]) -> bool:
    """Whether an answer must stand without the Markdown fence that models like to put around it."""
    return decoding.get("validation") in STRICT


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
    """ "text" for answers compared with the expected one, "open" for others; and why."""
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

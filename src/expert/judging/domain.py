"""The table of judges, and which of them an expert's answers need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from expert.judging.answers import normalised


class JudgeKind(NamedTuple):
    """The judge of a domain, and its names."""

    file: str
    """Module in judging/oracles with a function `judge(case, answer, how)`."""
    names: tuple[str, ...] = ()
    """Tags like format:json and values of grammar_type that select it."""
    packages: tuple[str, ...] = ()
    function: str = "judge"
    title: str = ""
    """Name in output, if it differs."""


JUDGES = {
    "json": JudgeKind("json_values", ("json",)),
    "sql": JudgeKind("sql", ("sql",), ("sqlglot",)),
    "cypher": JudgeKind("cypher", ("cypher", "neo4j"), ("antlr4_cypher", "ladybug")),
    "typescript": JudgeKind(
        "typescript", ("typescript", "ts", "tsx"), ("tree_sitter", "tree_sitter_typescript")
    ),
    "calls": JudgeKind("calls"),
    "text": JudgeKind("text"),
    "open": JudgeKind("text", function="judge_open", title="open text"),
}
NAMES = {name: domain for domain, kind in JUDGES.items() for name in kind.names}
WRITTEN = {**NAMES, "text": "text", "open": "open"}
"""Values of grammar_type; calls are detected in the rows."""
STRICT = ("parser-strict", "schema-strict")


def domain_of(capabilities: Iterable[str], decoding: Mapping[str, Any]) -> str:
    """By grammar_type or validation of the decoding, else by a tag like language:sql; "" if the
    manifest does not say."""
    grammar = str(decoding.get("grammar_type") or "").lower().partition("-")[0]
    if grammar in WRITTEN:
        return WRITTEN[grammar]
    if decoding.get("validation") == "tsc":
        return "typescript"
    tags = (str(tag).lower().rpartition(":")[2] for tag in capabilities)
    return next((NAMES[tag] for tag in tags if tag in NAMES), "")


def is_strict(decoding: Mapping[str, Any]) -> bool:
    """Whether a Markdown fence around an answer makes it wrong."""
    return decoding.get("validation") in STRICT


TEXT, OPEN = "text", "open"
MAX_WORDS = 5
MAX_CHARACTERS = 60
"""Limits of a short answer: a date, a number with its unit, a name, a label. Some languages write
no spaces between words."""
NEARLY_ALL = 0.9
MAX_DISTINCT_SHARE = 0.2
"""Largest share of distinct answers for them to count as labels …"""
MIN_CASES_FOR_LABELS = 20
MAX_LABEL_CHARACTERS = 200
"""… of at most this many characters: one sentence."""


def kind_of_answers(expected: Sequence[str]) -> tuple[str, str]:
    """ "text" for answers that are compared with the expected one, else "open"; and why."""
    answers = [normalised(text) for text in expected]
    count, different = len(answers), len(set(answers))
    short = sum(len(text.split()) <= MAX_WORDS and len(text) <= MAX_CHARACTERS for text in answers)
    if short >= NEARLY_ALL * count:
        return TEXT, f"{short:,} of {count:,} expected answers have at most {MAX_WORDS} words"
    labels = sum(len(text) <= MAX_LABEL_CHARACTERS for text in answers) >= NEARLY_ALL * count
    if count >= MIN_CASES_FOR_LABELS and different <= MAX_DISTINCT_SHARE * count and labels:
        return TEXT, f"{count:,} expected answers are only {different:,} different ones"
    return OPEN, (
        f"{count - short:,} of {count:,} expected answers are longer than {MAX_WORDS} words or "
        f"{MAX_CHARACTERS} characters, and {different:,} are different: an exact match cannot "
        "decide"
    )

"""TypeScript: the answer parses, and equals the expected program except for whitespace and
comments. Programs are neither compiled nor run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from expert.judging.answers import DoesNotParse, check_parseable
from expert.judging.cases import Case
from expert.judging.oracles.oracle import (
    Judgement,
    JudgeOptions,
    expected_part,
    import_optional,
    right,
    unknown,
    wrong,
)

_BETWEEN = frozenset({";", ","})
_ENDS: list[list[str]] = [[], ["}"], [")"], ["]"], [">"], ["|}"]]
_MEMBERS = frozenset({"object_type", "interface_body"})
"""Where either of those, or a newline, may separate members."""


def judge(case: Case, answer: str, how: JudgeOptions) -> Judgement:
    """`check` of a case: `tsx`, and `equals`: false if other programs are right, too, which nothing
    here can decide."""
    tsx = bool(case.check.get("tsx"))
    with expected_part("the expected answer: "):
        wanted = tokens(case.expected, tsx=tsx)
    how.begin()
    if tokens(how.inside(answer), tsx=tsx) == wanted:
        return right("equal")
    if case.check.get("equals", True):
        return wrong("equal", "the program differs from the expected one")
    return unknown("it parses and differs from the expected program, as it may")


def tokens(text: str, *, tsx: bool = False) -> list[str]:
    """The tokens of a program: no whitespace, no comments, no optional semicolons or commas, one
    kind of quotation marks; DoesNotParse if it does not parse."""
    check_parseable(text)
    tree_sitter, grammar = import_optional("tree_sitter"), import_optional("tree_sitter_typescript")
    kind = grammar.language_tsx() if tsx else grammar.language_typescript()
    parser = tree_sitter.Parser(tree_sitter.Language(kind))
    tree = parser.parse(text.encode("utf-8", "replace"))
    if tree.root_node.has_error:
        faults = (node for node in _nodes(tree) if node.is_error or node.is_missing)
        row, column = next((node.start_point for node in faults), (0, 0))
        raise DoesNotParse(f"does not parse: line {row + 1}, column {column + 1}")
    words = list(_words(tree))
    return [
        word
        for place, word in enumerate(words)
        if not (word == ";" or (word in _BETWEEN and words[place + 1 : place + 2] in _ENDS))
    ]


def _nodes(tree: Any) -> Iterator[Any]:
    """Every node, parents first, without recursion: programs may nest deeper than Python's
    stack."""
    cursor = tree.walk()
    while True:
        yield cursor.node
        if cursor.goto_first_child() or cursor.goto_next_sibling():
            continue
        while cursor.goto_parent():
            if cursor.goto_next_sibling():
                break
        else:
            return


def _words(tree: Any) -> Iterator[str]:
    for node in _nodes(tree):
        if node.type == "comment" or node.child_count:
            continue
        text = node.text.decode("utf-8", "replace")
        above = node.parent.type if node.parent is not None else ""
        if text in _BETWEEN and above in _MEMBERS:
            continue
        if text:
            yield '"' if text == "'" and above == "string" else text

"""TypeScript: the answer parses, and equals the expected program except for whitespace and
comments.

If a case allows other right answers (`equals: false`), the compiler decides: see typecheck.
Programs are never run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
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

TYPES = "types"
"""Kind of a judgement that the compiler may still make."""
_BETWEEN = frozenset({";", ","})
_ENDS: list[list[str]] = [[], ["}"], [")"], ["]"], [">"], ["|}"]]
_MEMBERS = frozenset({"object_type", "interface_body"})
"""Where either of those, or a newline, may separate members."""


def judge(case: Case, answer: str, how: JudgeOptions) -> Judgement:
    """`check` of a case: `equals` (true by default), `tsx`, and for the compiler `before` and
    `after`, TypeScript around the answer that uses its declarations."""
    tsx = bool(case.check.get("tsx"))
    with expected_part("the expected answer: "):
        wanted = tokens(case.expected, tsx=tsx)
    how.begin()
    if tokens(how.inside(answer), tsx=tsx) == wanted:
        return right("equal")
    if case.check.get("equals", True):
        return wrong("equal", "the program differs from the expected one")
    for program in (case.check.get("before"), case.check.get("after"), case.expected):
        if outside := external_reference(str(program or ""), tsx=tsx):
            return unknown(f"the case itself {outside}")
    if outside := external_reference(how.inside(answer), tsx=tsx):
        return wrong(TYPES, outside)
    return replace(unknown("it parses; only the compiler tsc can check its types"), kind=TYPES)


def tokens(text: str, *, tsx: bool = False) -> list[str]:
    """The tokens of a program: no whitespace, no comments, no optional semicolons or commas, one
    kind of quotation marks; DoesNotParse if it does not parse."""
    check_parseable(text)
    tree = _tree(text, tsx=tsx)
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


def external_reference(text: str, *, tsx: bool = False) -> str:
    """What a program takes from other files, or changes for the other programs compiled with it; ""
    if it is self-contained. Packages by name do not exist here and need no check."""
    tree = _tree(text, tsx=tsx)
    for node in _nodes(tree):
        said = node.text.decode("utf-8", "replace") if node.child_count == 0 else ""
        if node.type == "comment" and _DIRECTIVE.match(said):
            return f"names another file: {said[:60]}"
        above = node.parent.type if node.parent is not None else ""
        if said == "global" and above == "ambient_declaration":
            return "changes what all programs share: declare global"
        if node.type == "string" and _is_path(node):
            return f"imports another file: {node.text.decode('utf-8', 'replace')[:60]}"
    return ""


_DIRECTIVE = re.compile(r"\s*///\s*<\s*(reference|amd)", re.IGNORECASE)
_IMPORTING = frozenset({"import_statement", "export_statement", "import_require_clause", "module"})


def _is_path(node: Any) -> bool:
    """Whether a string names a module by its path: "./x", "/x", "C:/x", "file:…"."""
    path = node.text.decode("utf-8", "replace").strip("'\"`")
    if not re.match(r"[./\\~]|\w+:", path) or path.startswith("node:"):
        return False
    for _ in range(3):
        node = node.parent
        if node is None:
            return False
        called = node.children[0].text if node.children else b""
        if node.type in _IMPORTING or called in (b"import", b"require"):
            return True
    return False


def _tree(text: str, *, tsx: bool) -> Any:
    tree_sitter, grammar = import_optional("tree_sitter"), import_optional("tree_sitter_typescript")
    kind = grammar.language_tsx() if tsx else grammar.language_typescript()
    parser = tree_sitter.Parser(tree_sitter.Language(kind))
    return parser.parse(text.encode("utf-8", "replace"))


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

"""No test asserts a sentence of the product itself; sentences are in tests/golden/wording.toml."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType

from tests.wording import SENTENCES, TABLES, wording

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src" / "expert"

# Calls whose arguments are expected text rather than input.
EXPECTING = {
    *("raises", "warns", "parametrize", "param", "Case", "Shape"),
    *("startswith", "endswith", "count", "index", "split", "partition", "removeprefix"),
}
# Keywords that label or explain a test.
LABELS = {"id", "ids", "reason", "exclude"}

# How text begins that tests feed in, and whose words the source happens to contain too.
INPUTS = (
    *("SELECT ", "select ", "CREATE ", "MATCH ", "import ", "\nimport ", "def ", "# "),
    *("<|im_start|>", "To be, or not", "What is the capital", "Question: why", "The ferry"),
    *("The text is about", "rows of a table", "the disk is gone", "the same numbers"),
    *("ERROR: ", "Failed to load"),
)


def runs_of_words(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield each three words of `text` that follow one another, separated by nothing but space."""
    run: list[str] = []
    for token in text.replace("\\", "").split():
        word = token.strip(".,;:!?()[]'\"`*^$“”…").lower()
        run = [*run[-2:], word] if re.fullmatch(r"[a-z]+(?:['’-][a-z]+)*", word) else []
        if len(run) == 3:
            yield run[0], run[1], run[2]


def constants(code: CodeType) -> Iterator[str]:
    waiting: list[object] = [code]
    while waiting:
        value = waiting.pop()
        if isinstance(value, CodeType):
            waiting.extend(value.co_consts)
        elif isinstance(value, tuple | frozenset):
            waiting.extend(value)
        elif isinstance(value, str) and " " in value:
            yield value


@cache
def product() -> set[tuple[str, str, str]]:
    """Every run of three words in a string of the source, docstrings left out (optimize=2), and in
    its tables."""
    code = (
        text
        for path in SOURCE.rglob("*.py")
        for text in constants(compile(path.read_bytes(), str(path), "exec", optimize=2))
    )
    tables = (tomllib.loads(path.read_text("utf-8")) for path in SOURCE.rglob("*.toml"))
    texts = (
        text
        for table in tables
        for row in table.values()
        for text in row.values()
        if isinstance(text, str)
    )
    return {run for text in (*code, *texts) for run in runs_of_words(text)}


def text_of(node: ast.AST) -> str | None:
    """Return the text of a string or f-string, with a mark in place of each value."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "\0" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def expected_texts(tree: ast.Module) -> Iterator[ast.Constant | ast.JoinedStr]:
    """Yield the strings that stand where a test puts what it expects.

    The number beside a node: 2 within a comparison, an assert or a `match=`; 1 within a list, a
    name or parameters that a comparison may use later; else 0.
    """
    waiting: list[tuple[ast.AST, int]] = [(tree, 0)]
    while waiting:
        node, how = waiting.pop()
        if isinstance(node, ast.Constant | ast.JoinedStr):
            if how and " " in (text_of(node) or ""):
                yield node
            continue
        for field in node._fields:
            value = getattr(node, field, None)
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST) and child._fields:
                    waiting.append((child, _how(node, field, child, how)))


def _how(node: ast.AST, field: str, child: ast.AST, how: int) -> int:
    match node:
        case ast.Assert() if field == "test":
            return 2
        case ast.Compare():
            return 2
        case ast.For() | ast.Assign() | ast.AnnAssign() if field in ("iter", "value"):
            return 1
        case ast.Dict() if how == 1 and text_of(child) is not None:  # an event, a row, settings
            return 0
        case ast.keyword():
            return 2 if node.arg == "match" else 0 if node.arg in LABELS else how
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if child is not node.func:
            if isinstance(child, ast.keyword) and child.arg == "match":
                return 2
            return max(how, 1) if name in EXPECTING else 2 if how == 2 and name[0].isupper() else 0
        case ast.stmt():
            return 0
    return how


def sentences(tree: ast.Module) -> Iterator[ast.Constant | ast.JoinedStr]:
    """Yield each string in `tree` that asserts a sentence of the product."""
    known = product()
    for node in expected_texts(tree):
        text = text_of(node) or ""
        if not text.startswith(INPUTS) and not known.isdisjoint(runs_of_words(text)):
            yield node


def used_keys() -> set[str]:
    texts = (path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py"))
    return {key for text in texts for key in re.findall(r'\bwording\(\s*"([^"]*)"', text)}


def test_no_test_asserts_a_sentence_of_the_product_itself():
    found = [
        f"{path.relative_to(TESTS)}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted(TESTS.rglob("*.py"))
        for node in sentences(ast.parse(path.read_bytes()))
    ]
    assert found == [], "put them into tests/golden/wording.toml and assert wording(key)"


def test_a_literal_sentence_is_found_wherever_a_test_expects_it():
    sentence = wording("no-such-folder")
    for line in (
        "assert {} in output",
        "with pytest.raises(ExpertError, match={}): pass",
        "@pytest.mark.parametrize('told', [{}])\ndef test(told): ...",
        "for told in ({}, 'x'): assert told in output",
        "told = {}",
        "assert any(line.startswith({}) for line in lines)",
    ):
        for literal in (repr(sentence), f"f{'{path}: ' + sentence!r}"):
            assert len(list(sentences(ast.parse(line.format(literal))))) == 1, line
    for line in ("raise OSError({})", "pytest.skip({})", "read({})", "event = {{'why': {}}}"):
        assert list(sentences(ast.parse(line.format(repr(sentence))))) == [], line


def test_every_key_a_test_uses_is_in_the_list():
    assert sorted(used_keys() - SENTENCES.keys()) == []


def test_every_sentence_in_the_list_is_asserted_under_a_key_of_its_own():
    assert sorted(SENTENCES.keys() - used_keys()) == []
    assert sum(map(len, TABLES.values())) == len(SENTENCES)


def test_every_sentence_in_the_list_has_words_of_the_product():
    """A sentence that is asserted to be absent would otherwise stay absent when it is reworded."""
    known = product()
    said = {key: re.sub(r"\{\w[^{} ]*\}", "\0", text) for key, text in SENTENCES.items()}
    assert [key for key, text in said.items() if known.isdisjoint(runs_of_words(text))] == []

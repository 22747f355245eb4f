"""Parses YAML with a line for every value and its comments; refuses tags and endless aliases.

Not ruamel.yaml: it reads a 200-line manifest in 102 ms (this parser: 3.4 ms), writes the texts on,
no, yes and the number 2e-05 without quotes, which other readers misread, reads 012 as 12, and its
comments would still have to be moved to our items (it would save about 80 lines).
"""

from __future__ import annotations

import math
import re
from collections import deque
from typing import Any, NoReturn

import yaml

from expert.core.errors import ManifestError, Problem
from expert.manifest.text.item import MAX_DEPTH, MAX_ITEMS, Item, Scalar, add_entry, join

_CORE_TAG = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
# YAML 1.1 wants a dot in 2.0e-5; people and YAML 1.2 write 2e-5.
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?")
_LEADING_ZERO = re.compile(r"[-+]?0\d")
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_TRAILING_COMMENT = re.compile(r"(?:[|>][-+\d]*\s|,)?\s*(#.*)$")
_NULLS = {"", "~", "null", "Null", "NULL"}
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(text: str, source: str) -> tuple[Item, list[Problem], list[str]]:
    """The tree of items, problems that did not stop the parser, and comments at the file's end."""
    try:
        _refuse_hostile(text, source)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        _refuse_syntax(source, text, error)
    except UnicodeEncodeError:
        raise ManifestError(source, [Problem("", "not YAML: half of a surrogate pair")]) from None
    if node is None:
        return Item(None), [], []
    builder = _Builder(text, source)
    root = builder.item(node, "", 0)
    return root, builder.problems, builder.attach_comments()


def _refuse_hostile(text: str, source: str) -> None:
    """Refuse tags and huge or deep documents before composing, which would recurse in C."""
    depth = nodes = 0
    for event in yaml.parse(text, Loader=_Loader):
        what, fix = "", "this is not a manifest"
        nodes += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if getattr(event, "tag", None) is not None:
            tag = event.tag.replace(_CORE_TAG, "!!")[:60]
            what, fix = f"the YAML tag {tag} is refused", "write a plain value"
        elif depth > MAX_DEPTH + 1:
            what = f"nested more than {MAX_DEPTH} deep"
        elif nodes > 2 * MAX_ITEMS:  # keys are nodes too
            what = f"more than {MAX_ITEMS:,} values"
        if what:
            line = event.start_mark.line + 1
            raise ManifestError(source, [Problem("", what, fix, line)])


def read_scalar(text: str) -> Scalar:
    """What a bare YAML word means: null, bool, number or text. Dates stay text."""
    if text in _NULLS:
        return None
    if text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    if len(text) <= 40 and not _LEADING_ZERO.match(text):
        if _INTEGER.fullmatch(text):
            return int(text.replace("_", ""))
        if _FLOAT.fullmatch(text):
            value = float(text.replace("_", ""))
            if math.isfinite(value):
                return value
    return text


def _refuse_syntax(source: str, text: str, error: yaml.YAMLError) -> NoReturn:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    is_open = "unexpected end of stream" in str(getattr(error, "problem", None))
    if is_open:
        mark = getattr(error, "context_mark", None) or mark  # where the quote begins
    lines = text.splitlines()
    line = min(mark.line, len(lines) - 1) + 1 if mark else None  # the end is past the last line
    what = str(getattr(error, "problem", None) or getattr(error, "reason", None) or "broken YAML")
    here = lines[line - 1] if line else ""
    fix = ""
    if "\t" in here[: len(here) - len(here.lstrip())] or "'\\t'" in what:
        fix = "YAML is indented with spaces, not tabs"
    elif re.search(r"^(@\w|class \w+.*:|import \w|from \w[\w.]* import )", text, re.MULTILINE):
        fix = "a program is not read: keep its `name: type = value` lines, without the class"
    elif is_open:
        fix = "a quote is not closed"
    elif "could not find expected ':'" in what:
        fix = "write key: value"
    elif "mapping values are not allowed" in what:
        fix = 'put the text that contains ": " in quotes, or fix the indentation'
        above = lines[line - 2].strip() if line and line > 1 else ":"
        if ":" not in above and not above.startswith(("#", "-")):
            fix = f"a colon is missing on line {(line or 0) - 1}, or the indentation is wrong"
    elif "single document" in str(error) or "another document" in what:
        what, fix = "more than one document in the file", "keep one; remove the '---' lines"
    raise ManifestError(source, [Problem("", f"not YAML: {what}", fix, line)]) from None


class _Builder:
    def __init__(self, text: str, source: str) -> None:
        self.lines = text.splitlines()
        self.source = source
        self.problems: list[Problem] = []
        self.items = 0
        self.entries: list[Item] = []
        self.text_lines: set[int] = set()

    def fail(self, node: yaml.Node, path: str, what: str, fix: str = "") -> NoReturn:
        line = node.start_mark.line + 1
        raise ManifestError(self.source, [Problem(path, what, fix, line)])

    def item(self, node: yaml.Node, path: str, depth: int) -> Item:
        self.items += 1
        if self.items > MAX_ITEMS:
            self.fail(node, "", f"more than {MAX_ITEMS:,} values", "this is not a manifest")
        if depth > MAX_DEPTH:
            self.fail(node, "", f"nested more than {MAX_DEPTH} deep", "this is not a manifest")
        item = Item(None, path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            item.value = self.mapping(node, path, depth)
        elif isinstance(node, yaml.SequenceNode):
            item.value = self.sequence(node, path, depth)
        else:
            assert isinstance(node, yaml.ScalarNode)
            item.value = self.scalar(node)
            if isinstance(item.value, str) and "\0" in item.value:
                self.fail(node, path, "a NUL character", "remove it")
        # A block text ends at the next line; its comment follows the "|".
        is_block = isinstance(node, yaml.ScalarNode) and node.style in ("|", ">")
        end = node.start_mark if is_block else node.end_mark
        item.beside = self.comment_after(end.line, end.column)
        return item

    def scalar(self, node: yaml.ScalarNode) -> Scalar:
        if not node.style:  # "" from libyaml, None from the Python parser
            return read_scalar(str(node.value))
        start, end = node.start_mark, node.end_mark
        self.text_lines.update(range(start.line + 1, end.line + (end.column > 0)))
        return str(node.value)

    def sequence(self, node: yaml.SequenceNode, path: str, depth: int) -> list[Item]:
        entries: list[Item] = []
        for child in node.value:
            entry = self.item(child, join(path, len(entries)), depth + 1)
            entries.append(entry)
            self.entries.append(entry)
        return entries

    def mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Item]:
        entries: dict[str, Item] = {}
        merged: list[Item] = []
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.fail(key_node, path, "a key must be plain text")
            key = str(key_node.value)
            if key == "<<" and not key_node.style:
                merged += self.merged(value_node, path, depth + 1)
                continue
            item = self.item(value_node, join(path, key), depth + 1)
            item.line = key_node.start_mark.line + 1
            if isinstance(item.value, dict | list):
                end = key_node.end_mark
                item.beside = self.comment_after(end.line, end.column + 1) or item.beside
            add_entry(entries, key, item, self.problems)
            self.entries.append(item)
        for source in merged:
            for key, item in source.fields().items():
                entries.setdefault(key, item)
        return entries

    def merged(self, node: yaml.Node, path: str, depth: int) -> list[Item]:
        """The mappings of a `<<` key, highest precedence first."""
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in nodes:
            if not isinstance(source, yaml.MappingNode):
                self.fail(source, path, "<< merges objects only", "name an anchor of an object")
        return [self.item(source, path, depth) for source in nodes]

    def comment_after(self, line: int, column: int) -> str:
        """The comment after a value on its line; "" if other text follows."""
        if line >= len(self.lines):
            return ""
        match = _TRAILING_COMMENT.match(self.lines[line], column)
        return match[1].strip() if match else ""

    def attach_comments(self) -> list[str]:
        """Attach whole-line comments to the key below them; return those at the end of the file."""
        ordered = sorted(self.entries, key=lambda item: item.line or 0)
        waiting = deque(
            (number, line.strip())
            for number, line in enumerate(self.lines, 1)
            if line.lstrip().startswith("#") and (number - 1) not in self.text_lines
        )
        for item in ordered:
            while waiting and waiting[0][0] < (item.line or 0):
                item.above.append(waiting.popleft()[1])
        return [text for _, text in waiting]

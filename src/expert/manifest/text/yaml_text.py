"""Parses YAML with a line for every value; refuses tags and endless aliases. Writes plain YAML."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import yaml

from expert.core.errors import ManifestError, Problem
from expert.manifest.text.item import MAX_DEPTH, MAX_ITEMS, Item, Scalar, join

_CORE_TAG = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
# YAML 1.1 wants a dot in 2.0e-5; people and YAML 1.2 write 2e-5.
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?")
_LEADING_ZERO = re.compile(r"[-+]?0\d")
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NULLS = {"", "~", "null", "Null", "NULL"}
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(text: str, source: str) -> tuple[Item, list[Problem]]:
    """The tree of items, and problems that did not stop the parser."""
    try:
        # Refuse tags and huge or deep documents before composing, which would recurse in C.
        depth = nodes = 0
        for event in yaml.parse(text, Loader=_Loader):
            nodes += isinstance(event, yaml.NodeEvent)
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            line = event.start_mark.line + 1
            if getattr(event, "tag", None) is not None:
                what = f"the YAML tag {event.tag.replace(_CORE_TAG, '!!')[:60]} is refused"
                raise ManifestError(source, [Problem("", what, "write a plain value", line)])
            _refuse_size(source, line, depth=depth - 1, items=nodes // 2)  # keys are nodes too
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        _refuse_syntax(source, text, error)
    except UnicodeEncodeError:
        raise ManifestError(source, [Problem("", "not YAML: half of a surrogate pair")]) from None
    if node is None:
        return Item(None), []
    builder = _Builder(source)
    return builder.item(node, "", 0), builder.problems


def to_yaml(data: Mapping[str, Any]) -> str:
    """Plain data as YAML text that every YAML reader reads as the same data."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """Also quotes what this parser takes for a number, such as the text 2e-5."""


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    if read_scalar(text) != text or not text.replace("\n", "").isprintable():
        style = '"'  # PyYAML takes U+0085 for a line break
    return dumper.represent_scalar(f"{_CORE_TAG}str", text, style=style)


_Dumper.add_representer(str, _text_node)


def _refuse_size(source: str, line: int, *, depth: int, items: int) -> None:
    """Refuse what is nested too deep or has too many values, while it is parsed."""
    too_deep = f"nested more than {MAX_DEPTH} deep" if depth > MAX_DEPTH else ""
    too_many = f"more than {MAX_ITEMS:,} values" if items > MAX_ITEMS else ""
    if what := too_many or too_deep:
        raise ManifestError(source, [Problem("", what, "this is not a manifest", line)])


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
    what = str(getattr(error, "problem", None) or getattr(error, "reason", None) or "broken YAML")
    fix, lines = "", text.splitlines()
    is_open = "unexpected end of stream" in what
    if is_open:
        mark = getattr(error, "context_mark", None) or mark  # where the quote begins
    line = min(mark.line, len(lines) - 1) + 1 if mark else None  # the end is past the last line
    here = lines[line - 1] if line else ""
    if is_open:
        fix = "a quote is not closed"
    elif "could not find expected ':'" in what:
        fix = "write key: value"
    elif "mapping values are not allowed" in what:
        fix = 'put text that contains ": " in quotes; check colons and the indentation above'
    elif "\t" in here:
        fix = "YAML is indented with spaces, not tabs"
    elif "single document" in str(error) or "another document" in what:
        what, fix = "more than one document in the file", "keep one; remove the '---' lines"
    raise ManifestError(source, [Problem("", f"not YAML: {what}", fix, line)]) from None


class _Builder:
    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[Problem] = []
        self.items = 0

    def fail(self, node: yaml.Node, path: str, what: str, fix: str = "") -> NoReturn:
        line = node.start_mark.line + 1
        raise ManifestError(self.source, [Problem(path, what, fix, line)])

    def item(self, node: yaml.Node, path: str, depth: int) -> Item:
        self.items += 1  # again here: an alias is one event, but many values
        _refuse_size(self.source, node.start_mark.line + 1, depth=depth, items=self.items)
        item = Item(None, path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            item.value = self.mapping(node, path, depth)
        elif isinstance(node, yaml.SequenceNode):
            item.value = [
                self.item(child, join(path, number), depth + 1)
                for number, child in enumerate(node.value)
            ]
        else:
            assert isinstance(node, yaml.ScalarNode)
            text = str(node.value)
            item.value = text if node.style else read_scalar(text)  # a style means quotes
            if "\0" in text:
                self.fail(node, path, "a NUL character", "remove it")
        return item

    def mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Item]:
        entries: dict[str, Item] = {}
        merged: list[Item] = []
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.fail(key_node, path, "a key must be plain text")
            key = str(key_node.value)
            if key == "<<" and not key_node.style:
                is_list = isinstance(value_node, yaml.SequenceNode)
                for source in value_node.value if is_list else [value_node]:
                    if not isinstance(source, yaml.MappingNode):
                        fix = "name an anchor of an object"
                        self.fail(source, path, "<< merges objects only", fix)
                    merged.append(self.item(source, path, depth + 1))
                continue
            item = self.item(value_node, join(path, key), depth + 1)
            item.line = key_node.start_mark.line + 1
            if key in entries:
                what = f"key appears twice (first on line {entries[key].line})"
                self.problems.append(Problem(item.path, what, "remove one", item.line))
            elif not key.startswith("_") or key == "_component_":  # a comment; torchtune's classes
                entries[key] = item
        for source in merged:  # highest precedence first
            for key, item in source.fields().items():
                entries.setdefault(key, item)
        return entries

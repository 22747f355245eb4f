"""Parses JSON with a line for every value, which the standard library does not keep."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from json import decoder
from json.decoder import JSONDecodeError
from typing import NoReturn

from expert.core.errors import ManifestError, Problem
from expert.manifest.text.item import Item, add_entry, join, refuse_size

# The standard library's string scanner; typeshed does not list it.
_scan_string: Callable[[str, int, bool], tuple[str, int]] = getattr(decoder, "scanstring")  # noqa: B009
_SPACE = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
_WORDS = {"true": True, "false": False, "null": None}


def parse_json(text: str, source: str) -> tuple[Item, list[Problem]]:
    """The tree of items, and problems that did not stop the parser."""
    if not text.strip():
        return Item(None), []
    parser = _Parser(text, source)
    root = parser.value(parser.skip(0), "", 0)
    end = parser.skip(parser.position)
    if end != len(text):
        parser.fail(end, "text after the end of the object", "remove it")
    return root, parser.problems


class _Parser:
    def __init__(self, text: str, source: str) -> None:
        self.text = text
        self.source = source
        self.problems: list[Problem] = []
        self.position = 0
        self.items = 0
        self.line_starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def line(self, position: int) -> int:
        return bisect_right(self.line_starts, position)

    def fail(self, position: int, what: str, fix: str = "") -> NoReturn:
        raise ManifestError(self.source, [Problem("", what, fix, self.line(position))])

    def skip(self, position: int) -> int:
        match = _SPACE.match(self.text, position)
        end = match.end() if match else position
        if self.text.startswith(("//", "/*", "#"), end):
            self.fail(end, "JSON has no comments", 'use a key that begins with "_", or YAML')
        return end

    def value(self, at: int, path: str, depth: int) -> Item:
        self.items += 1
        refuse_size(self.source, self.line(at), depth=depth, items=self.items)
        item = Item(None, path, self.line(at))
        head = self.text[at : at + 1]
        if head == "{":
            item.value = self.mapping(at, path, depth)
        elif head == "[":
            item.value = self.sequence(at, path, depth)
        elif head == '"':
            item.value = self.string(at)
        else:
            item.value = self.word_or_number(at)
        return item

    def mapping(self, at: int, path: str, depth: int) -> dict[str, Item]:
        entries: dict[str, Item] = {}
        for position in self.entries(at, "}"):
            if self.text[position : position + 1] != '"':
                self.fail(position, 'a key in "double quotes" expected')
            key = self.string(position)
            colon = self.skip(self.position)
            if self.text[colon : colon + 1] != ":":
                self.fail(colon, f'":" expected after "{key}"')
            item = self.value(self.skip(colon + 1), join(path, key), depth + 1)
            item.line = self.line(position)
            add_entry(entries, key, item, self.problems)
        return entries

    def sequence(self, at: int, path: str, depth: int) -> list[Item]:
        entries: list[Item] = []
        for position in self.entries(at, "]"):
            entries.append(self.value(position, join(path, len(entries)), depth + 1))
        return entries

    def entries(self, at: int, closing: str) -> Iterator[int]:
        """The start of each entry between brackets; the caller must parse it before the next."""
        position = self.skip(at + 1)
        while self.text[position : position + 1] != closing:
            yield position
            position = self.skip(self.position)
            here = self.text[position : position + 1]
            if not here:
                what = f'the file ends before the closing "{closing}"'
                self.fail(position, what, "is it cut off?")
            if here not in (",", closing):
                what = f'"," or "{closing}" expected after this value'
                self.fail(self.position, what, "a missing comma?")
            if here == ",":
                position = self.skip(position + 1)
                if self.text[position : position + 1] == closing:
                    self.fail(position, f'a "," before "{closing}"', "remove the comma")
        self.position = position + 1

    def string(self, at: int) -> str:
        try:
            text, self.position = _scan_string(self.text, at + 1, True)
        except JSONDecodeError as error:
            what = error.msg.lower().removesuffix(" at")
            fix = 'write "\\\\" for a "\\"' if "escape" in what else ""
            self.fail(error.pos, f"broken string: {what}", fix)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            self.fail(at, "broken string: half of a surrogate pair")
        if "\0" in text:
            self.fail(at, "broken string: a NUL character", "remove it")
        return text

    def word_or_number(self, at: int) -> int | float | bool | None:
        word = re.compile(r"[A-Za-z]+").match(self.text, at)
        if word:
            if word[0] not in _WORDS:
                fix = "write true, false, null, a number, or text in quotes"
                self.fail(at, f"{word[0]} is not JSON", fix)
            self.position = word.end()
            return _WORDS[word[0]]
        number = _NUMBER.match(self.text, at)
        if not number:
            end = at >= len(self.text)
            self.fail(at, "the file ends too early" if end else f"{self.text[at]!r} is not JSON")
        self.position = number.end()
        if len(number[0]) > 40:
            self.fail(at, "a number of more than 40 characters")
        value = float(number[0]) if number[1] or number[2] else int(number[0])
        if value in (float("inf"), float("-inf")):
            self.fail(at, f"{number[0]} is too large")
        return value

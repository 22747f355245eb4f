"""Parses JSON with a line for every value: the standard library checks the text, and a tree is made
of its tokens."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from json.decoder import JSONDecodeError
from typing import NoReturn

from expert.core.errors import ManifestError, Problem
from expert.manifest.text.item import MAX_DEPTH, MAX_ITEMS, Item, Scalar, add_entry, join

# Of valid JSON; the commas and colons between tokens say nothing more.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]|[^\s,:{}\[\]"]+')
_WORD = re.compile(r"[A-Za-z]+")
_WORDS = {"true": True, "false": False, "null": None}
_INSTEAD = {
    **{word: f"write {word}" for word in _WORDS},
    "none": "write null",
    **dict.fromkeys(("nan", "inf", "infinity"), "write a number"),
}
# What the standard library says of a fault, what is said here, and the fix.
_FAULTS = (
    ("Expecting ',' delimiter", '"," expected', "a missing comma?"),
    ("Expecting ':' delimiter", '":" expected after a key', ""),
    ("Expecting property name", 'a key in "double quotes" expected', ""),
    ("Extra data", "text after the end of the object", "remove it"),
)


def parse_json(text: str, source: str) -> tuple[Item, list[Problem]]:
    """The tree of items, and problems that did not stop the parser."""
    if not text.strip():
        return Item(None), []
    builder = _Builder(text, source)
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
    except JSONDecodeError as error:
        builder.refuse(error)
    except RecursionError:
        builder.fail(0, f"nested more than {MAX_DEPTH} deep", "this is not a manifest")
    return builder.item(next(builder.tokens), "", 0), builder.problems


class _Builder:
    def __init__(self, text: str, source: str) -> None:
        self.text = text
        self.source = source
        self.problems: list[Problem] = []
        self.items = 0
        self.tokens = _TOKEN.finditer(text)
        self.line_starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def line(self, position: int) -> int:
        return bisect_right(self.line_starts, position)

    def fail(self, position: int, what: str, fix: str = "") -> NoReturn:
        raise ManifestError(self.source, [Problem("", what, fix, self.line(position))])

    def item(self, token: re.Match[str], path: str, depth: int) -> Item:
        self.items += 1
        if self.items > MAX_ITEMS:
            self.fail(token.start(), f"more than {MAX_ITEMS:,} values", "this is not a manifest")
        if depth > MAX_DEPTH:
            self.fail(token.start(), f"nested more than {MAX_DEPTH} deep", "this is not a manifest")
        item = Item(None, path, self.line(token.start()))
        if token[0] == "{":
            fields: dict[str, Item] = {}
            while (key := next(self.tokens))[0] != "}":
                name = self.string(key)
                entry = self.item(next(self.tokens), join(path, name), depth + 1)
                entry.line = self.line(key.start())
                add_entry(fields, name, entry, self.problems)
            item.value = fields
        elif token[0] == "[":
            entries: list[Item] = []
            while (each := next(self.tokens))[0] != "]":
                entries.append(self.item(each, join(path, len(entries)), depth + 1))
            item.value = entries
        else:
            item.value = self.string(token) if token[0][0] == '"' else self.word_or_number(token)
        return item

    def string(self, token: re.Match[str]) -> str:
        text: str = json.loads(token[0])
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            self.fail(token.start(), "broken string: half of a surrogate pair")
        if "\0" in text:
            self.fail(token.start(), "broken string: a NUL character", "remove it")
        return text

    def word_or_number(self, token: re.Match[str]) -> Scalar:
        if token[0] in _WORDS:
            return _WORDS[token[0]]
        if token[0].lstrip("-").isalpha():  # NaN and Infinity, which the library takes
            self.fail(token.start(), f"{token[0]} is not JSON", "write a number")
        if len(token[0]) > 40:
            self.fail(token.start(), "a number of more than 40 characters")
        number: int | float = json.loads(token[0])
        if math.isinf(number):
            self.fail(token.start(), f"{token[0]} is too large")
        return number

    def refuse(self, error: JSONDecodeError) -> NoReturn:
        """Say what is wrong where the standard library stopped, and how to fix it."""
        at = error.pos
        if "trailing comma" in error.msg:  # from Python 3.13 on, at the comma
            at = len(self.text) - len(self.text[at:].lstrip(", \t\r\n"))
        before, word = self.text[:at].rstrip(), _WORD.match(self.text, at)
        if "string" in error.msg or "escape" in error.msg or "control" in error.msg:
            what = error.msg.lower().removesuffix(" at")
            fix = 'write "\\\\" for a "\\"' if "escape" in what else ""
            self.fail(at, f"broken string: {what}", fix)
        if at >= len(self.text):
            self.fail(at, "the file ends too early", "is it cut off?")
        if self.text.startswith(("//", "/*", "#"), at):
            self.fail(at, "JSON has no comments", 'use a key that begins with "_", or YAML')
        if self.text[at] in "]}" and before.endswith(","):
            self.fail(at, f'a "," before "{self.text[at]}"', "remove the comma")
        if self.text[at] == "'":
            self.fail(at, "single quotes", 'JSON needs "double quotes"')
        if word and error.msg == "Expecting value":
            self.fail(at, f"{word[0]} is not JSON", _INSTEAD.get(word[0].lower(), "quote it"))
        for theirs, ours, fix in _FAULTS:
            if error.msg.startswith(theirs):
                self.fail(len(before) - 1 if "','" in theirs else at, ours, fix)
        self.fail(at, f"{self.text[at]!r} is not JSON")

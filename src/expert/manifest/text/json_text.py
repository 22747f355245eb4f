"""Parses JSON with a line for every value: the standard library says what is wrong with it, and
what is right is YAML too."""

from __future__ import annotations

import json
import re
from json import JSONDecodeError
from typing import NoReturn

from expert.core.errors import ManifestError, Problem
from expert.manifest.text.item import Item
from expert.manifest.text.yaml_text import parse_yaml

_SPACE_AFTER_KEY = re.compile(r'("(?:[^"\\]|\\.)*")(?:\s+(?=:))?')
_PAIR = re.compile(r"\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w")
# What the standard library says, what that means to a user, and what to do.
_ADVICE = {
    "Expecting property name": ('a key in "double quotes" expected', ""),
    "Expecting ',' delimiter": ('"," expected after this value', "a missing comma?"),
    "Expecting ':' delimiter": ('":" expected after a key', ""),
    "Expecting value": ("not JSON", "write true, false, null, a number, or text in quotes"),
    "Invalid \\": ("broken string: invalid \\escape", 'write "\\\\" for a "\\"'),
    "Extra data": ("text after the end of the object", "remove it"),
}


def parse_json(text: str, source: str) -> tuple[Item, list[Problem]]:
    """The tree of items, and problems that did not stop the parser."""
    if not text.strip():
        return Item(None), []

    def refuse_word(word: str) -> NoReturn:  # NaN and Infinity
        raise JSONDecodeError("Expecting value", text, text.find(word))

    try:
        # Digits are not converted: thousands of them take long.
        found = json.loads(text, parse_int=str, parse_constant=refuse_word)
        json.dumps(found, ensure_ascii=False).encode()
    except JSONDecodeError as error:
        _refuse(error, source)
    except UnicodeEncodeError:
        raise ManifestError(source, [Problem("", "a string has half a surrogate pair")]) from None
    except RecursionError:
        raise ManifestError(source, [Problem("", "nested too deep", "is it a manifest?")]) from None
    # YAML wants a colon right behind its key, one escape for a character of two, and no tabs.
    text = _SPACE_AFTER_KEY.sub(r"\1", text)
    text = _PAIR.sub(lambda pair: str(json.loads(f'"{pair[0]}"')), text.replace("\t", " "))
    text = text.encode("ascii", "backslashreplace").decode().replace("\x7f", "\\x7f")
    return parse_yaml(text, source)


def _refuse(error: JSONDecodeError, source: str) -> NoReturn:
    """Say where, and what to do."""
    at, rest, before = error.pos, error.doc[error.pos :].lstrip(), error.doc[: error.pos].rstrip()
    what, fix = f"broken string: {error.msg.lower().removesuffix(' at')}", ""
    for begin, advice in _ADVICE.items():
        if error.msg.startswith(begin):
            what, fix = advice
    if rest.startswith(("//", "/*", "#")):
        what, fix = "JSON has no comments", 'use a key that begins with "_", or YAML'
    elif not rest:
        what, fix = "the file ends too early", "is it cut off?"
    elif rest[0] in "]}" and before.endswith(","):
        what, fix = f'a "," before "{rest[0]}"', "remove the comma"
    elif what == "not JSON":
        word = re.match(r"\w+|.", rest)
        what = f"{word[0] if word else rest} is not JSON"
    elif fix == "a missing comma?":
        at = len(before)  # the end of the value, not the beginning of the next one
    line = error.doc.count("\n", 0, at) + 1
    raise ManifestError(source, [Problem("", what, fix, line)]) from None

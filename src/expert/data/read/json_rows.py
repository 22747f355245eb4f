"""Rows of JSON Lines, and of .json files: an array of objects, {"data": [...]}, or one object.

The text of a .json file is held in memory, and its rows are decoded one by one.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Generator, Iterator
from itertools import count

from expert.data.examples.messages import is_messages
from expert.data.read.row_text import DECODER, row_in, row_of
from expert.data.read.streams import (
    MAX_ROW_BYTES,
    Overlong,
    bad_row,
    data_error,
    numbered_lines,
    too_long,
)
from expert.data.records import BadRow, Row, RowError, place_of

_HEAD_BYTES = 2**18
_SPACE = re.compile(r"[ \t\r\n]*")
_STRUCTURE = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|["{}\[\],]', re.DOTALL)
_SPLITS = ("train", "validation", "valid", "val", "dev", "test", "eval")
_WHAT_IS_READ = 'write an array of objects, {"data": [...]} or one object a line'


def read_jsonl(stream: io.BufferedReader, file: str) -> Iterator[Row | BadRow]:
    """The object on each line."""
    for number, line in numbered_lines(stream):
        if isinstance(line, Overlong):
            yield bad_row(file, number, too_long(line.size), line.head)
        elif line.strip(" \t\r\n\v\f"):
            yield row_in(line.rstrip("\r\n"), file, number)


def is_array(stream: io.BufferedReader) -> bool:
    """Whether a file of lines is in fact one array of objects."""
    head = stream.peek(_HEAD_BYTES)[:_HEAD_BYTES].lstrip()
    return head.startswith(b"[") and head[1:].lstrip()[:1] in (b"{", b"")


def read_json(stream: io.BufferedReader, file: str) -> Iterator[Row | BadRow]:
    """The objects of the array, or of the lines if the file is JSON Lines with a wrong suffix."""
    head = stream.peek(_HEAD_BYTES).lstrip()
    if head.startswith(b"{") and _is_json_lines(head):
        yield from read_jsonl(stream, file)
        return
    text = stream.read().decode("utf-8", "surrogateescape")
    start = _after_space(text, 0)
    if text.startswith("[", start):
        end = yield from _read_array(text, start, file)
        rest = _after_space(text, end)
        if rest < len(text):
            where = f"{file}:{text.count(chr(10), 0, rest) + 1}"
            fix = 'one array to a file; a conversation on each line is written {"messages": [...]}'
            raise data_error(where, "there is more after the array", fix)
    elif text.startswith("{", start):
        values = _values_by_key(text, start + 1, file)
        if not text.startswith("[", values.get("data", -1)):
            yield _only_row(text, start, file)
            return
        other = next((key for key in _SPLITS if text.startswith("[", values.get(key, -1))), None)
        if other is not None:
            what = f'there are rows under {other!r} as well as under "data"'
            raise data_error(file, what, "save each as a file of its own")
        yield from _read_array(text, values["data"], file)
    elif start < len(text):
        raise data_error(file, "neither an array nor an object", _WHAT_IS_READ)


def _is_json_lines(head: bytes) -> bool:
    """Whether the first line is a whole object and something follows: a JSON Lines file."""
    first, newline, rest = head.partition(b"\n")
    if not newline or not rest.strip():
        return False
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _after_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return found.end() if found else place


def _values_by_key(text: str, place: int, file: str) -> dict[str, int]:
    """Where the value of each key of the object begins."""
    found: dict[str, int] = {}
    place = _after_space(text, place)
    while text.startswith('"', place):
        key = _STRUCTURE.match(text, place)
        colon = _after_space(text, key.end()) if key else place
        if key is None or not text.startswith(":", colon):
            break
        value = _after_space(text, colon + 1)
        found[key.group()[1:-1]] = value
        end = _after_space(text, _end_of_value(text, value))
        if text.startswith("}", end):
            return found
        place = _after_space(text, end + 1)
    if text.startswith("}", place):
        return found
    where = f"{file}:{text.count(chr(10)) + 1}"
    raise data_error(where, "the JSON is incomplete", _WHAT_IS_READ)


def _only_row(text: str, start: int, file: str) -> Row:
    """A single object on one line is a row, unless it holds only lists and objects: columns, splits
    or rows by their id."""
    raw = text[start:].rstrip()
    line = text.count("\n", 0, start) + 1
    row = row_in(raw, file, line)
    if isinstance(row, BadRow):
        raise data_error(f"{file}:{line}", row.reason, _WHAT_IS_READ)
    held = row.values.values()
    is_row = not held or any(is_messages(v) or not isinstance(v, dict | list) for v in held)
    if "\n" in raw or not is_row:
        keys = ", ".join(repr(key) for key in list(row.values)[:5])
        raise data_error(file, f'the object has no array under "data", only {keys}', _WHAT_IS_READ)
    return row


def _read_array(text: str, opening: int, file: str) -> Generator[Row | BadRow, None, int]:
    """Every element of the array whose bracket opens here; returns where the array ends. A row that
    begins on the same line as the row before it is identified by its number."""
    counted, lines = opening, text.count("\n", 0, opening) + 1
    place = _after_space(text, opening + 1)
    if text.startswith("]", place):
        return place + 1
    for number in count(1):
        place = _after_space(text, place)
        began = lines + text.count("\n", counted, place)
        line, lines, counted = began if began != lines else -number, began, place
        try:
            values, end = DECODER.raw_decode(text, place)
            whole = text.startswith((",", "]"), _after_space(text, end))
        except (ValueError, RecursionError, RowError):
            whole = False
        end = end if whole else _end_of_value(text, place)
        raw, after = text[place:end].rstrip(), _after_space(text, end)
        mark = text[after : after + 1]
        if mark and len(raw) > MAX_ROW_BYTES:
            yield bad_row(file, line, too_long(len(raw)), raw)
        elif mark:
            yield row_of(values, raw, file, line) if whole else row_in(raw, file, line)
        if mark == "]":
            return after + 1
        if mark != ",":
            what = "a bracket too many after the row" if mark else "the array ends within a row"
            fix = "the file is cut off or damaged; write it again"
            raise data_error(place_of(file, line), what, fix)
        place = after + 1
    return place


def _end_of_value(text: str, place: int) -> int:
    """Where the value that starts here ends, by brackets and quotes alone."""
    depth = 0
    for match in _STRUCTURE.finditer(text, place):
        mark = match.group()
        if mark == '"':  # it is never closed
            break
        if mark in ("{", "["):
            depth += 1
        elif not mark.startswith('"'):
            if depth == 0:
                return match.start()
            depth -= mark != ","
    return len(text)

"""Rows of JSON Lines, and of .json files: an array of objects, {"data": [...]}, or one object.

The text of a .json file is held in memory, and its rows are decoded one by one. A row that is JSON
but cannot be used is a bad row; where the text is no JSON, the file is refused with the line.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Generator, Iterator

from expert.data.read.row_text import DECODER, broken_json, row_in, row_of
from expert.data.read.streams import (
    MAX_ROW_BYTES,
    Overlong,
    bad_row,
    data_error,
    numbered_lines,
    too_long,
)
from expert.data.records import BadRow, Row, RowError

_HEAD_BYTES = 2**18
_SPACE = re.compile(r"[ \t\r\n]*")
_ANY_JSON = json.JSONDecoder()
_HELD_BY = ("data", "train", "validation", "valid", "val", "dev", "test", "eval")
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
    if _is_json_lines(stream.peek(_HEAD_BYTES).lstrip()):
        yield from read_jsonl(stream, file)
        return
    text = stream.read().decode("utf-8", "surrogateescape")
    start = _after_space(text, 0)
    try:
        if text.startswith("[", start):
            end = yield from _read_array(text, start, file)
            if (rest := _after_space(text, end)) < len(text):
                raise json.JSONDecodeError("There is more after the array", text, rest)
        elif text.startswith("{", start):
            yield from _read_object(text, start, file)
        elif start < len(text):
            raise data_error(file, "neither an array nor an object", _WHAT_IS_READ)
    except (ValueError, RecursionError) as error:
        line = text.count("\n", 0, getattr(error, "pos", len(text))) + 1
        what = broken_json(error, text).partition(" at character")[0]
        raise data_error(f"{file}:{line}", what, f"correct it there; {_WHAT_IS_READ}") from error


def _is_json_lines(head: bytes) -> bool:
    """Whether the first line is a whole object, and not one that holds the rows."""
    first, _, rest = head.partition(b"\n")
    try:
        values = json.loads(first)
    except (ValueError, RecursionError):
        return False
    if not isinstance(values, dict):
        return False
    return bool(rest.strip()) or not any(isinstance(values.get(key), list) for key in _HELD_BY)


def _after_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return found.end() if found else place


def _read_object(text: str, start: int, file: str) -> Iterator[Row | BadRow]:
    """The rows under "data"."""
    values, _ = _ANY_JSON.raw_decode(text, start)
    found = [key for key in _HELD_BY if isinstance(values.get(key), list)]
    if "data" not in found:
        keys = ", ".join(repr(key) for key in list(values)[:5])
        raise data_error(file, f'the object has no array under "data", only {keys}', _WHAT_IS_READ)
    if len(found) > 1:
        what = f'there are rows under {found[1]!r} as well as under "data"'
        raise data_error(file, what, "save each as a file of its own")
    yield from _read_array(text, _place_of_data(text, start + 1), file)


def _place_of_data(text: str, place: int) -> int:
    """Where the value of the key "data" begins in the object whose keys begin here."""
    key = ""
    while key != "data":
        key, end = _ANY_JSON.raw_decode(text, _after_space(text, place))
        value = _after_space(text, _after_space(text, end) + 1)
        place = _after_space(text, _ANY_JSON.raw_decode(text, value)[1]) + 1
    return value


def _read_array(text: str, opening: int, file: str) -> Generator[Row | BadRow, None, int]:
    """Every element of the array whose bracket opens here; returns where the array ends. A row that
    begins on the same line as the row before it is identified by its number."""
    number, counted, lines = 0, opening, text.count("\n", 0, opening) + 1
    place = _after_space(text, opening + 1)
    if text.startswith("]", place):
        return place + 1
    while True:
        number += 1
        began = lines + text.count("\n", counted, place)
        line, lines, counted = began if began != lines else -number, began, place
        try:
            values, end = DECODER.raw_decode(text, place)
            row = row_of(values, text[place:end], file, line)
        except RowError:  # JSON for others
            end = _ANY_JSON.raw_decode(text, place)[1]
            row = row_in(text[place:end], file, line)
        if end - place > MAX_ROW_BYTES:
            row = bad_row(file, line, too_long(end - place), text[place:end])
        yield row
        after = _after_space(text, end)
        if text.startswith("]", after):
            return after + 1
        if not text.startswith(",", after):
            raise json.JSONDecodeError("Expecting ',' or ']' after the row", text, after)
        place = _after_space(text, after + 1)

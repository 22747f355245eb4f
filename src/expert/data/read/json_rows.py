"""Rows of a .json file: an array of objects, {"data": [...]}, or JSON Lines with the wrong suffix.

Files of any size are read through a moving window.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from expert.data.examples.messages import is_messages
from expert.data.read.row_text import DECODER, fault_in, json_fault, json_type, undecodable
from expert.data.read.streams import MAX_ROW_BYTES, RAW_CHARACTERS, bad_row, data_error, too_long
from expert.data.records import BadRow, Row, RowError, place_of

_BLOCK_BYTES = 2**18
_TRIED = 2**12
"""Characters decoded at first; after a longer row, twice its length. A decoding error counts the
lines before it, which would dominate the time if a whole block was decoded."""
_SPACE = re.compile(r"[ \t\r\n]*")
_STRUCTURE = re.compile(r'["{}\[\],]')
_IN_STRING = re.compile(r'\\.|"', re.DOTALL)
_SPLITS = ("train", "validation", "valid", "val", "dev", "test", "eval")
_WHAT_IS_READ = 'write an array of objects, {"data": [...]} or one object a line'

LineReader = Callable[[io.BufferedReader, str], Iterator[Row | BadRow]]


def read_json(
    stream: io.BufferedReader, file: str, *, read_lines: LineReader
) -> Iterator[Row | BadRow]:
    """The objects of the array; `read_lines` takes over if the file is JSON Lines."""
    head = stream.peek(_BLOCK_BYTES).lstrip()
    if head.startswith(b"{") and _is_json_lines(head):
        yield from read_lines(stream, file)
        return
    window = _Window(stream)
    start = window.next_character()
    if start == "[":
        window.place += 1
        yield from _read_array(window, file)
        if window.next_character():
            where = f"{file}:{window.line()}"
            fix = 'one array to a file; a conversation on each line is written {"messages": [...]}'
            raise data_error(where, "there is more after the array", fix)
    elif start == "{":
        single = _enter_data(window, file)
        if single is None:
            yield from _read_array(window, file)
            while window.next_character() == ",":
                window.place += 1
                window.next_character()
                key = _enter_value(window)
                if key is None:
                    break
                _refuse_split(key, window, file)
                window.place, _ = _end_of_value(window)
        else:
            yield single
    elif start:
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


def _enter_data(window: _Window, file: str) -> Row | None:
    """Move to the first row of the array under "data". A single object on one line is a row, unless
    it holds only lists and objects: columns, splits or rows by their id."""
    line = window.line()
    whole = _value_at(window, window.place)
    if whole and isinstance(whole[0], dict) and not isinstance(whole[0].get("data"), list):
        values, end = whole
        held = values.values()
        is_row = not held or any(is_messages(v) or not isinstance(v, dict | list) for v in held)
        if "\n" in window.text_between(window.place, end) or not is_row:
            keys = ", ".join(repr(key) for key in list(values)[:5])
            what = f'the object has no array under "data", only {keys}'
            raise data_error(file, what, _WHAT_IS_READ)
        if fault := fault_in(values):
            raise data_error(f"{file}:{line}", fault, "fix the row")
        return Row(values, file, line)
    window.place += 1
    before = ""
    while window.next_character() == '"':
        key = _enter_value(window)
        if key is None:
            break
        if window.next_character() == "[" and key == "data":
            _refuse_split(before, window, file)
            window.place += 1
            return None
        before = key if key in _SPLITS else before
        window.place, _ = _end_of_value(window)
        if window.next_character() == ",":
            window.place += 1
    raise data_error(f"{file}:{window.line()}", "the JSON is incomplete", _WHAT_IS_READ)


def _enter_value(window: _Window) -> str | None:
    """Move from a key to its value and return the key; None if the JSON is broken."""
    key = _value_at(window, window.place)
    if key is None:
        return None
    window.place = key[1]
    if window.next_character() != ":":
        return None
    window.place += 1
    return str(key[0])


def _refuse_split(key: str, window: _Window, file: str) -> None:
    """Refuse rows next to "data", which would be left out."""
    if key in _SPLITS and window.next_character() == "[":
        what = f'there are rows under {key!r} as well as under "data"'
        raise data_error(file, what, "save each as a file of its own")


def _read_array(window: _Window, file: str) -> Iterator[Row | BadRow]:
    """Every element up to the closing bracket; the window is after the opening one.

    A row that begins on the same line as the row before it is identified by its number.
    """
    before, tried = window.line(), _TRIED
    if window.next_character() == "]":
        window.place += 1
        return
    for number in count(1):
        window.next_character()
        began = window.line()
        line, before = began if began != before else -number, began
        start = window.place
        value = _value_at(window, start, tried)
        if value is not None and window.next_character(value[1]) in (",", "]"):
            values, end = value
            yield _row_of(values, window.text_between(start, end), file, line)
        else:
            end, overlong = _end_of_value(window)
            tried = max(_TRIED, 2 * (end - start))
            if overlong:
                yield bad_row(file, line, too_long(overlong[0]), overlong[1])
            elif window.next_character(end):
                yield _decoded_again(window.text_between(start, end).rstrip(), file, line)
        window.place = end
        after = window.next_character()
        window.place += 1
        if after == "]":
            return
        if after != ",":
            what = "a bracket too many after the row" if after else "the array ends within a row"
            fix = "the file is cut off or damaged; write it again"
            raise data_error(place_of(file, line), what, fix)


def _value_at(window: _Window, start: int, most: int = _BLOCK_BYTES) -> tuple[Any, int] | None:
    """The JSON value and its end; None if it is broken, or longer than `most` or the window."""
    try:
        values, end = DECODER.raw_decode(window.text_between(start, start + most))
    except (ValueError, RecursionError, RowError):
        return None
    return values, start + end


def _row_of(values: Any, raw: str, file: str, line: int) -> Row | BadRow:
    if type(values) is not dict:
        fault: str | None = f"the row is {json_type(values)}, not a JSON object"
    elif len(raw) > MAX_ROW_BYTES:
        return bad_row(file, line, too_long(len(raw)), raw)
    else:
        fault = fault_in(values)
    if not fault:
        return Row(values, file, line)
    return bad_row(file, line, undecodable(raw, " of the row") or fault, raw)


def _decoded_again(raw: str, file: str, line: int) -> Row | BadRow:
    """Decode a row that was not completely in the window, or report why it is broken."""
    try:
        return _row_of(DECODER.decode(raw), raw, file, line)
    except (ValueError, RecursionError) as error:
        fault = json_fault(error, f"character {getattr(error, 'pos', 0) + 1} of the row")
        if "\0" in raw and isinstance(error, json.JSONDecodeError):
            fault = f"NUL byte at character {raw.index(chr(0)) + 1} of the row"
    except RowError as error:
        fault = str(error)
    return bad_row(file, line, undecodable(raw, " of the row") or fault, raw)


def _end_of_value(window: _Window) -> tuple[int, tuple[int, str] | None]:
    """The end of the value that starts here, by brackets and quotes alone; and, if it is over the
    limit, its size and beginning. Such a value is dropped from the window while it is skipped."""
    start = place = window.place
    head = ""
    depth = 0
    in_string = False
    while True:
        text = window.text
        pattern = _IN_STRING if in_string else _STRUCTURE
        match = pattern.search(text, place - window.base)
        if match is None:
            cut_escape = in_string and place < window.base + len(text) and text.endswith("\\")
            place = window.base + len(text) - cut_escape  # its other half is in the next block
            if place - start > MAX_ROW_BYTES:
                head = head or window.text_between(start, start + RAW_CHARACTERS)
                window.place = place
            if not window.grow():
                place = window.base + len(text)
                break
            continue
        place = window.base + match.end()
        mark = match.group()
        if in_string or mark == '"':
            in_string = (mark != '"') if in_string else True
        elif mark in "{[":
            depth += 1
        elif depth == 0:
            place -= 1
            break
        elif mark != ",":
            depth -= 1
    if place - start > MAX_ROW_BYTES:
        return place, (place - start, head or window.text_between(start, start + RAW_CHARACTERS))
    return place, None


class _Window:
    """A part of a file's text and a position in it; positions count characters of the file."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._lines = 1
        self._counted = 0
        self._ended = False
        self.base = 0
        """Position of the first character in `text`."""
        self.text = ""
        self.place = 0

    def grow(self) -> bool:
        """Drop the text before `place` and read more; False at the end of the file."""
        if self._ended:
            return False
        self.line()
        kept = self.text[self.place - self.base :]
        # At least as much as is kept, so that a long row is not copied for every block.
        block = self._stream.read(max(_BLOCK_BYTES, len(kept)))
        self._ended = not block
        self.base = self.place
        self.text = kept + self._decoder.decode(block, final=self._ended)
        return bool(block) or len(self.text) > len(kept)

    def line(self) -> int:
        """The line number of `place`."""
        self._lines += self.text.count("\n", self._counted - self.base, self.place - self.base)
        self._counted = self.place
        return self._lines

    def next_character(self, place: int | None = None) -> str:
        """The next character that is not a space, from `place` or the current place (which
        moves)."""
        start = self.place if place is None else place
        while True:
            spaces = _SPACE.match(self.text, start - self.base)
            end = self.base + (spaces.end() if spaces else 0)
            if place is None:
                self.place = end
            if end - self.base < len(self.text):
                return self.text[end - self.base]
            if not self.grow():
                return ""

    def text_between(self, start: int, end: int) -> str:
        return self.text[start - self.base : end - self.base]

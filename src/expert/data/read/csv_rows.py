"""Rows of CSV and TSV files with a header, each with its first line number."""

from __future__ import annotations

import contextlib
import csv
import io
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from expert.data.read.row_text import fault_in, undecodable
from expert.data.read.streams import (
    MAX_ROW_BYTES,
    Overlong,
    bad_row,
    data_error,
    numbered_lines,
    too_long,
)
from expert.data.records import BadRow, Row

SAMPLE_BYTES = 2**16
"""Bytes at the beginning of a file used to detect the separator."""
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}


def separator_of(stream: io.BufferedReader) -> str:
    """Detect the column separator from the first records, without consuming them.

    The separator with which most records have as many columns as the header wins; the comma wins
    ties. The sample is parsed like the file, so that separators inside quotes do not count.
    """
    sample = stream.peek(SAMPLE_BYTES)[:SAMPLE_BYTES].decode("utf-8", "surrogateescape")
    return max(SEPARATORS, key=lambda separator: _share_that_fits(sample, separator))


def _share_that_fits(sample: str, separator: str) -> float:
    """The share of records as wide as the header; 0 if there is only one column."""
    records = []
    with contextlib.suppress(csv.Error):
        for record in csv.reader(io.StringIO(sample, newline=""), delimiter=separator):
            records += [len(record)] if record else []
    width, *others = records or [0]
    others = others[:-1] or others  # the last one may be cut off
    if width < 2:
        return 0.0
    return sum(columns == width for columns in others) / len(others) if others else 1.0


class _RecordTooLong(Exception):
    """A record, or one line of it, is over the limit."""


class _Line(NamedTuple):
    number: int
    text: str
    overlong: int = 0
    """Size of a skipped line; 0 if the text is complete."""


class _Lines:
    """Feeds csv.reader and keeps the lines of the current record, so that reading can continue at
    its second line if it is broken: a stray quote must not swallow the rows after it."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._coming = numbered_lines(stream)
        self._again: deque[_Line] = deque()
        self._size = 0
        self.record: list[_Line] = []

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else self._next_line()
        self.record.append(line)
        self._size += len(line.text)
        if line.overlong or self._size > MAX_ROW_BYTES + 2:
            raise _RecordTooLong
        return line.text

    def _next_line(self) -> _Line:
        number, line = next(self._coming)
        if isinstance(line, Overlong):
            return _Line(number, line.head.decode("utf-8", "replace"), line.size)
        return _Line(number, line.decode("utf-8", "surrogateescape"))

    def begin_record(self) -> None:
        self.record, self._size = [], 0

    def rewind(self) -> None:
        self._again.extendleft(reversed(self.record[1:]))

    @property
    def raw(self) -> str:
        return "".join(line.text for line in self.record)


def read_csv(
    stream: io.BufferedReader, file: str, *, delimiter: str | None = None
) -> Iterator[Row | BadRow]:
    """The records below the header; all values are text. The delimiter is detected if None."""
    delimiter = delimiter or separator_of(stream)
    if csv.field_size_limit() < MAX_ROW_BYTES + 2:  # one limit for the whole process
        csv.field_size_limit(MAX_ROW_BYTES + 2)
    lines = _Lines(stream)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header = _read_header(reader, lines, file)
    if header is None:
        return
    width = len(header)
    while True:
        lines.begin_record()
        try:
            fields = next(reader)
        except StopIteration:
            return
        except (csv.Error, _RecordTooLong) as error:
            yield _broken(error, lines, file)
            continue
        if not fields:
            continue
        if len(fields) == width:
            values = dict(zip(header, fields, strict=True))
            fault = fault_in(values)
            if not fault:
                yield Row(values, file, lines.record[0].number)
                continue
        else:
            many = "many" if len(fields) > width else "few"
            fault = f"too {many} columns: {len(fields)}, the header has {width}"
        yield bad_row(file, lines.record[0].number, undecodable(lines.raw) or fault, lines.raw)


def _read_header(reader: Iterator[list[str]], lines: _Lines, file: str) -> list[str] | None:
    """The column names; None if the file is empty."""
    header: list[str] = []
    while not header:  # skips blank lines
        lines.begin_record()
        try:
            header = next(reader)
        except StopIteration:
            return None
        except (csv.Error, _RecordTooLong) as error:
            broken = _broken(error, lines, file)
            raise data_error(f"{file}:{broken.line}", f"the header: {broken.reason}") from error
    where = f"{file}:{lines.record[0].number}"
    if fault := undecodable(lines.raw) or fault_in(dict.fromkeys(header)):
        raise data_error(where, f"the header: {fault}", "fix the first line")
    doubled = next((name for name in header if header.count(name) > 1), None)
    if doubled == "":
        what = f"the header has {header.count('')} columns without a name"
        raise data_error(where, what, "name them, or remove them; the header is the first line")
    if doubled is not None:
        raise data_error(where, f"the header names {doubled!r} twice", "rename one of the columns")
    return header


def _broken(error: Exception, lines: _Lines, file: str) -> BadRow:
    first = lines.record[0]
    if first.overlong:
        return bad_row(file, first.number, too_long(first.overlong), first.text)
    lines.rewind()
    reason = f"broken CSV: {error}"
    too_far = isinstance(error, _RecordTooLong) or "unexpected end" in str(error)
    if too_far or len(lines.record) > 1:
        reason = "broken CSV: a quoted value is opened and not properly closed"
    elif "new-line character" in str(error):
        reason = "broken CSV: a line break of CR alone; save the file with LF or CR LF"
    elif "expected after" in str(error):
        reason = "broken CSV: text after a quoted value; quotes inside a value are written twice"
    return bad_row(file, first.number, undecodable(first.text) or reason, first.text)

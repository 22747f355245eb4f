"""Rows of CSV and TSV files with a header, each with its first line number."""

from __future__ import annotations

import contextlib
import csv
import io
from collections import deque
from collections.abc import Iterator, Sequence

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

    def share_that_fits(separator: str) -> float:
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

    return max(SEPARATORS, key=share_that_fits)


class _RecordTooLong(Exception):
    """A record, or one line of it, is over the limit."""


class _Lines:
    """Feeds csv.reader and keeps the lines of the current record, so that reading can continue at
    its second line if it is broken: a stray quote must not swallow the rows after it."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._coming = numbered_lines(stream)
        self.again: deque[tuple[int, str, int]] = deque()
        self.record: list[tuple[int, str, int]] = []
        """Number and text of each line, and the size of one that was too long to be read."""

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        if self.again:
            number, text, overlong = self.again.popleft()
        else:
            number, line = next(self._coming)
            overlong = line.size if isinstance(line, Overlong) else 0
            content = line.head if isinstance(line, Overlong) else line
            text = content.decode("utf-8", "replace" if overlong else "surrogateescape")
        self.record.append((number, text, overlong))
        if overlong or sum(len(each) for _, each, _ in self.record) > MAX_ROW_BYTES + 2:
            raise _RecordTooLong
        return text

    @property
    def raw(self) -> str:
        return "".join(text for _, text, _ in self.record)


def read_csv(
    stream: io.BufferedReader, file: str, *, delimiter: str | None = None
) -> Iterator[Row | BadRow]:
    """The records below the header; all values are text. The delimiter is detected if None."""
    delimiter = delimiter or separator_of(stream)
    if csv.field_size_limit() < MAX_ROW_BYTES + 2:  # one limit for the whole process
        csv.field_size_limit(MAX_ROW_BYTES + 2)
    lines = _Lines(stream)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        lines.record = []
        try:
            fields = next(reader)
        except StopIteration:
            return
        except (csv.Error, _RecordTooLong) as error:
            broken = _broken(error, lines, file)
            if not header:
                where = f"{file}:{broken.line}"
                raise data_error(where, f"the header: {broken.reason}") from error
            yield broken
            continue
        number = lines.record[0][0]
        if not header:
            header = fields  # empty for a blank line
            _check_header(header, lines.raw, f"{file}:{number}")
        elif len(fields) == len(header):
            values = dict(zip(header, fields, strict=True))
            if not (fault := fault_in(values)):
                yield Row(values, file, number)
            else:
                yield bad_row(file, number, undecodable(lines.raw) or fault, lines.raw)
        elif fields:
            many = "many" if len(fields) > len(header) else "few"
            fault = f"too {many} columns: {len(fields)}, the header has {len(header)}"
            yield bad_row(file, number, undecodable(lines.raw) or fault, lines.raw)


def _check_header(header: Sequence[str], raw: str, where: str) -> None:
    if fault := undecodable(raw) or fault_in(dict.fromkeys(header)):
        raise data_error(where, f"the header: {fault}", "fix the first line")
    doubled = next((name for name in header if header.count(name) > 1), None)
    if doubled == "":
        what = f"the header has {header.count('')} columns without a name"
        raise data_error(where, what, "name them, or remove them; the header is the first line")
    if doubled is not None:
        raise data_error(where, f"the header names {doubled!r} twice", "rename one of the columns")


def _broken(error: Exception, lines: _Lines, file: str) -> BadRow:
    number, text, overlong = lines.record[0]
    if overlong:
        return bad_row(file, number, too_long(overlong), text)
    lines.again.extendleft(reversed(lines.record[1:]))
    reason = f"broken CSV: {error}"
    too_far = isinstance(error, _RecordTooLong) or "unexpected end" in str(error)
    if too_far or len(lines.record) > 1:
        reason = "broken CSV: a quoted value is opened and not properly closed"
    elif "new-line character" in str(error):
        reason = "broken CSV: a line break of CR alone; save the file with LF or CR LF"
    elif "expected after" in str(error):
        reason = "broken CSV: text after a quoted value; quotes inside a value are written twice"
    return bad_row(file, number, undecodable(text) or reason, text)

"""Rows of CSV and TSV files with a header, each with its first line number."""

from __future__ import annotations

import contextlib
import csv
import io
from collections import deque
from collections.abc import Iterator

from expert.data.read.row_text import fault_in, undecodable
from expert.data.read.streams import (
    MAX_ROW_BYTES,
    Overlong,
    bad_row,
    check_columns,
    data_error,
    numbered_lines,
    too_long,
)
from expert.data.records import BadRow, Row

SAMPLE_BYTES = 2**16
"""Bytes at the beginning of a file used to detect the separator."""
SEPARATORS = (",", ";", "\t", "|")


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


class _Lines:
    """Feeds csv.reader and keeps the lines of the current record, so that reading can continue at
    its second line if it is broken: a stray quote must not swallow the rows after it."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._coming = numbered_lines(stream)
        self._again: deque[tuple[int, str | Overlong]] = deque()
        self.start_record()

    def start_record(self) -> None:
        self.record: list[tuple[int, str | Overlong]] = []
        self._size = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        number, line = self._again.popleft() if self._again else next(self._coming)
        self.record.append((number, line))
        self._size += line.size if isinstance(line, Overlong) else len(line)
        if isinstance(line, Overlong) or self._size > MAX_ROW_BYTES + 2:
            raise csv.Error("the record is too long")
        return line

    @property
    def raw(self) -> str:
        return "".join(line for _, line in self.record if isinstance(line, str))

    def broken(self, error: csv.Error, file: str) -> BadRow:
        """The first line of a broken record as a bad row; its other lines are read again."""
        number, line = self.record[0]
        self._again.extendleft(reversed(self.record[1:]))
        if isinstance(line, Overlong):
            return bad_row(file, number, too_long(line.size), line.head)
        reason = f"broken CSV: {str(error).partition(' - ')[0]}"
        if len(self.record) > 1 and self._size > MAX_ROW_BYTES + 2:
            # The rows after it may be part of the value or not: nobody can tell.
            what = f"a quoted value is opened and not closed within {MAX_ROW_BYTES / 1e6:g} MB"
            raise data_error(f"{file}:{number}", what, "close the quote, or remove it")
        if len(self.record) > 1 or "end of data" in reason:
            reason = "broken CSV: a quoted value is opened and not properly closed"
        return bad_row(file, number, undecodable(line) or reason, line)


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
        lines.start_record()
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            broken = lines.broken(error, file)
            if not header:
                where = f"{file}:{broken.line}"
                raise data_error(where, f"the header: {broken.reason}") from error
            yield broken
            continue
        number, raw = lines.record[0][0], lines.raw
        if not header:
            header = fields  # empty for a blank line
            where = f"{file}:{number}"
            if fault := undecodable(raw) or fault_in(dict.fromkeys(header)):
                raise data_error(where, f"the header: {fault}", "fix the first line")
            check_columns(header, where)
            continue
        values = dict(zip(header, fields, strict=False))
        fault = undecodable(raw) or fault_in(values)
        if not fault and len(fields) != len(header):
            many = "many" if len(fields) > len(header) else "few"
            fault = f"too {many} columns: {len(fields)}, the header has {len(header)}"
        if fields:
            yield bad_row(file, number, fault, raw) if fault else Row(values, file, number)

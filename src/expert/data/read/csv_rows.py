"""Rows of CSV and TSV files with a header, each with its first line number."""

from __future__ import annotations

import contextlib
import csv
import io
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
CLOSE_IT = "close the quote, or remove it"


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


def read_csv(
    stream: io.BufferedReader, file: str, *, delimiter: str | None = None
) -> Iterator[Row | BadRow]:
    """The records below the header; all values are text. The delimiter is detected if None. Behind
    a broken quote nobody can tell where the next record begins: the file is refused there."""
    if csv.field_size_limit() < MAX_ROW_BYTES + 2:  # one limit for the whole process
        csv.field_size_limit(MAX_ROW_BYTES + 2)
    record: list[tuple[int, str | Overlong]] = []
    delimiter = delimiter or separator_of(stream)
    reader = csv.reader(_lines_of(stream, file, record), delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        record.clear()
        try:
            fields = next(reader, None)
        except csv.Error as error:
            what, fix = str(error).partition(" - ")[0], "correct it there, or leave the row out"
            if "end of data" in what:
                what, fix = "a quoted value is opened and not closed", CLOSE_IT
            raise data_error(f"{file}:{record[0][0]}", f"broken CSV: {what}", fix) from error
        if fields is None:
            return
        number, raw = record[0][0], "".join(line for _, line in record if isinstance(line, str))
        overlong = next((line for _, line in record if isinstance(line, Overlong)), None)
        if overlong is not None:
            yield bad_row(file, number, too_long(overlong.size), overlong.head)
        elif not header:
            header = fields  # empty for a blank line
            where = f"{file}:{number}"
            if fault := undecodable(raw) or fault_in(dict.fromkeys(header)):
                raise data_error(where, f"the header: {fault}", "fix the first line")
            check_columns(header, where)
        elif fields:
            values = dict(zip(header, fields, strict=False))
            fault = undecodable(raw) or fault_in(values)
            if not fault and len(fields) != len(header):
                many = "many" if len(fields) > len(header) else "few"
                fault = f"too {many} columns: {len(fields)}, the header has {len(header)}"
            yield bad_row(file, number, fault, raw) if fault else Row(values, file, number)


def _lines_of(
    stream: io.BufferedReader, file: str, record: list[tuple[int, str | Overlong]]
) -> Iterator[str]:
    """The lines for csv.reader, which are also added to `record`, emptied when one is read. A line
    that is too long is a blank one to the reader."""
    size = 0
    for number, line in numbered_lines(stream):
        size = 0 if not record else size
        record.append((number, line))
        if isinstance(line, Overlong):
            yield "\n"
            continue
        size += len(line)
        if size > MAX_ROW_BYTES + 2:
            # The rows after it may be part of the value or not: nobody can tell.
            what = f"a quoted value is opened and not closed within {MAX_ROW_BYTES / 1e6:g} MB"
            raise data_error(f"{file}:{record[0][0]}", what, CLOSE_IT)
        yield line

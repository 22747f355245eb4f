"""Rows of a spreadsheet (.xlsx, .xls, .xlsb, .ods) with a header, through `python-calamine`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import IO, Any

from expert.data.read.row_text import fault_in
from expert.data.read.streams import bad_row, open_seekable, unusable
from expert.data.records import BadRow, Row


def read_excel(path: Path) -> Iterator[Row | BadRow]:
    """The rows of the only sheet that has some; a row's line is its number in the sheet."""
    with open_seekable(path) as stream:
        book = _opened(stream, str(path))
        sheets = {
            name: book.get_sheet_by_name(name).to_python(skip_empty_area=False)
            for name in book.sheet_names
        }
    filled = {name: cells for name, cells in sheets.items() if any(any(row) for row in cells)}
    if len(filled) > 1:
        names = ", ".join(f"{name} ({len(cells):,} rows)" for name, cells in filled.items())
        raise unusable(
            str(path),
            f"several sheets have rows: {names}",
            "save the one to train on as a file of its own, or as CSV",
        )
    for cells in filled.values():
        yield from _rows_of(cells, str(path))


def _opened(stream: IO[bytes], file: str) -> Any:
    try:
        calamine = importlib.import_module("python_calamine")
    except ImportError:
        raise unusable(
            file,
            "reading spreadsheets needs the package 'python-calamine'",
            "pip install python-calamine, or save the sheet as CSV",
        ) from None
    try:
        return calamine.CalamineWorkbook.from_filelike(stream)
    except calamine.CalamineError as error:
        raise unusable(
            file, f"it cannot be read as a spreadsheet: {error}", "save it again, or as CSV"
        ) from error


def _rows_of(sheet: Sequence[Sequence[Any]], file: str) -> Iterator[Row | BadRow]:
    filled = (number for number, cells in enumerate(sheet) if any(map(_is_filled, cells)))
    at = next(filled, None)
    if at is None:
        return
    header = [
        str(_value(cell)).strip() if _is_filled(cell) else f"column {number}"
        for number, cell in enumerate(sheet[at], 1)
    ]
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise unusable(f"{file}:{at + 1}", f"two columns are named {twice!r}", "rename one of them")
    for number, cells in enumerate(sheet[at + 1 :], at + 2):
        if not any(map(_is_filled, cells)):
            continue
        values = {name: _value(cell) for name, cell in zip(header, cells, strict=False)}
        named = {n: v for n, v in values.items() if v != "" or not n.startswith("column ")}
        fault = fault_in(named)
        yield bad_row(file, number, fault, repr(named)) if fault else Row(named, file, number)


def _is_filled(cell: Any) -> bool:
    return cell is not None and cell != ""


def _value(cell: Any) -> Any:
    """A cell as JSON would have it: 3.0 is 3, dates as ISO 8601 writes them; an empty one is ""."""
    if isinstance(cell, float) and cell.is_integer():
        return int(cell)
    if isinstance(cell, datetime | date | time):
        return cell.isoformat()
    return "" if cell is None else cell

"""Rows of a spreadsheet (.xlsx, .xls, .xlsb, .ods) with a header, read with `python-calamine`."""

from __future__ import annotations

import contextlib
import importlib
import zipfile
from collections.abc import Iterator, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from expert.data.read.row_text import fault_in
from expert.data.read.streams import bad_row, check_columns, data_error, open_seekable, refuse_bomb
from expert.data.records import BadRow, Row


def read_excel(path: Path, max_unpacked: int | None) -> Iterator[Row | BadRow]:
    """The rows of the only non-empty sheet; the line of a row is its number in the sheet."""
    with open_seekable(path, max_unpacked) as stream:
        # A workbook is a zip file that declares its unpacked size.
        with contextlib.suppress(zipfile.BadZipFile, ValueError, NotImplementedError):
            size = sum(member.file_size for member in zipfile.ZipFile(stream).infolist())
            refuse_bomb(path, max_unpacked, size, stream.seek(0, 2))
        stream.seek(0)
        try:
            calamine = importlib.import_module("python_calamine")
            book = calamine.CalamineWorkbook.from_filelike(stream)
            sheets = {
                name: book.get_sheet_by_name(name).to_python(skip_empty_area=False)
                for name in book.sheet_names
            }
        except ImportError:
            what = "reading spreadsheets needs the package 'python-calamine'"
            fix = "pip install python-calamine, or save the sheet as CSV"
            raise data_error(str(path), what, fix) from None
        except calamine.CalamineError as error:
            what = f"it cannot be read as a spreadsheet: {error}"
            raise data_error(str(path), what, "save it again, or as CSV") from error
    filled = {name: cells for name, cells in sheets.items() if any(any(row) for row in cells)}
    if len(filled) > 1:
        names = ", ".join(f"{name} ({len(cells):,} rows)" for name, cells in filled.items())
        fix = "save the one to train on as a file of its own, or as CSV"
        raise data_error(str(path), f"several sheets have rows: {names}", fix)
    for cells in filled.values():
        yield from _rows_of(cells, str(path))


def _rows_of(sheet: Sequence[Sequence[Any]], file: str) -> Iterator[Row | BadRow]:
    rows = (
        (number, [_value(cell) for cell in cells])
        for number, cells in enumerate(sheet, 1)
        if any(cell is not None and cell != "" for cell in cells)
    )
    line, first = next(rows, (0, []))
    header = [
        str(cell).strip() if cell != "" else f"column {number}"
        for number, cell in enumerate(first, 1)
    ]
    check_columns(header, f"{file}:{line}")
    for number, cells in rows:
        values = dict(zip(header, cells, strict=False))
        named = {n: v for n, v in values.items() if v != "" or not n.startswith("column ")}
        fault = fault_in(named)
        yield bad_row(file, number, fault, repr(named)) if fault else Row(named, file, number)


def _value(cell: Any) -> Any:
    """A cell as in JSON: 3.0 becomes 3, dates ISO 8601, an empty cell ""."""
    if isinstance(cell, float) and cell.is_integer():
        return int(cell)
    if isinstance(cell, datetime | date | time):
        return cell.isoformat()
    return "" if cell is None else cell

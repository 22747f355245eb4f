"""Files of rows written for tests, and what is read from them."""

from __future__ import annotations

import csv
import json
import os
import zipfile
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from expert.core.errors import EXIT_USAGE
from expert.data.read.rows import read_rows
from expert.data.records import BadRow, DataError, Row
from tests.data import FILES


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def good(path: Path, **options: Any) -> list[dict[str, Any]]:
    """The values of all rows, none of which is bad."""
    found = list(read_rows(path, **options))
    assert [str(row) for row in found if isinstance(row, BadRow)] == []
    return [dict(row.values) for row in found if isinstance(row, Row)]


def outline(path: Path, **options: Any) -> list[tuple[int, Any]]:
    return [
        (row.line, row.reason if isinstance(row, BadRow) else dict(row.values))
        for row in read_rows(path, **options)
    ]


def zst(content: bytes, path: Path) -> Path:
    with pa.output_stream(str(path), compression="zstd") as stream:
        stream.write(content)
    return path


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        list(read_rows(path, **options))
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value).replace(str(path.parent) + os.sep, "")


RIVERS = good(FILES / "rivers.jsonl")


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """The rows in the format of the file name."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as stream:
            delimiter = "\t" if path.suffix == ".tsv" else ","
            writer = csv.DictWriter(stream, list(rows[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        write_stream(path, pa.Table.from_pylist(rows))


def write_stream(path: Path, table: Any) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)


_TYPES = (
    '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
    '<Default Extension="rels" '
    'ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
    '<Default Extension="xml" ContentType="application/xml"/></Types>'
)
_MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_LINKS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006/relationships"


def xlsx(path: Path, *sheets: list[list[Any]]) -> Path:
    """A workbook with the least that a reader asks for."""

    def cell(value: Any) -> str:
        if value is None:
            return "<c/>"
        if isinstance(value, int | float):
            return f"<c><v>{value}</v></c>"
        return f'<c t="inlineStr"><is><t xml:space="preserve">{escape(value)}</t></is></c>'

    numbers = range(1, len(sheets) + 1)
    named = "".join(f'<sheet name="S{n}" sheetId="{n}" r:id="r{n}"/>' for n in numbers)
    links = "".join(
        f'<Relationship Id="r{n}" Type="{_LINKS}/worksheet" Target="worksheets/sheet{n}.xml"/>'
        for n in numbers
    )
    book = f'<workbook xmlns="{_MAIN}" xmlns:r="{_LINKS}"><sheets>{named}</sheets></workbook>'
    top = f'<Relationship Id="b" Type="{_LINKS}/officeDocument" Target="xl/workbook.xml"/>'
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("[Content_Types].xml", _TYPES)
        packed.writestr("_rels/.rels", f'<Relationships xmlns="{_PACKAGE}">{top}</Relationships>')
        packed.writestr("xl/workbook.xml", book)
        packed.writestr(
            "xl/_rels/workbook.xml.rels",
            f'<Relationships xmlns="{_PACKAGE}">{links}</Relationships>',
        )
        for number, rows in enumerate(sheets, 1):
            lines = "".join(f"<row>{''.join(map(cell, row))}</row>" for row in rows)
            text = f'<worksheet xmlns="{_MAIN}"><sheetData>{lines}</sheetData></worksheet>'
            packed.writestr(f"xl/worksheets/sheet{number}.xml", text)
    return path

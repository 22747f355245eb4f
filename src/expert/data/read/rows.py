"""Rows of a file of any format, in bounded memory.

An unreadable row is yielded as a BadRow; an unreadable file raises DataError.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expert.core.files import NotRegular
from expert.data.read.csv_rows import read_csv
from expert.data.read.json_rows import is_array, read_json, read_jsonl
from expert.data.read.row_text import INVALID_UTF8, fault_in, undecodable
from expert.data.read.streams import bad_row, data_error, open_text, refuse_other_encoding
from expert.data.records import BadRow, Row
from expert.manifest.schema.file_formats import COMPRESSED, ENDINGS

FORMATS = tuple(ENDINGS)
_SUFFIXES = {ending: name for name, endings in ENDINGS.items() for ending in endings}
_OTHER_NAMES = {"text": "txt", "ndjson": "jsonl", **dict.fromkeys(("xlsx", "xls", "ods"), "excel")}
_SINGLE_FAULTS = 4
"""Rows with invalid UTF-8 that are taken for damage; with more, the file is looked at."""
_FILE_ERRORS: dict[type, tuple[str, str]] = {
    FileNotFoundError: (
        "there is no such file",
        "paths are relative to the folder of the manifest",
    ),
    IsADirectoryError: ("this is a folder, not a file", "name a file in it"),
    PermissionError: ("permission denied", "give yourself permission to read it"),
}


def read_rows(
    path: Path,
    *,
    format: str | None = None,
    max_chars: int | None = None,
    max_unpacked: int | None = None,
    encoding: str | None = None,
) -> Iterator[Row | BadRow]:
    """The rows of a file. `format` overrides the suffix, `max_chars` truncates plain text,
    `max_unpacked` limits a compressed file; `encoding` is that of text, if not UTF-8."""
    kind, undecodable_rows = file_format(path, format), 0
    with _file_errors(path):
        if encoding and kind in ("parquet", "arrow", "excel"):
            what = f"a file of the format {kind} has no encoding"
            raise data_error(str(path), what, "remove training.dataset.encoding")
        if kind in ("parquet", "arrow"):
            from expert.data.read.arrow_rows import read_arrow, read_parquet

            yield from (read_parquet if kind == "parquet" else read_arrow)(path, max_unpacked)
            return
        if kind == "excel":
            from expert.data.read.excel_rows import read_excel

            yield from read_excel(path, max_unpacked)
            return
        with open_text(path, max_unpacked, encoding) as stream:
            if kind == "jsonl" and not is_array(stream):
                rows = read_jsonl(stream, str(path))
            elif kind in ("json", "jsonl"):
                rows = read_json(stream, str(path))
            elif kind == "txt":
                rows = _read_text(stream, str(path), max_chars)
            else:
                rows = read_csv(stream, str(path), delimiter="\t" if kind == "tsv" else None)
            for row in rows:
                if isinstance(row, BadRow) and row.reason.startswith(INVALID_UTF8):
                    undecodable_rows += 1
                    if undecodable_rows == _SINGLE_FAULTS + 1:
                        refuse_other_encoding(path, max_unpacked)
                yield row


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Turn the errors of an unreadable file into a DataError with the fix."""
    try:
        yield
    except NotRegular as error:
        fix = "write its output to a file, and name that"
        raise data_error(str(path), str(error.strerror), fix) from error
    except (OSError, EOFError, zlib.error) as error:
        what, fix = f"it cannot be read: {error}", "check the disk, or copy the file again"
        if type(error) in _FILE_ERRORS:
            what, fix = _FILE_ERRORS[type(error)]
        elif path.suffix.lower() in COMPRESSED:
            what = f"it cannot be unpacked: {error}"
            fix = "the file is cut off or damaged; copy or download it again"
        raise data_error(str(path), what, fix) from error


def suffix_format(path: Path) -> str | None:
    """The format by suffix, ignoring .gz and .zst; None if unknown."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return _SUFFIXES.get(suffixes[-1]) if suffixes else None


def file_format(path: Path, format: str | None = None) -> str:
    """One of FORMATS: the given one, else by suffix."""
    by_suffix = suffix_format(path)
    if format is None or format == "huggingface":
        if by_suffix is None:
            fix = f"set training.dataset.format to one of {', '.join(FORMATS)}"
            raise data_error(str(path), "the format is not clear from the name", fix)
        return by_suffix
    format = _OTHER_NAMES.get(format, format)
    if format not in FORMATS:
        raise data_error(str(path), f"unknown format {format!r}", f"one of {', '.join(FORMATS)}")
    return "tsv" if (format, by_suffix) == ("csv", "tsv") else format


def _read_text(
    stream: io.BufferedReader, file: str, max_chars: int | None
) -> Iterator[Row | BadRow]:
    """The whole text as one row, with \\n as line break."""
    with io.TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape") as reader:
        text = reader.read(max_chars or -1)
    if "\0" in text or (not text.isascii() and undecodable(text)):
        for number, line in enumerate(text.split("\n"), 1):
            if fault := undecodable(line) or fault_in({"text": line}):
                yield bad_row(file, number, fault, line)
                return
    elif text:
        yield Row({"text": text}, file, 1)

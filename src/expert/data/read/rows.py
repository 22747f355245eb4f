"""Rows of a file of any format, one after the other, in bounded memory.

A row that cannot be read is a BadRow among the others; a file that cannot is a DataError.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expert.data.read.csv_rows import SEPARATORS, read_csv, separator_of
from expert.data.read.json_rows import read_json
from expert.data.read.row_text import NOT_UTF8, RowFault, object_of
from expert.data.read.streams import (
    Overlong,
    bad_row,
    numbered_lines,
    open_text,
    too_long,
    unusable,
)
from expert.data.records import BadRow, DataError, Row

FORMATS = ("jsonl", "json", "csv", "tsv", "txt", "parquet", "arrow", "excel")
SPREADSHEETS = (".xlsx", ".xls", ".xlsb", ".xlsm", ".ods")
_MARKDOWN = (".md", ".markdown")
_SUFFIXES = {
    **{f".{name}": name for name in FORMATS if name != "excel"},
    ".ndjson": "jsonl",
    **dict.fromkeys(SPREADSHEETS, "excel"),
    **dict.fromkeys(_MARKDOWN, "txt"),
}
_OTHER_NAMES = {"text": "txt", "ndjson": "jsonl", **dict.fromkeys(("xlsx", "xls", "ods"), "excel")}
_ARRAY_HEAD = 4096
_PACKED = (".gz", ".zst")


def read_rows(
    path: Path, *, format: str | None = None, max_chars: int | None = None
) -> Iterator[Row | BadRow]:
    """The rows of a file; `format` wins over the suffix, `max_chars` cuts plain text."""
    kind = file_format(path, format)
    with _told_in_words(path):
        if kind in ("parquet", "arrow"):
            from expert.data.read.arrow_rows import read_arrow, read_parquet

            yield from (read_parquet if kind == "parquet" else read_arrow)(path)
            return
        if kind == "excel":
            from expert.data.read.excel_rows import read_excel

            yield from read_excel(path)
            return
        with open_text(path) as stream:
            if kind == "jsonl" and not _is_array(stream):
                yield from _read_jsonl(stream, str(path))
            elif kind in ("json", "jsonl"):
                yield from read_json(stream, str(path), read_lines=_read_jsonl)
            elif kind == "txt":
                yield from _read_text(stream, path, max_chars)
            else:
                yield from read_csv(stream, str(path), delimiter="\t" if kind == "tsv" else None)


def rows_of_lines(lines: bytes, path: Path, *, format: str | None = None) -> Iterator[Row | BadRow]:
    """Rows of lines that were taken from a file of JSON lines or, with its header, of CSV; their
    `line` counts within `lines`."""
    kind = file_format(path, format)
    assert kind in ("jsonl", "json", "csv"), kind
    stream: io.BufferedReader = io.BufferedReader(io.BytesIO(lines))
    yield from read_csv(stream, str(path)) if kind == "csv" else _read_jsonl(stream, str(path))


@contextmanager
def _told_in_words(path: Path) -> Iterator[None]:
    """A file that cannot be read is a DataError, whoever reads it."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def unusual_separator(path: Path, format: str | None = None) -> str:
    """What separates the columns of a CSV file, in words; "" for commas and for other formats."""
    if file_format(path, format) != "csv":
        return ""
    with _told_in_words(path), open_text(path) as stream:
        found = separator_of(stream)
    return "" if found == "," else SEPARATORS[found]


def suffix_format(path: Path) -> str | None:
    """The format that a file's name tells, below .gz or .zst; None: it tells none."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _PACKED:
        suffixes.pop()
    return _SUFFIXES.get(suffixes[-1]) if suffixes else None


def is_markdown(path: Path) -> bool:
    """Whether a file is a text that often tells of others: it is read as text is."""
    return any(suffix.lower() in _MARKDOWN for suffix in path.suffixes[-2:])


def file_format(path: Path, format: str | None = None) -> str:
    """One of FORMATS for a file: the given one, otherwise what the name tells."""
    told = suffix_format(path)
    if format is None or format == "huggingface":
        if told is None:
            raise unusable(
                str(path),
                "the name does not tell the format",
                f"set training.dataset.format to one of {', '.join(FORMATS)}",
            )
        return told
    format = _OTHER_NAMES.get(format, format)
    if format not in FORMATS:
        raise unusable(str(path), f"unknown format {format!r}", f"one of {', '.join(FORMATS)}")
    return "tsv" if (format, told) == ("csv", "tsv") else format


def _is_array(stream: io.BufferedReader) -> bool:
    """Whether a file of JSON lines is one array of objects after all, under a wrong name."""
    head = stream.peek(_ARRAY_HEAD)[:_ARRAY_HEAD].lstrip()
    return head.startswith(b"[") and head[1:].lstrip()[:1] in (b"{", b"")


def _read_jsonl(stream: io.BufferedReader, file: str) -> Iterator[Row | BadRow]:
    for number, line in numbered_lines(stream):
        if isinstance(line, Overlong):
            yield bad_row(file, number, too_long(line.size), line.head)
            continue
        try:
            yield Row(object_of(line), file, number)
        except RowFault as fault:
            if line.strip():
                yield bad_row(file, number, str(fault), line)


def _read_text(
    stream: io.BufferedReader, path: Path, max_chars: int | None
) -> Iterator[Row | BadRow]:
    """The whole text as one row, with \\n at the end of every line."""
    try:
        with io.TextIOWrapper(stream, encoding="utf-8") as reader:
            text = reader.read(max_chars or -1)
    except UnicodeDecodeError:
        yield _first_undecodable(path)
        return
    if (place := text.find("\0")) >= 0:
        line = text.count("\n", 0, place) + 1
        yield bad_row(str(path), line, "NUL character", text[text.rfind("\n", 0, place) + 1 :])
    elif text:
        yield Row({"text": text}, str(path), 1)


def _first_undecodable(path: Path) -> BadRow:
    with open_text(path) as stream:
        for number, line in enumerate(stream, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                place = error.start
                reason = f"invalid UTF-8: byte 0x{line[place]:02x} at byte {place + 1}{NOT_UTF8}"
                return bad_row(str(path), number, reason, line)
    raise unusable(str(path), "the file changed while it was read", "start again")


def _unreadable(path: Path, error: Exception) -> DataError:
    """The file as a whole cannot be read: in words, with what to do."""
    if isinstance(error, FileNotFoundError):
        what, fix = "there is no such file", "paths are relative to the folder of the manifest"
    elif isinstance(error, IsADirectoryError):
        what, fix = "this is a folder, not a file", "name a file in it"
    elif isinstance(error, PermissionError):
        what, fix = "it may not be read", "give yourself permission to read it"
    elif path.suffix.lower() in _PACKED:
        what = f"it cannot be unpacked: {error}"
        fix = "the file is cut off or damaged; copy or download it again"
    else:
        what, fix = f"it cannot be read: {error}", "check the disk, or copy the file again"
    return unusable(str(path), what, fix)

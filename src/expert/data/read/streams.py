"""Files as byte streams, decompressed while reading, and their lines in bounded memory."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from expert.core.files import open_regular
from expert.core.text import gib
from expert.data.records import BadRow, DataError, DataNotFound
from expert.manifest.schema.file_formats import COMPRESSED

MAX_ROW_BYTES = 5_000_000
"""Longest row that is read; a longer one is a bad row and is never held in memory."""
MAX_COLUMNS = 1_000
"""Most columns of a row. More of them are no text to train on, and take minutes to look at."""
RAW_CHARACTERS = 200
"""How much of a bad row is kept for rejects.jsonl."""
MOST_UNPACKED = 2**24
"""Bytes that any file may unpack to."""
MOST_TIMES = 200
"""Beyond that, the largest compression ratio. Real data sets have 3 to 30; zip bombs have 1000 with
gzip and more with other formats."""
_WIDE_BOMS = {
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16, whose mark is a prefix
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_OTHER_CONTENT = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"PAR1": ".parquet"}
_MARK_BYTES = 4
_INVALID = re.compile("[\udc80-\udcff]")
_NOT_ASCII = re.compile(rb"[\x80-\xff]+")
_BUFFER_BYTES = 2**18
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, slots=True)
class Overlong:
    """A line that was skipped because it is longer than MAX_ROW_BYTES."""

    size: int
    head: str


def refuse_bomb(
    path: Path, asked: int | None, unpacked: int, packed: int, least: int | None = None
) -> None:
    """DataError if `packed` bytes unpacked to more than they may: `asked` is
    training.dataset.max_unpacked_size, `least` what any file may."""
    most = asked or max(least or MOST_UNPACKED, MOST_TIMES * packed)
    if unpacked > most:
        what = f"{gib(packed)} of it unpack to more than {gib(most)}, as a zip bomb would"
        room = max(100 * most, unpacked) // 2**30 + 1
        fix = f"if it is sound: unpack it, or --set training.dataset.max_unpacked_size={room}GB"
        raise data_error(str(path), what, fix)


def open_bytes(path: Path, most: int | None = None) -> io.BufferedReader:
    """Open a regular file; .gz and .zst are decompressed up to a limit, or `most` bytes."""
    suffix = path.suffix.lower()
    plain = open_regular(path)  # also raises "no such file" and "permission denied"
    if plain.peek(len(_LFS_POINTER)).startswith(_LFS_POINTER):
        plain.close()
        what, fix = "only the Git LFS pointer is here, not the data", "run 'git lfs pull'"
        raise data_error(str(path), what, fix)
    if suffix == ".gz":
        unpacked: Any = gzip.GzipFile(fileobj=plain)
    elif suffix == ".zst":
        # pyarrow notices a truncated stream, zstandard's own reader does not.
        import pyarrow

        unpacked = pyarrow.input_stream(plain, compression="zstd")
    else:
        status, is_sparse = os.fstat(plain.fileno()), False
        if status.st_size > max(most or MOST_UNPACKED, MOST_TIMES * 512 * status.st_blocks):
            # Some network file systems report no blocks at all, but no holes either.
            is_sparse = os.lseek(plain.fileno(), 0, os.SEEK_HOLE) < status.st_size
            plain.seek(0)
        if is_sparse:
            plain.close()
            what = f"most of its {gib(status.st_size)} were never written, and read as zeros"
            raise data_error(str(path), what, "write or download it again")
        return plain
    refuse = partial(refuse_bomb, path, most)
    return io.BufferedReader(_Unpacked(unpacked, plain, refuse), _BUFFER_BYTES)


class _Unpacked(io.RawIOBase):
    """The unpacked content of a file; DataError beyond the limit."""

    def __init__(
        self, unpacked: Any, packed: IO[bytes], refuse: Callable[[int, int], None]
    ) -> None:
        self._unpacked, self._packed, self._refuse = unpacked, packed, refuse
        self._read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = int(self._unpacked.readinto(buffer))
        self._read += count
        if self._read > MOST_UNPACKED:  # compared with the bytes read so far, to stop early
            self._refuse(self._read, self._packed.tell())
        return count

    def close(self) -> None:
        self._unpacked.close()
        if not self._packed.closed:
            self._packed.close()
        super().close()


@contextmanager
def open_text(
    path: Path, most: int | None = None, encoding: str | None = None
) -> Iterator[io.BufferedReader]:
    """The text of a file as UTF-8 without byte-order mark, converted from the encoding that the
    mark or `encoding` names; refuses binary data. `most`: as for `open_bytes`."""
    with open_bytes(path, most) as stream:
        start = stream.peek(_MARK_BYTES)[:_MARK_BYTES]
        marked = (name for mark, name in _WIDE_BOMS.items() if start.startswith(mark))
        wide = next(marked, encoding)
        if wide is not None:
            with _as_utf8(stream, wide, str(path)) as converted:
                yield converted
            return
        other = next((name for mark, name in _OTHER_CONTENT.items() if start.startswith(mark)), "")
        if other:
            what = f"the content is that of a {other} file"
            raise data_error(str(path), what, f"rename it so that its name ends with {other}")
        if start[1:2] == start[3:4] == b"\0" and start[:1] != b"\0":
            what, fix = "the text looks like UTF-16 without its mark", "save it as UTF-8"
            raise data_error(str(path), what, fix)
        if start.startswith(codecs.BOM_UTF8):
            stream.read(len(codecs.BOM_UTF8))
        yield stream


@contextmanager
def _as_utf8(stream: io.BufferedReader, encoding: str, file: str) -> Iterator[Any]:
    """The text of another Unicode encoding, converted into a temporary file."""
    try:
        text = io.TextIOWrapper(stream, encoding=encoding, newline="")
    except LookupError:
        what, fix = f"unknown encoding {encoding!r}", "write it as Python does, such as cp1252"
        raise data_error(file, what, fix) from None
    with text, tempfile.TemporaryFile() as converted:
        try:
            while part := text.read(2**20):
                converted.write(part.encode("utf-8", "surrogatepass"))
        except UnicodeDecodeError as error:
            what = f"broken {encoding.upper()}: {error.reason}"
            raise data_error(file, what, "save it as UTF-8") from None
        converted.seek(0)
        yield converted


def refuse_other_encoding(path: Path, most: int | None) -> None:
    """DataError if the text of a file is not UTF-8, rather than damaged in a few places."""
    with open_bytes(path, most) as stream:
        start = stream.read(2**20)
    text = start.decode("utf-8", "surrogateescape")
    invalid = len(_INVALID.findall(text))
    if sum(not each.isascii() for each in text) <= 2 * invalid:
        # In Western text few such letters stand side by side; in Chinese and Russian most do.
        lengths = [len(letters) for letters in _NOT_ASCII.findall(start)]
        western = sum(length <= 2 for length in lengths) > len(lengths) / 2
        what = "it is not UTF-8" + (", probably cp1252" if western else "")
        fix = f"--set training.dataset.encoding={'cp1252' if western else 'NAME'}"
        raise data_error(str(path), what, fix)


@contextmanager
def open_seekable(path: Path, most: int | None) -> Iterator[IO[bytes]]:
    """A file for readers that seek; a compressed one is unpacked into a temporary file."""
    with open_bytes(path, most) as stream:
        if path.suffix.lower() not in COMPRESSED:
            yield stream
            return
        with tempfile.TemporaryFile() as unpacked:
            shutil.copyfileobj(stream, unpacked, 2**20)
            unpacked.seek(0)
            yield unpacked


def numbered_lines(stream: io.BufferedReader) -> Iterator[tuple[int, str | Overlong]]:
    """Every line with its number from 1, invalid bytes as surrogates; never more than MAX_ROW_BYTES
    in memory."""
    number = 0
    while line := stream.readline(MAX_ROW_BYTES + 2):  # CR and LF do not count
        number += 1
        if len(line) > MAX_ROW_BYTES and len(line.rstrip(b"\r\n")) > MAX_ROW_BYTES:
            head, size = line[: RAW_CHARACTERS * 4], len(line)
            while not line.endswith(b"\n") and (line := stream.readline(2**20)):
                size += len(line)
            yield number, Overlong(size, head.decode("utf-8", "replace"))
        else:
            yield number, line.decode("utf-8", "surrogateescape")


def data_error(file: str, what: str, fix: str = "") -> DataError:
    """The error for data that cannot be used at all: file, problem, fix."""
    return DataError(f"{file}: {what}" + (f"  ({fix})" if fix else ""))


def data_not_found(file: str, what: str, fix: str) -> DataNotFound:
    """The same for data that is not on this machine."""
    return DataNotFound(str(data_error(file, what, fix)))


def bad_row(file: str, line: int, reason: str, raw: str = "") -> BadRow:
    """A bad row with only the beginning of its content, as valid text."""
    start = raw[:RAW_CHARACTERS].encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return BadRow(file, line, reason, start.rstrip("\r\n"))


def check_columns(names: Sequence[str], where: str) -> None:
    """DataError if a table has too many columns, or two of the same name."""
    if len(names) > MAX_COLUMNS:
        what = f"{len(names):,} columns, the limit is {MAX_COLUMNS:,}"
        raise data_error(where, what, "leave out those that are not trained on")
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        what = f"two columns are named {twice!r}" if twice else "columns without a name"
        raise data_error(where, what, "name every column once")


def too_long(size: int) -> str:
    return f"{size / 1e6:.1f} MB long, the limit is {MAX_ROW_BYTES / 1e6:g} MB"

"""Atomic writes, and safe reads of files from outside.

A path from outside may name a pipe, a device or a huge file, and reading it would never end. So
everything is opened with `open_regular`, and whole files are read with `read_text` and its siblings
up to a size limit. Every refusal is an OSError with its reason, like a missing file.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from expert.core.links import open_plain
from expert.core.text import gib

MAX_TEXT_BYTES = 256_000_000
"""Size limit for text that is read whole: a tokenizer, a manifest, a plan."""


KINDS = {
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


class NotRegular(OSError):
    """A pipe, socket or device where a regular file was expected."""


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file, following links; OSError for anything else, which could block or never
    end."""
    _refuse_other_kinds(path, os.stat(path))  # merely opening some devices has side effects
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    stream = open(os.open(path, flags), "rb")  # noqa: SIM115 - the caller's
    try:
        _refuse_other_kinds(path, os.fstat(stream.fileno()))
    except OSError:
        stream.close()
        raise
    return stream


def _refuse_other_kinds(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
    if not stat.S_ISREG(status.st_mode):
        what = KINDS.get(stat.S_IFMT(status.st_mode), "special file")
        raise NotRegular(errno.EINVAL, f"is a {what}, not a regular file", str(path))


def read_bytes(path: Path, most: int = MAX_TEXT_BYTES) -> bytes:
    """Read a whole regular file; OSError if it is larger than `most` bytes."""
    with open_regular(path) as stream:
        content = stream.read(most + 1)
        if len(content) > most:
            size = max(os.fstat(stream.fileno()).st_size, len(content))
            what = f"has {gib(size)}; no more than {gib(most)} are read"
            raise OSError(errno.EFBIG, what, str(path))
    return content


def read_text(path: Path, most: int = MAX_TEXT_BYTES, *, encoding: str = "utf-8") -> str:
    """Read the text of a regular file with every line ending as \\n; limits as in `read_bytes`."""
    text = read_bytes(path, most).decode(encoding)
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def read_json(path: Path, most: int = MAX_TEXT_BYTES, *, encoding: str = "utf-8") -> Any:
    """Read a JSON value; limits as in `read_bytes`, ValueError if invalid or too deeply nested."""
    try:
        return json.loads(read_text(path, most, encoding=encoding))
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None


@contextmanager
def replacing(
    path: Path, *, before_rename: Callable[[Path], None] = lambda temporary: None
) -> Iterator[IO[bytes]]:
    """A stream that becomes `path` on exit: either the old file or the complete new one is there,
    also after a power cut. Its temporary name is unique, so no link can be waiting there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    try:
        with temporary.open("xb") as stream:
            if path.is_file() and not path.is_symlink():  # a link is replaced, never followed
                os.fchmod(stream.fileno(), stat.S_IMODE(path.stat().st_mode) & 0o777)
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        before_rename(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = str(path)  # a failed write names no file
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_text_atomically(path: Path, text: str) -> None:
    with replacing(path) as stream:
        stream.write(text.encode("utf-8"))


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Lock a file against writes by other processes; the lock ends with the process."""
    from filelock import FileLock

    lock = path.with_name(f".{path.name}.lock")
    os.close(open_plain(lock, os.O_RDWR | os.O_CREAT))  # refuses a link
    with FileLock(lock, fallback_to_soft=False):
        yield


_NOT_LOOKED_INTO = re.compile(
    r"\..+|__pycache__|node_modules|site-packages|datasets_optimized|(models|datasets)--.+"
)


def files_below(folder: Path, skipped: list[Path] | None = None) -> Iterator[Path]:
    """Every file of a folder, at any depth, a folder's own before those below it.

    Skips run folders, virtual environments, hidden folders, caches and links to a folder above,
    which are added to `skipped`, as are folders that cannot be opened. A folder with several names
    is searched once, under its own name if that is below `folder`: links come last.
    """
    left_out: list[Path] = [] if skipped is None else skipped
    seen: set[str] = set()
    tops = [folder]

    def locked(error: OSError) -> None:
        left_out.append(Path(error.filename))

    for top in tops:
        for here, inner, files in os.walk(top, onerror=locked):
            place = os.path.realpath(here)
            if place in seen:
                inner.clear()
                continue
            is_run = "plan.json" in files and {"events.jsonl", "environment.json"} & {*files}
            if here != str(folder) and (is_run or "pyvenv.cfg" in files):
                left_out.append(Path(here))
                inner.clear()
                continue
            seen.add(place)
            entered = []
            for name in sorted(inner):
                path = os.path.join(here, name)
                if _NOT_LOOKED_INTO.fullmatch(name):
                    left_out.append(Path(path))
                elif os.path.islink(path):
                    leads_up = Path(path).resolve() in folder.resolve().parents
                    (left_out if leads_up else tops).append(Path(path))
                else:
                    entered.append(name)
            inner[:] = entered
            yield from (Path(here) / name for name in sorted(files))


def sync_file(path: Path) -> None:
    """Make the bytes of a file survive a power cut."""
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    with open_regular(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

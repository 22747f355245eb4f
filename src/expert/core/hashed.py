"""Single files with their sha256 in a file beside them, so that damage is noticed on reading.

The hash is written before its file, along with the hash of the file being replaced: at every
moment, and after a power cut, whichever of the two is present can be verified.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Literal

from expert.core.errors import Damaged
from expert.core.files import (
    MAX_TEXT_BYTES,
    read_bytes,
    replacing,
    sha256_of,
    write_text_atomically,
)

SUFFIX = ".sha256"
MAX_BYTES = 10_000
State = Literal["sound", "damaged", "unknown", "missing"]


def hash_file(path: Path) -> Path:
    """Where the hash of a file is stored: a hidden file beside it."""
    return path.with_name(f".{path.name.lstrip('.')}{SUFFIX}")


def file_integrity(path: Path) -> State:
    """Whether a file is as it was written; unknown if it has no stored hash."""
    if not path.is_file():
        return "missing"
    known = _known(path)
    if known is None:
        return "unknown"
    try:
        return "sound" if sha256_of(path) in known else "damaged"
    except OSError:
        return "damaged"


def writing_hashed(path: Path) -> AbstractContextManager[IO[bytes]]:
    """A stream that becomes `path` on exit, after its hash."""

    def keep_hash(temporary: Path) -> None:
        hashes = [sha256_of(temporary)]
        if file_integrity(path) in ("sound", "unknown"):
            hashes.append(sha256_of(path))  # valid until it is replaced
        lines = [f"{value}  {path.name}\n" for value in dict.fromkeys(hashes)]
        write_text_atomically(hash_file(path), "".join(lines))

    return replacing(path, before_rename=keep_hash)


def write_hashed(path: Path, text: str) -> None:
    """Write the hash, then replace `path` by `text`; a damaged file there is set aside."""
    if file_integrity(path) == "damaged":
        put_copy_aside(path)
    with writing_hashed(path) as stream:
        stream.write(text.encode("utf-8"))


def refuse_damaged(path: Path, advice: str) -> None:
    """Raise if a text file does not match its hash; files without one pass. A
    file too large to be read is not hashed: Expert never wrote it."""
    if path.is_file() and path.stat().st_size > MAX_TEXT_BYTES:
        damaged = _known(path) is not None
    else:
        damaged = file_integrity(path) == "damaged"
    if damaged:
        raise Damaged(f"{path}: changed after it was written  ({advice})")


def put_copy_aside(path: Path) -> Path:
    """Copy a damaged file to another name. The original stays until it is replaced: other processes
    may have it open."""
    aside = free_name(path.with_name(f"{path.name}.bad"))
    with contextlib.suppress(OSError):  # an unwritable folder: nothing will be replaced either
        shutil.copyfile(path, aside, follow_symlinks=False)
    return aside


def free_name(path: Path) -> Path:
    """The path, with a number appended if it is taken."""
    number = 1
    free = path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _known(path: Path) -> set[str] | None:
    """The hashes a file may have; None if none is stored. A damaged hash file matches nothing."""
    file = hash_file(path)
    if not os.path.lexists(file):
        return None
    try:
        text = read_bytes(file, MAX_BYTES)
    except OSError:
        return set()
    return {
        line.split()[0].decode("ascii", "replace") for line in text.splitlines() if line.strip()
    }

"""Room on a disk: looked at before a byte is written, and named where it runs out."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expert.core.errors import EXIT_NO_SPACE, ExpertError
from expert.core.text import gib

_FULL = (errno.ENOSPC, errno.EDQUOT)
_TOO_LARGE = errno.EFBIG
AGAIN = "make room, then give the same command again"


class DiskFull(ExpertError):
    """There is no room for what is to be written; what was written before is untouched."""

    exit_code = EXIT_NO_SPACE


def free_bytes(place: Path) -> int:
    """What is free where a file or folder is, or will be."""
    there = place.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    return shutil.disk_usage(there).free


def said_no_room(error: BaseException) -> str:
    """In the words of the system that a disk, a quota or a file is full; "" for another error.

    Arrow and safetensors give no number, but quote those words; of a file that is too large to be
    read we say so in others.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL:
        return os.strerror(number or 0)
    said = (os.strerror(each) for each in (*_FULL, _TOO_LARGE))
    return next((words for words in said if words in str(error)), "")


def no_room(
    place: Path,
    said: str = "too little room",
    *,
    what: str = "it",
    needed: int | None = None,
    fix: str = AGAIN,
) -> DiskFull:
    """The place, what it needs where that is known, and what is free."""
    needs = f"{what} needs about {gib(needed)}, " if needed is not None else ""
    return DiskFull(f"{place}: {said}: {needs}{gib(free_bytes(place))} are free  ({fix})")


@contextmanager
def within_room(place: Path, what: str, needed: int | None, *, fix: str = AGAIN) -> Iterator[None]:
    """Errors of a full disk as DiskFull about what is being written: those of libraries name no
    file, and that of a copy names its source."""
    try:
        yield
    except DiskFull:
        raise
    except Exception as error:
        said = said_no_room(error)
        if not said:
            raise
        raise no_room(place, said, what=what, needed=needed, fix=fix) from error


def full_disk_behind(error: OSError) -> DiskFull | None:
    """The full disk that an error of a named file comes from, where nobody knew what it needs."""
    place, said = error.filename2 or error.filename, said_no_room(error)
    return no_room(Path(os.fsdecode(place)), said) if place and said else None

"""What runs out: room on a disk, which is looked at before a byte is written, and memory, threads
and open files of this process; told from other faults, and named."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expert.core.errors import EXIT_NO_SPACE, EXIT_RUN_FAILED, ExpertError
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


# --- memory, threads, open files -----------------------------------------------------------------

NEED_TORCH = ("train", "validate", "sample", "benchmark", "export", "serve")
"""Commands that load torch, whose libraries end the process without a word below this limit."""
LEAST_BYTES = 2**30

_MEMORY = re.compile(
    r"can(no|')t allocate memory|bad_alloc|not enough memory|failed to map segment|unable to mmap",
    re.IGNORECASE,
)
_THREADS = re.compile(
    r"can't start new thread|thread.*resource temporarily unavailable|pthread_create", re.IGNORECASE
)


class TooLittle(ExpertError):
    """A limit of this process or machine that the command does not fit."""

    exit_code = EXIT_RUN_FAILED


def shortage_behind(error: BaseException) -> TooLittle | None:
    """What was lacking where an error, or what led to it, comes from that; None: another fault."""
    found: BaseException | None = error
    while found is not None:
        number = found.errno if isinstance(found, OSError) else None
        text = str(found)
        if "CUDA out of memory" in text:
            detail = text.partition(" GPU ")[0].strip()
            return TooLittle(f"the GPU has too little memory: {detail}  (nvidia-smi shows who uses "
                             "it; --device cpu computes without it)")  # fmt: skip
        if isinstance(found, MemoryError) or number == errno.ENOMEM or _MEMORY.search(text):
            return _no_memory(text)
        if number == errno.EAGAIN or _THREADS.search(text):
            return _told("this process cannot start another thread or process", "NPROC", "u")
        if number in (errno.EMFILE, errno.ENFILE):
            return _told("too many files are open", "NOFILE", "n")
        found = found.__cause__
    return None


def refuse_small_memory(command: str) -> None:
    """TooLittle where a command loads torch and may not take the memory for that."""
    limit = _limit("AS")
    if command in NEED_TORCH and limit is not None and limit < LEAST_BYTES:
        raise _no_memory(f"loading torch takes at least {gib(LEAST_BYTES)}")


def _no_memory(detail: str) -> TooLittle:
    detail = detail.strip().split("\n")[0]
    return _told("not enough memory" + (f": {detail}" if detail else ""), "AS", "v")


def _told(what: str, limit: str, letter: str) -> TooLittle:
    """With the limit of the shell where there is one, else with what the machine has left."""
    most = _limit(limit)
    if most is not None:
        shown = gib(most) if limit == "AS" else f"{most:,}"
        return TooLittle(f"{what}; the limit is {shown}  (raise it: ulimit -{letter})")
    free = ""
    if limit == "AS" and "SC_AVPHYS_PAGES" in os.sysconf_names:
        pages, size = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        free = f"; {gib(pages * size)} are free on this machine"
    return TooLittle(f"{what}{free}  (end other programs, or use a larger machine)")


def _limit(name: str) -> int | None:
    """A limit that the shell has set for this process."""
    try:
        import resource
    except ImportError:  # Windows has none
        return None
    most = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
    return None if most == resource.RLIM_INFINITY else most

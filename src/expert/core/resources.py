"""Errors of exhausted resources: disk space, and the memory, threads and open files of this
process."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expert.core.errors import EXIT_NO_SPACE, EXIT_RUN_FAILED, ExpertError
from expert.core.text import gib

_FULL = (errno.ENOSPC, errno.EDQUOT)
_TOO_LARGE = errno.EFBIG
_CUT_SHORT = re.compile(r"\d+ requested and \d+ written")
TOO_LITTLE = "too little room"
AGAIN = "free some space, then run the same command again"


class DiskFull(ExpertError):
    """Not enough disk space; existing files are untouched."""

    exit_code = EXIT_NO_SPACE


def free_bytes(place: Path) -> int:
    """Free disk space where a file or folder is, or will be."""
    there = place.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    return shutil.disk_usage(there).free


def disk_full_message(error: BaseException) -> str:
    """The system's message if a disk, a quota or a file is full; "" for any other error.

    Arrow and safetensors give no errno but quote the message, numpy counts what it wrote. EFBIG
    counts only by its message: `read_bytes` uses the number for files too large to read.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL:
        return os.strerror(number or 0)
    if _CUT_SHORT.fullmatch(str(error)):
        return TOO_LITTLE
    messages = (os.strerror(number) for number in (*_FULL, _TOO_LARGE))
    return next((message for message in messages if message in str(error)), "")


def disk_full_error(
    place: Path,
    said: str = TOO_LITTLE,
    *,
    what: str = "it",
    needed: int | None = None,
    fix: str = AGAIN,
) -> DiskFull:
    """An error with the place, the space needed if known, and the free space."""
    needs = f"{what} needs about {gib(needed)}, " if needed is not None else ""
    return DiskFull(f"{place}: {said}: {needs}{gib(free_bytes(place))} are free  ({fix})")


@contextmanager
def reporting_disk_full(
    place: Path, what: str, needed: int | None, *, fix: str = AGAIN
) -> Iterator[None]:
    """Turn errors of a full disk into DiskFull, with the place and `what` was being written there:
    libraries name no file, and a failed copy names its source."""
    try:
        yield
    except DiskFull:
        raise
    except Exception as error:
        said = disk_full_message(error)
        if not said:
            raise
        raise disk_full_error(place, said, what=what, needed=needed, fix=fix) from error


def disk_full_cause(error: OSError) -> DiskFull | None:
    """DiskFull for an error that names a file, where the space needed is unknown."""
    place, said = error.filename2 or error.filename, disk_full_message(error)
    return disk_full_error(Path(os.fsdecode(place)), said) if place and said else None


# --- memory, threads, open files -----------------------------------------------------------------

NEED_TORCH = ("train", "validate", "improve", "sample", "benchmark", "export", "serve")
"""Commands that load torch, whose libraries crash without a message below LEAST_BYTES."""
LEAST_BYTES = 2**30

_MEMORY = re.compile(
    r"can(no|')t allocate memory|bad_alloc|not enough memory|failed to map segment|unable to mmap",
    re.IGNORECASE,
)
_THREADS = re.compile(
    r"can't start new thread|thread.*resource temporarily unavailable|pthread_create", re.IGNORECASE
)


class ResourceLimitError(ExpertError):
    """A limit of this process or machine that is too low for the command."""

    exit_code = EXIT_RUN_FAILED


def resource_shortage(error: BaseException) -> ResourceLimitError | None:
    """The exhausted resource behind an error or its causes; None if it is another fault."""
    cause: BaseException | None = error
    while cause is not None:
        number = cause.errno if isinstance(cause, OSError) else None
        text = str(cause)
        if "CUDA out of memory" in text:
            detail = text.partition(" GPU ")[0].strip()
            fix = "nvidia-smi shows which processes use it; --device cpu runs without it"
            return ResourceLimitError(f"not enough GPU memory: {detail}  ({fix})")
        if isinstance(cause, MemoryError) or number == errno.ENOMEM or _MEMORY.search(text):
            detail = text.strip().split("\n")[0]
            return _shortage("not enough memory" + (f": {detail}" if detail else ""), "v")
        if number == errno.EAGAIN or _THREADS.search(text):
            return _shortage("this process cannot start another thread or process", "u")
        if number in (errno.EMFILE, errno.ENFILE):
            return _shortage("too many files are open", "n")
        cause = cause.__cause__
    return None


def check_memory_limit(command: str) -> None:
    """Raise ResourceLimitError if the memory limit is too low for a command that loads torch."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if command in NEED_TORCH and limit != resource.RLIM_INFINITY and limit < LEAST_BYTES:
        raise _shortage(f"not enough memory: loading torch takes {gib(LEAST_BYTES)}", "v")


def _shortage(what: str, letter: str) -> ResourceLimitError:
    """`letter`: of the limit that `ulimit` sets."""
    fix = f"end other programs, raise the limit (ulimit -{letter}), or use a larger machine"
    return ResourceLimitError(f"{what}  ({fix})")

"""Refuses links in folders that Expert manages, so that writes stay inside them.

The folder of an expert, a run or a cache may come from someone else. Through a link in it Expert
would overwrite, empty or delete a file of the user, and a pipe would block forever. Paths that the
user names may contain links; the contents of managed folders may not.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from expert.core.errors import ExpertError

SHOWN = 5

_CAREFUL = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
KINDS = {
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}
_REMOVE = "remove it; Expert writes only to plain files inside its own folders"


class LinkRefused(ExpertError):
    """A link, pipe or device inside a folder that Expert manages."""


def refuse_links(place: Path, *, below: Path, instead: str = "") -> None:
    """Raise if a part of `place` below the folder `below` is a link.

    A place elsewhere was named by the user and is accepted. `instead` tells the user how to choose
    another place deliberately.
    """
    try:
        parts = place.absolute().relative_to(below.absolute()).parts
    except ValueError:
        return
    here, depth = below, 0
    for part in parts:
        here, depth = here / part, depth + (-1 if part == ".." else 1)
        if depth < 0:
            return
        fault = _fault(here)
        if fault:
            raise LinkRefused(_message([fault], instead))


def refuse_links_inside(folder: Path, *, instead: str = "") -> None:
    """Raise if anything in the folder, at any depth, is a link, a pipe or a device."""
    faults = list(_faults_inside(folder))
    if faults:
        raise LinkRefused(_message(faults, instead))


def open_plain(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a plain file of a managed folder without blocking; anything else is refused, and so is
    writing to a file with a second name: it may be one of the user's outside this folder."""
    fault = _fault(path)
    if fault:
        raise LinkRefused(_message([fault]))
    try:
        descriptor = os.open(path, flags | _CAREFUL, mode)
    except OSError:
        fault = _fault(path)  # it became a link in the meantime
        if fault:
            raise LinkRefused(_message([fault])) from None
        raise
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    fault = _fault_of(path, status)
    if not fault and flags & (os.O_WRONLY | os.O_RDWR) and status.st_nlink > 1:
        fault = f"{path}: has {status.st_nlink} names (hard links), and all of them would change"
    if fault:
        os.close(descriptor)
        raise LinkRefused(_message([fault]))
    return descriptor


def _faults_inside(folder: Path) -> Iterator[str]:
    folders = [folder]  # no recursion: the nesting may be thousands deep
    while folders:
        here = folders.pop()
        try:
            names = sorted(os.listdir(here))
        except OSError:  # gone or unreadable: reported when it is opened
            continue
        for path in (here / name for name in names):
            fault = _fault(path)
            if fault:
                yield fault
            elif path.is_dir():
                folders.append(path)


def _fault(path: Path) -> str:
    """Why a path is refused; "" if it is fine or does not exist."""
    try:
        return _fault_of(path, path.lstat())
    except OSError:
        return ""


def _fault_of(path: Path, status: os.stat_result) -> str:
    if stat.S_ISLNK(status.st_mode):
        return f"{path}: is a link to {_target(path)}"
    word = KINDS.get(stat.S_IFMT(status.st_mode))
    return f"{path}: is a {word}" if word else ""


def _target(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return "a place that cannot be read"


def _message(faults: Sequence[str], instead: str = "") -> str:
    more = [f"… and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
    fix = f"{_REMOVE}; {instead}" if instead else _REMOVE
    return "\n".join([*faults[:SHOWN], *more]) + f"  ({fix})"

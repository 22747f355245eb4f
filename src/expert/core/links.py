"""Folders that Expert manages hold no links: what is written there stays there.

The folder of an expert, a run or a cache may come from somebody else. A link in it would lead what
is written, emptied or deleted to a file of the user's, and a pipe would be waited for without end.
A path that the user has named may hold links; what lies inside a managed folder may not.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from expert.core.errors import ExpertError

SHOWN = 5
WRITING = os.O_WRONLY | os.O_RDWR

# Windows has neither: there the look before opening is all there is.
_CAREFUL = (
    getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)
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
    """Raise where a part of `place` below the folder `below` is a link.

    A place elsewhere was named by the user and is as it is. `instead` says how to ask for another
    place on purpose.
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
        found = _fault(here)
        if found:
            raise LinkRefused(_told([found], instead))


def refuse_links_inside(folder: Path, *, instead: str = "") -> None:
    """Raise where anything in the folder, at any depth, is a link, a pipe or a device."""
    found = list(_faults_inside(folder))
    if found:
        raise LinkRefused(_told(found, instead))


def open_plain(path: Path, flags: int, mode: int = 0o666) -> int:
    """A descriptor of a plain file of a managed folder; anything else is refused, and a file with a
    second name is not written to. Nothing is waited for."""
    fault = _fault(path)
    if fault:
        raise LinkRefused(_told([fault]))
    try:
        descriptor = os.open(path, flags | _CAREFUL, mode)
    except OSError:
        fault = _fault(path)  # it became a link since
        if fault:
            raise LinkRefused(_told([fault])) from None
        raise
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    fault = _fault_of(path, status)
    if fault or (flags & WRITING and status.st_nlink > 1):
        os.close(descriptor)
        raise LinkRefused(
            _told([fault])
            if fault
            else f"{path}: has {status.st_nlink} names (hard links), and all of them would change  "
            "(put a copy in its place)"
        )
    return descriptor


def _faults_inside(folder: Path) -> Iterator[str]:
    folders = [folder]  # not a recursion: somebody else may have made thousands inside each other
    while folders:
        here = folders.pop()
        try:
            names = sorted(os.listdir(here))
        except OSError:  # gone, or not ours to read: who opens it says so
            continue
        for path in (here / name for name in names):
            fault = _fault(path)
            if fault:
                yield fault
            elif path.is_dir():
                folders.append(path)


def _fault(path: Path) -> str:
    """What speaks against a path that may not be there, or nothing."""
    try:
        return _fault_of(path, path.lstat())
    except OSError:
        return ""


def _fault_of(path: Path, status: os.stat_result) -> str:
    if _is_link(status):
        return f"{path}: is a link to {_target(path)}"
    word = KINDS.get(stat.S_IFMT(status.st_mode))
    return f"{path}: is a {word}" if word else ""


def _is_link(status: os.stat_result) -> bool:
    """A symbolic link, or a junction of Windows."""
    junction = getattr(stat, "IO_REPARSE_TAG_MOUNT_POINT", None)
    tag = getattr(status, "st_reparse_tag", None)
    return stat.S_ISLNK(status.st_mode) or (tag is not None and tag == junction)


def _target(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return "a place that cannot be read"


def _told(faults: Sequence[str], instead: str = "") -> str:
    more = [f"… and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
    fix = f"{_REMOVE}; {instead}" if instead else _REMOVE
    return "\n".join([*faults[:SHOWN], *more]) + f"  ({fix})"

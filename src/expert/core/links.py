"""Refuses links in folders that Expert manages, so that writes stay inside them.

The folder of an expert, a run or a cache may come from someone else. Through a link in it Expert
would overwrite, empty or delete a file of the user, and a pipe would block forever. Paths that the
user names may contain links; the contents of managed folders may not.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from expert.core.errors import ExpertError

_CAREFUL = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FIX = (
    "Expert writes only to plain files inside its own folders: remove it; to use another disk, "
    "name its folder: --output FOLDER, or output_dir and pretokenized_cache in training.config"
)


class LinkRefused(ExpertError):
    """A link, pipe or device inside a folder that Expert manages."""


def refuse_links(place: Path, *, below: Path) -> None:
    """Raise if a part of `place` below the folder `below` is a link.

    A place elsewhere was named by the user and is accepted.
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
        _refuse(here)


def refuse_links_inside(folder: Path) -> None:
    """Raise if anything in the folder, at any depth, is a link, a pipe or a device."""
    folders = [folder]  # no recursion: the nesting may be thousands deep
    while folders:
        here = folders.pop()
        try:
            paths = [here / name for name in sorted(os.listdir(here))]
        except OSError:  # gone or unreadable: reported when it is opened
            continue
        for path in paths:
            _refuse(path)
        folders += [path for path in paths if path.is_dir()]


def open_plain(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a plain file of a managed folder without blocking; anything else is refused, and so is
    writing to a file with a second name: it may be one of the user's outside this folder."""
    _refuse(path)  # merely opening some devices has effects
    try:
        descriptor = os.open(path, flags | _CAREFUL, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:  # it became a link in the meantime
            raise _refusal(path, "is a link") from None
        raise
    status = os.fstat(descriptor)
    try:
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise _refusal(path, "is not a plain file")
        if flags & (os.O_WRONLY | os.O_RDWR) and status.st_nlink > 1:
            raise _refusal(path, f"has {status.st_nlink} names (hard links): all would change")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _refuse(path: Path) -> None:
    """Raise if the path exists and is neither a file nor a folder."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if stat.S_ISLNK(mode):
        raise _refusal(path, "is a link")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise _refusal(path, "is not a plain file")


def _refusal(path: Path, what: str) -> LinkRefused:
    return LinkRefused(f"{path}: {what}  ({_FIX})")

"""Files that are either the old one or the whole new one, never half of it."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expert.core.links import open_plain


def write_text_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text`: write a file beside it, flush, fsync, rename, fsync the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        _keep_mode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _keep_mode(path: Path, temporary: str) -> None:
    """Give the new file the old one's mode, or what a plain open() would have given it."""
    try:
        before = path.lstat().st_mode
    except OSError:
        before = 0
    if stat.S_ISREG(before):  # a link is replaced, never followed
        mode = stat.S_IMODE(before) & 0o777
    else:
        mask = os.umask(0)
        os.umask(mask)
        mode = 0o666 & ~mask
    os.chmod(temporary, mode)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keep other processes from writing a file in between; the lock ends with its process."""
    from filelock import FileLock

    lock = path.with_name(f".{path.name}.lock")
    os.close(open_plain(lock, os.O_RDWR | os.O_CREAT))  # refuses a link
    with FileLock(lock, fallback_to_soft=False):
        yield


def sync_file(path: Path) -> None:
    """Make the bytes of a file survive a power cut."""
    with path.open("rb+") as stream:  # Windows syncs only what is open for writing
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut; Windows cannot and needs not."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """The hexadecimal digest of all that a file holds."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

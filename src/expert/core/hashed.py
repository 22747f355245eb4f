"""Single files with their sha256 in a file beside them: what is read back is what was written.

The hash is written before its file, and keeps that of the file which is replaced: at every moment,
and after a power cut, whichever of the two is there is known.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal

from expert.core.errors import Damaged
from expert.core.files import read_bytes, sha256_of, sync_folder, write_text_atomically

SUFFIX = ".sha256"
MAX_BYTES = 10_000
State = Literal["sound", "damaged", "unknown", "missing"]


def hash_file(path: Path) -> Path:
    """Where the hash of a file is kept: hidden, beside it."""
    return path.with_name(f".{path.name.lstrip('.')}{SUFFIX}")


def state_of(path: Path) -> State:
    """Whether a file is as it was written; unknown where no hash was kept of it."""
    if not path.is_file():
        return "missing"
    known = _known(path)
    if known is None:
        return "unknown"
    try:
        return "sound" if sha256_of(path) in known else "damaged"
    except OSError:
        return "damaged"


def keep_hash(path: Path, sha256: str, *, trusts_old: bool = False) -> None:
    """Write down the hash of what is about to become `path`. `trusts_old`: one of an earlier
    version, of which no hash was kept, is as good as ever until then."""
    own = [sha256]
    if state_of(path) in ("sound", "unknown" if trusts_old else "sound"):
        own.append(sha256_of(path))  # until it is replaced
    lines = [f"{each}  {path.name}\n" for each in dict.fromkeys(own)]
    write_text_atomically(hash_file(path), "".join(lines))


def write_hashed(path: Path, text: str, *, trusts_old: bool = False) -> None:
    """Replace `path` by `text`, after its hash; what is there and damaged is put aside."""
    if state_of(path) == "damaged":
        put_copy_aside(path)
    sha256 = hashlib.sha256(text.encode("utf-8")).hexdigest()
    keep_hash(path, sha256, trusts_old=trusts_old)
    write_text_atomically(path, text)


@contextlib.contextmanager
def writing_hashed(path: Path) -> Iterator[IO[bytes]]:
    """A stream that becomes `path` when it is left, after its hash: the old file or the whole new
    one, never half of it. The name that it has before is new: no link waits there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        keep_hash(path, sha256_of(temporary))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def refuse_damaged(path: Path, advice: str) -> None:
    """Raise where a file has other bytes than were written; one without a hash is of an earlier
    version, and is taken as it is."""
    if state_of(path) == "damaged":
        raise Damaged(f"{path}: has other bytes than were written  ({advice})")


def put_copy_aside(path: Path) -> Path:
    """Keep what a damaged file holds under another name; it stays where it is until it is replaced,
    as other processes may have it open."""
    aside = free_name(path.with_name(f"{path.name}.bad"))
    with contextlib.suppress(OSError):  # where nothing can be written, nothing is replaced
        shutil.copyfile(path, aside, follow_symlinks=False)
    return aside


def told_aside(path: Path, made: str) -> str:
    """Put a damaged file aside, and say so: `made` is what is done again."""
    aside = put_copy_aside(path).name
    words = f"has other bytes than were written: {made} again, and the damaged one put aside as"
    return f"{path}: {words} {aside}"


def free_name(path: Path) -> Path:
    """The name, or with a number where it is taken."""
    number = 1
    free = path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _known(path: Path) -> set[str] | None:
    """The hashes a file may have; None where none was kept. A damaged one fits nothing."""
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

"""Damage to files on disk that keeps their times and, where it can, their sizes."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KINDS = ("bit", "bit", "bit", "byte", "zeroes", "cut", "empty", "gone")


def files_in(folder: Path) -> list[Path]:
    """Every file that is ever read back: locks are not."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock")


def damage(path: Path, kind: str, dice: random.Random) -> str:
    """Damage a file and keep its times; returns what was done, in words."""
    status, data = path.stat(), bytearray(path.read_bytes())
    at = dice.randrange(len(data)) if data else 0
    if kind == "gone":
        path.unlink()
        return f"{path.name} gone"
    if kind == "last byte":
        data[-1] ^= 1
    elif kind == "bit" and data:
        data[at] ^= 1 << dice.randrange(8)
    elif kind == "byte" and data:
        data[at] = (data[at] + 1 + dice.randrange(255)) % 256
    elif kind == "zeroes":
        data[at : at + 16] = bytes(len(data[at : at + 16]))
    else:
        del data[at if kind == "cut" else 0 :]
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return f"{path.name} {kind} at {at}"


@contextmanager
def put_back(folder: Path, kept: Path) -> Iterator[None]:
    """Afterwards the folder is as it was."""
    if not kept.exists():
        shutil.copytree(folder, kept)
    try:
        yield
    finally:
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)

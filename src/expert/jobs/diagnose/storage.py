"""Read speed of the disk, without the page cache if possible.

A file that was read before comes from memory, which says nothing about the disk. O_DIRECT bypasses
the cache on file systems that support it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

BLOCK = 4 * 2**20
SECONDS = 1.0
MOST_BYTES = 2 * 2**30
"""A fast disk reads this in a second; more would show nothing new."""
LEAST_BYTES = 2**20
"""Less is mostly the latency of the first byte."""

How = Literal["direct", "through the cache"]


def read_speed(files: Sequence[Path], *, seconds: float = SECONDS) -> tuple[int, float, How] | None:
    """Read real files for at most this long: bytes, seconds and how; None if too little was
    read."""
    sized = sorted(((path.stat().st_size, path) for path in files if path.is_file()), reverse=True)
    total, spent, how = 0, 0.0, None
    for size, path in sized:
        if not size or spent >= seconds or total >= MOST_BYTES:
            break
        try:
            count, took, way = _read_one(path, seconds - spent, MOST_BYTES - total)
        except OSError:
            continue
        total, spent, how = total + count, spent + took, how or way
    return (total, spent, how) if how is not None and total >= LEAST_BYTES else None


def _read_one(path: Path, seconds: float, most: int) -> tuple[int, float, How]:
    direct = getattr(os, "O_DIRECT", 0)
    with contextlib.suppress(OSError):  # tmpfs and some network file systems lack it
        count, took = _read(path, os.O_RDONLY | direct, seconds, most) if direct else (0, 0.0)
        if count:
            return count, took, "direct"
    count, took = _read(path, os.O_RDONLY | getattr(os, "O_BINARY", 0), seconds, most)
    return count, took, "through the cache"


def _read(path: Path, flags: int, seconds: float, most: int) -> tuple[int, float]:
    """Bytes and seconds; the buffer is page-aligned, as O_DIRECT requires."""
    start, count = time.perf_counter(), 0
    with (
        open(os.open(path, flags), "rb", buffering=0) as stream,
        mmap.mmap(-1, BLOCK) as buffer,
    ):
        while count < most and time.perf_counter() - start < seconds:
            got = stream.readinto(buffer) or 0
            count += got
            if got < BLOCK:
                break
    return count, time.perf_counter() - start

"""A full disk is reported with the path, the space needed and the free space."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from expert.core.resources import (
    DiskFull,
    disk_full_cause,
    disk_full_message,
    free_bytes,
    reporting_disk_full,
)
from tests.each import each

FULL = os.strerror(errno.ENOSPC)
NO_ROOM = {
    "the system": OSError(errno.ENOSPC, FULL),
    "a quota": OSError(errno.EDQUOT, "x"),
    "a limit": OSError(errno.EFBIG, os.strerror(errno.EFBIG)),
    "Arrow": OSError(f"Error writing bytes to file. Detail: [errno 28] {FULL}"),
    "safetensors": ValueError(f"I/O error: {FULL} (os error 28)"),
    "numpy": OSError("131072 requested and 3304 written"),
}
OTHER = {
    "too large to read": OSError(errno.EFBIG, "has 9 GiB; no more than 1 GiB are read"),
    "a missing file": FileNotFoundError(2, "No such file or directory", "a"),
    "a wrong value": ValueError("28"),
}


@each("who", {**NO_ROOM, **OTHER})
def test_full_disk_errors_are_recognised(who: str):
    error = {**NO_ROOM, **OTHER}[who]
    assert bool(disk_full_message(error)) == (who in NO_ROOM)


def test_what_was_being_written_is_named_and_not_the_source_of_a_copy(tmp_path: Path):
    copy = OSError(errno.ENOSPC, FULL, "/usr/tokenizer.json", None, str(tmp_path / "final" / "t"))
    told = str(disk_full_cause(copy))
    assert told.startswith(f"{tmp_path / 'final' / 't'}: {FULL}: ")
    needs, room = (
        "it needs about 4 MiB, .*iB are free  .free some space, then run the same command again",
        reporting_disk_full(tmp_path / "final", "it", 2**22),
    )
    with pytest.raises(DiskFull, match=needs) as full, room:
        raise copy
    assert str(full.value).startswith(f"{tmp_path / 'final'}: ")
    assert disk_full_cause(OSError(errno.ENOSPC, FULL)) is None  # names no file: standard output


def test_other_errors_pass_and_the_room_of_a_folder_to_come_is_that_of_its_disk(tmp_path: Path):
    with pytest.raises(FileNotFoundError), reporting_disk_full(tmp_path, "it", 1):
        raise OTHER["a missing file"]
    assert free_bytes(tmp_path / "a" / "b") > 0

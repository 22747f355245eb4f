"""Replacing a file leaves the old or the new one; only regular files are read."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from expert.core.files import (
    open_regular,
    read_bytes,
    read_json,
    read_text,
    sha256_of,
    write_text_atomically,
)
from tests.core.test_publish import names
from tests.each import each


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_content_is_written_as_it_is_and_the_mode_is_kept_or_that_of_a_plain_open(tmp_path: Path):
    path = tmp_path / "deep" / "er" / "a.txt"
    for mask, mode in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(mask)
        try:
            write_text_atomically(path, "é\r\nb and much more\n")
        finally:
            assert os.umask(before) == mask
        assert path.read_bytes() == "é\r\nb and much more\n".encode()
        assert _mode(path) == mode
        path.chmod(0o640)
        write_text_atomically(path, "new")
        assert (path.read_text(), _mode(path)) == ("new", 0o640)
        assert names(path.parent) == ["a.txt"]
        path.unlink()


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt(), None])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(source: str, target: Path) -> None:
        assert Path(source).read_text() == "new"
        assert path.read_text() == "old"
        raise error or AssertionError

    monkeypatch.setattr(os, "replace", fail)
    text = "new" if error else "new \ud800"  # text that cannot be encoded
    with pytest.raises(type(error) if error else UnicodeEncodeError) as failed:
        write_text_atomically(path, text)
    if isinstance(failed.value, OSError):
        assert failed.value.filename == str(path)  # the system names no file of a failed write
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_file_that_cannot_be_created_is_named_and_not_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    error = OSError(errno.EROFS, "Read-only file system", str(tmp_path / ".a.txt.x1"))
    monkeypatch.setattr("io.open", MagicMock(side_effect=error))
    with pytest.raises(OSError, match="Read-only") as failed:
        write_text_atomically(tmp_path / "a.txt", "new")
    assert failed.value.filename == str(tmp_path / "a.txt")


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def _socket(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "s"))
    return folder / "s"


def _device(folder: Path) -> Path:
    (folder / "link").symlink_to("/dev/zero")
    return folder / "link"


@each("make, kind", [(_pipe, "pipe"), (_socket, "socket"), (_device, "device")])
def test_only_a_regular_file_is_opened_and_nothing_is_waited_for(make, kind, tmp_path: Path):
    place = make(tmp_path)
    for read in (open_regular, read_bytes, read_text, read_json, sha256_of):
        with pytest.raises(OSError, match=f"is a {kind}") as refused:
            read(place)
        assert refused.value.filename == str(place)


def test_a_link_to_a_regular_file_is_followed_and_no_more_than_the_limit_is_read(tmp_path: Path):
    with pytest.raises(IsADirectoryError):
        read_text(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo")
    (tmp_path / "link").symlink_to("a.txt")
    assert read_text(tmp_path / "link") == "one\ntwo"
    assert read_bytes(tmp_path / "link") == b"one\r\ntwo"
    (tmp_path / "a.txt").write_bytes(b"x" * 2049)
    assert len(read_bytes(tmp_path / "a.txt", 2049)) == 2049
    with pytest.raises(OSError, match="has 2 KiB; no more than 2 KiB are read"):
        read_text(tmp_path / "a.txt", 2048)
    (tmp_path / "a.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match="JSON nested too deeply"):
        read_json(tmp_path / "a.json")

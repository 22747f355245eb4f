"""A file that is replaced is the old one or the new one; only regular files are read."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from expert.core.files import (
    open_regular,
    read_bytes,
    read_json,
    read_text,
    sha256_of,
    write_text_atomically,
)
from tests.each import each
from tests.wording import wording


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_content_is_written_as_utf_8_with_plain_newlines_and_folders_are_made(tmp_path: Path):
    write_text_atomically(tmp_path / "deep" / "er" / "a.txt", "é\r\nb\n")
    assert (tmp_path / "deep" / "er" / "a.txt").read_bytes() == "é\r\nb\n".encode()
    assert _names(tmp_path / "deep" / "er") == ["a.txt"]


def test_the_old_content_is_replaced_and_its_mode_kept(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("a much longer old text")
    path.chmod(0o640)
    write_text_atomically(path, "new")
    assert path.read_text() == "new"
    assert _mode(path) == 0o640


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_new_file_has_the_mode_a_plain_open_gives(tmp_path: Path, mask: int, mode: int):
    before = os.umask(mask)
    try:
        write_text_atomically(tmp_path / "a.txt", "x")
    finally:
        assert os.umask(before) == mask
    assert _mode(tmp_path / "a.txt") == mode


def test_text_that_cannot_be_encoded_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_text_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert _names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failed_rename_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(source: str, target: Path) -> None:
        assert Path(source).read_text() == "new"
        assert path.read_text() == "old"
        raise error

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(type(error)):
        write_text_atomically(path, "new")
    assert path.read_text() == "old"
    assert _names(tmp_path) == ["a.txt"]


def test_the_text_is_on_the_disk_before_the_rename_and_the_rename_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    order: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        order.append("folder" if is_folder else "file")
        fsync(descriptor)

    def note_replace(source: str, target: Path) -> None:
        order.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_text_atomically(tmp_path / "a.txt", "x")
    assert order == ["file", "rename", "folder"]


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


def test_a_folder_is_refused_as_python_would(tmp_path: Path):
    with pytest.raises(IsADirectoryError):
        read_text(tmp_path)


def test_a_link_to_a_regular_file_is_followed(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo")
    (tmp_path / "link").symlink_to("a.txt")
    assert read_text(tmp_path / "link") == "one\ntwo"
    assert read_bytes(tmp_path / "link") == b"one\r\ntwo"


def test_no_more_than_the_limit_is_read(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 2049)
    assert len(read_bytes(path, 2049)) == 2049
    with pytest.raises(OSError, match=wording("at-most-are-read")):
        read_text(path, 2048)


def test_json_nested_too_deeply_is_a_value_that_cannot_be_read(tmp_path: Path):
    (tmp_path / "a.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match=wording("json-nested-too-deeply")):
        read_json(tmp_path / "a.json")

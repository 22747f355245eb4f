"""A published folder is complete or absent, and later damage is detected."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from expert.core.publish import DONE, PublishError, damage, faults, publishing, remove_leftovers
from tests.core.forking import fork
from tests.each import each

OTHER_CONTENT = "with other content"
FILES = {"a.bin": b"a" * 100, "sub/deep/b.txt": b"text\n", "empty": b""}


def fill(folder: Path, files: dict[str, bytes] = FILES) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def published(target: Path, files: dict[str, bytes] = FILES) -> Path:
    with publishing(target) as temporary:
        fill(temporary, files)
    return target


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_done_lists_every_file_with_its_size_and_hash(tmp_path: Path):
    target = published(tmp_path / "new" / "parents" / "x")
    listed = json.loads((target / DONE).read_text())
    assert listed == {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in FILES.items()
    }
    assert {name: (target / name).read_bytes() for name in FILES} == FILES
    assert damage(target) == ""
    assert names(target.parent) == ["x"]


@pytest.mark.fault(3)
def test_every_byte_reaches_the_disk_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.name == DONE:
            assert set(json.loads(path.read_text())) == set(FILES), "synced before it was flushed"
        elif path.is_file():
            assert not list(tmp_path.glob(f"*/{DONE}")), "DONE is there before the files are safe"
        calls.append(path.relative_to(tmp_path).as_posix())
        real_fsync(descriptor)

    def rename(source: Path, target: Path) -> None:
        calls.append("rename")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    published(tmp_path / "x")
    temporary = f".tmp-x@{socket.gethostname()}-{os.getpid()}"
    files = [f"{temporary}/{name}" for name in FILES]
    assert sorted(calls[:3]) == sorted(files)
    folders = [f"{temporary}/sub/deep", f"{temporary}/sub", temporary]
    assert calls[3:] == [f"{temporary}/{DONE}", *folders, "rename", "."]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_after_an_exception_in_the_filling_or_the_sealing_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
):
    with pytest.raises(type(error)), publishing(tmp_path / "x"):
        raise error
    monkeypatch.setattr(os, "fsync", MagicMock(side_effect=error))
    with pytest.raises(type(error)):
        published(tmp_path / "x")
    assert names(tmp_path) == []


def test_a_finished_target_is_never_overwritten_and_the_same_content_is_as_good(tmp_path: Path):
    target = published(tmp_path / "x")
    inode = target.stat().st_ino
    with pytest.raises(PublishError, match=r"x: already exists with other content  \(it is nev"):
        published(target, {"a.bin": b"other"})
    published(target)
    assert target.stat().st_ino == inode
    assert damage(target) == ""
    assert names(tmp_path) == ["x"]
    (target / "a.bin").write_bytes(b"b" * 100)
    with pytest.raises(PublishError, match=r"x: already exists and is damaged: a\.bin does not"):
        published(target)


@each(
    "make",
    [fill, Path.mkdir, lambda x: x.write_text("mine"), lambda x: x.symlink_to("nowhere")],
    ids=["folder", "empty", "file", "link to nothing"],
)
def test_what_was_never_finished_is_not_overwritten(tmp_path: Path, make):
    make(tmp_path / "x")
    with pytest.raises(PublishError, match=r"x: already exists and was never finished  \(move"):
        published(tmp_path / "x")
    assert names(tmp_path) == ["x"]


@each("theirs", [FILES, {"a": b"theirs"}], ids=["the same", "something else"])
def test_another_process_that_was_first_wins_and_something_else_is_an_error(tmp_path, theirs):
    other = published(tmp_path / "elsewhere" / "x", theirs)
    same = nullcontext() if theirs is FILES else pytest.raises(PublishError, match=OTHER_CONTENT)
    with same, publishing(tmp_path / "x") as temporary:
        fill(temporary)
        other.rename(tmp_path / "x")
    assert damage(tmp_path / "x") == ""
    assert {name: (tmp_path / "x" / name).read_bytes() for name in theirs} == theirs
    assert names(tmp_path) == ["elsewhere", "x"]


def test_a_link_is_not_published(tmp_path: Path):
    refused = pytest.raises(PublishError, match="l is not a plain file")
    with refused, publishing(tmp_path / "x") as new:
        (new / "l").symlink_to("/etc/passwd")
    assert names(tmp_path) == []


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as stream:  # in place: ext4 flushes a file that is written again
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ (1 << bit)]))


def without(folder: Path) -> Path:
    shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    return folder


def in_hub_cache(cache: Path, source: Path) -> Path:
    """A published folder as the hub's cache keeps it: every file is a link to a blob."""
    model = cache / "models--me--mine"
    snapshot = model / "snapshots" / "0123abcd"
    (model / "blobs").mkdir(parents=True)
    for number, name in enumerate(path for path in source.rglob("*") if path.is_file()):
        link = snapshot / name.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(name, model / "blobs" / str(number))
        link.symlink_to(os.path.relpath(model / "blobs" / str(number), link.parent))
    return snapshot


def test_a_snapshot_of_the_hub_s_cache_is_hashed_through_its_links(tmp_path: Path, monkeypatch):
    snapshot = in_hub_cache(tmp_path, published(tmp_path / "x"))
    assert faults(snapshot) == []
    monkeypatch.chdir(snapshot)
    assert faults(Path()) == []
    flip((snapshot / "a.bin").resolve(), 50, 3)
    assert faults(snapshot) == ["a.bin does not match its hash in DONE"]
    copy = snapshot.parent.rename(snapshot.parents[1] / "copies") / snapshot.name
    assert faults(copy) == ["DONE is not a plain file"]  # links of another folder


def test_what_the_hub_adds_to_a_copy_is_no_damage(tmp_path: Path):
    folder = published(tmp_path / "x")
    more = [".gitattributes", ".git/config", ".cache/huggingface/download/a.bin.metadata"]
    for name in more:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x", encoding="utf-8")
    assert faults(folder) == []
    (folder / "sub" / ".gitattributes").write_text("x", encoding="utf-8")
    assert len(faults(folder)) == 1


@each(
    ("harm", "words"),
    [
        (lambda x: without(x / "a.bin"), "a.bin is missing"),
        (lambda x: os.truncate(x / "a.bin", 99), "a.bin has 99 bytes instead of 100"),
        (lambda x: os.truncate(x / "a.bin", 0), "a.bin has 0 bytes instead of 100"),
        (lambda x: flip(x / "a.bin", 50, 3), "a.bin does not match its hash in DONE"),
        (
            lambda x: flip(x / "sub/deep/b.txt", 0, 0),
            "sub/deep/b.txt does not match its hash in DONE",
        ),
        (lambda x: (x / "sub/new").write_text(""), "sub/new is not listed in DONE"),
        (lambda x: without(x / DONE), "DONE is missing, it was never finished"),
        (lambda x: (x / DONE).write_text(""), "DONE is damaged"),
        (lambda x: (x / DONE).write_text("[]"), "DONE is damaged"),
        (lambda x: (x / DONE).write_text("[" * 100_000), "DONE is damaged"),
        (lambda x: (x / DONE).write_text('{"a.bin": {"size": 100}}'), "DONE is damaged"),
        (
            lambda x: (x / DONE).write_text('{"a.bin": {"size": 1e2, "sha256": ""}}'),
            "DONE is damaged",
        ),
        (lambda x: (x / DONE).write_bytes(b"\xff\xfe"), "DONE is damaged"),
        (lambda x: os.truncate(x / DONE, 20_000_000), "DONE is too large to be a listing"),
        (lambda x: without(x).mkdir(), "it is empty"),
        (without, "it does not exist"),
        (lambda x: without(x).write_text(""), "it is not a folder"),
        (lambda x: without(x / "a.bin").symlink_to("/dev/zero"), "a.bin is not a plain file"),
        (
            lambda x: os.truncate(without(x / "a.bin").parent / "sub/deep/b.txt", 1),
            "a.bin is missing; sub/deep/b.txt has 1 bytes instead of 5",
        ),
    ],
)
def test_damage_is_described(tmp_path: Path, harm, words: str):
    target = published(tmp_path / "x")
    harm(target)
    assert damage(target) == words


def test_a_listing_that_names_files_outside_reads_none_of_them(tmp_path: Path):
    target = published(tmp_path / "x")
    entry = {"size": 1, "sha256": hashlib.sha256(b"s").hexdigest()}
    (tmp_path / "secret").write_text("s")
    (target / DONE).write_text(json.dumps({"../secret": entry, str(tmp_path / "secret"): entry}))
    assert "../secret is missing" in damage(target)
    assert f"{tmp_path / 'secret'} is missing" in damage(target)
    (target / DONE).write_text(json.dumps({f"f{number}": entry for number in range(9)}))
    assert damage(target).endswith("; and 7 more")


def test_a_flip_of_any_bit_of_done_is_seen(tmp_path: Path):
    target = published(tmp_path / "x", {"a": b"1"})
    good = (target / DONE).read_bytes()
    for offset in range(len(good)):
        for bit in range(8):
            flip(target / DONE, offset, bit)
            assert damage(target), (offset, bit)
            flip(target / DONE, offset, bit)
    assert (target / DONE).read_bytes() == good
    assert damage(target) == ""


def test_sizes_alone_are_compared_without_reading(tmp_path: Path):
    target = published(tmp_path / "x")
    flip(target / "a.bin", 0, 0)
    assert damage(target, contents=False) == ""
    os.truncate(target / "a.bin", 1)
    assert damage(target, contents=False) == "a.bin has 1 bytes instead of 100"


def test_leftovers_of_dead_processes_are_removed_and_those_of_living_ones_stay(tmp_path: Path):
    dead, living = fork(), os.getppid()
    if not dead:
        os._exit(0)
    os.waitpid(dead, 0)
    gone = [f".tmp-x-{dead}", f".tmp-delete-step-000100-{dead}", f".tmp-y-{os.getpid()}"]
    stay = [f".tmp-x-{living}", ".tmp-notes", "x", f"x-{dead}"]
    for name in (*gone, *stay):
        fill(tmp_path / name)
    (tmp_path / f".tmp-link-{dead}").symlink_to(tmp_path / "x")
    (tmp_path / f".tmp-file-{dead}").write_text("")
    stay += [f".tmp-link-{dead}", f".tmp-file-{dead}"]
    assert [path.name for path in remove_leftovers(tmp_path)] == sorted(gone)
    assert names(tmp_path) == sorted(stay)
    assert [path.name for path in remove_leftovers(tmp_path, alone=True)] == [f".tmp-x-{living}"]
    assert (tmp_path / "x" / "a.bin").is_file()


def test_a_folder_that_is_being_filled_is_not_swept_and_what_was_there_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fill(tmp_path / f".tmp-x@{socket.gethostname()}-{os.getpid()}", {"old": b"old"})
    with publishing(tmp_path / "x") as temporary:
        fill(temporary)
        monkeypatch.chdir(tmp_path)
        assert remove_leftovers(Path(), alone=True) == []
        assert remove_leftovers(tmp_path) == []
        with pytest.raises(AssertionError, match="by another thread"):
            published(tmp_path / "x")
    assert damage(tmp_path / "x") == ""
    assert not (tmp_path / "x" / "old").exists()

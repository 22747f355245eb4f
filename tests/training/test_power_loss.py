"""Power cuts at every moment of a save: the newest checkpoint that is there is whole.

A killed process loses nothing that it has written, since the system still holds it. Here what was
not synced is gone: on a disk that is kept in memory, and on a real file system in an image that is
copied at every moment, as a power cut would leave it, and mounted again.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from expert.core.hashed import file_integrity, write_hashed
from expert.training.checkpoint import prune
from tests.faults.counting import case
from tests.training.checkpoints import assert_is, newest_after, saved

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="synced as Linux does it")
CALLS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")
"""Of `os`: between two of them, nothing more becomes durable."""


def real(name: str) -> Callable[..., Any]:
    """Tests run without `fsync` elsewhere."""
    import posix

    return getattr(posix, name)  # type: ignore[no-any-return]


@contextmanager
def after_every_call(does: Callable[[], None], *, syncs: bool = True) -> Iterator[None]:
    """`does` after every call that changes what is, or could be, on the disk."""

    def hooked(name: str) -> Callable[..., Any]:
        call = real(name)

        def and_then(*args: Any, **more: Any) -> Any:
            found = None if name == "fsync" and not syncs else call(*args, **more)
            if name == "fsync" and syncs:
                synced(*args)
            does()
            return found

        return and_then

    synced = getattr(does, "synced", lambda descriptor: None)
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, hooked(name))
        yield


@contextmanager
def unwatched() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, real(name))
        yield


class Disk:
    """What is durable: the names in a folder as of its last sync, the bytes of a file likewise."""

    def __init__(self, root: Path, scratch: Path, check: Callable[[Path], None]) -> None:
        self.root, self.scratch, self.check = root, scratch, check
        self.names: dict[int, dict[str, int]] = {}
        self.bytes: dict[int, bytes] = {}
        self.cuts = 0
        for path in (root, *root.rglob("*")):
            self.sync(path)

    def sync(self, path: Path) -> None:
        number = path.stat().st_ino
        if path.is_dir():
            self.names[number] = {each.name: each.inode() for each in os.scandir(path)}
        else:
            self.bytes[number] = path.read_bytes()

    def synced(self, descriptor: int) -> None:
        self.sync(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def __call__(self) -> None:
        """The power is cut: nothing but what was synced is there; or all names are, since the
        journal was just written, and the bytes of files that were not synced are not."""
        for names in (self.names, self._all_names()):
            with unwatched():
                shutil.rmtree(self.scratch, ignore_errors=True)
                self._make(self.root.stat().st_ino, self.scratch, names)
                self.cuts += 1
                with case():
                    self.check(self.scratch)

    def _all_names(self) -> dict[int, dict[str, int]]:
        folders = (path for path in (self.root, *self.root.rglob("*")) if path.is_dir())
        return {
            folder.stat().st_ino: {each.name: each.inode() for each in os.scandir(folder)}
            for folder in folders
        }

    def _make(self, number: int, path: Path, names: dict[int, dict[str, int]]) -> None:
        path.mkdir()
        for name, inner in names.get(number, {}).items():
            if inner in self._folders(names):
                self._make(inner, path / name, names)
            else:
                (path / name).write_bytes(self.bytes.get(inner, b""))

    def _folders(self, names: dict[int, dict[str, int]]) -> set[int]:
        now = {path.stat().st_ino for path in self.root.rglob("*") if path.is_dir()}
        return now | set(names)


def one_of_both(folder: Path) -> None:
    newest = newest_after(folder)
    assert newest is not None
    assert_is(newest, int(newest.name[5:]))


def save_and_prune(folder: Path) -> None:
    """As a run does it: a new one, then the old one goes."""
    saved(folder, 2)
    prune(folder, 1, set())


@pytest.mark.fault(3)
def test_a_power_cut_at_every_prefix_of_a_save_leaves_a_whole_newest_one(tmp_path: Path):
    saved(tmp_path / "disk", 1)
    disk = Disk(tmp_path / "disk", tmp_path / "after", one_of_both)
    with after_every_call(disk):
        save_and_prune(tmp_path / "disk")
    assert disk.cuts > 20
    disk.check = functools.partial(newest_is, step=2)
    disk()


def newest_is(folder: Path, step: int) -> None:
    assert_is(newest_after(folder), step)


def test_a_save_that_syncs_nothing_is_found_out(tmp_path: Path):
    """What the other tests are worth."""
    saved(tmp_path / "disk", 1)
    disk = Disk(tmp_path / "disk", tmp_path / "after", one_of_both)
    with pytest.raises(AssertionError), after_every_call(disk, syncs=False):
        saved(tmp_path / "disk", 2)


@pytest.mark.fault(3)
def test_a_power_cut_at_every_prefix_of_writing_a_plan_leaves_the_old_or_the_new(tmp_path: Path):
    folder = tmp_path / "disk"
    folder.mkdir()
    write_hashed(folder / "plan.json", "old")

    def check(after: Path) -> None:
        assert file_integrity(after / "plan.json") == "sound"
        assert (after / "plan.json").read_text() in ("old", "new")

    with after_every_call(Disk(folder, tmp_path / "after", check)):
        write_hashed(folder / "plan.json", "new")


class Ext4:
    """A file system in an image: what is in the image is on the disk, whatever the system holds."""

    OPTIONS = "loop,noauto_da_alloc,commit=300"
    """Nothing is written early: neither bytes because of a rename, nor the journal by a clock."""

    def __init__(self, folder: Path) -> None:
        self.image, self.disk, self.after = (folder / name for name in ("image", "disk", "after"))
        self.disk.mkdir()
        self.after.mkdir()

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        with self.image.open("wb") as stream:
            stream.truncate(8_000_000)
        command("mkfs.ext4", "-q", "-F", self.image)
        command("mount", "-o", self.OPTIONS, self.image, self.disk)
        try:
            yield self.disk
        finally:
            command("umount", self.disk)

    def cut(self, check: Callable[[Path], None], *, journal: bool) -> None:
        """`journal`: another program has just synced a file, and with it every name."""
        if journal:
            with (self.disk / "other").open("wb") as stream:
                stream.write(b"x")
                stream.flush()
                real("fsync")(stream.fileno())
        copy = self.image.with_name("copy")
        shutil.copyfile(self.image, copy)
        command("mount", "-o", "loop", copy, self.after)
        try:
            check(self.after)
        finally:
            command("umount", self.after)


def command(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True)


@pytest.fixture
def ext4(tmp_path: Path) -> Ext4:
    made = Ext4(tmp_path)
    try:
        with made.mounted():
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        told = str(getattr(error, "stderr", None) or error)
        pytest.skip(f"no file system can be mounted here: {told.strip()}")
    return made


def cut_at(ext4: Ext4, moment: int, *, journal: bool, syncs: bool = True) -> int:
    """Save on a new file system with a power cut at one moment; how many moments there are."""
    reached = 0

    def maybe() -> None:
        nonlocal reached
        if reached == moment:
            with unwatched():
                ext4.cut(lambda after: one_of_both(after / "c"), journal=journal)
        reached += 1

    with ext4.mounted() as disk:
        (disk / "c").mkdir()
        saved(disk / "c", 1)
        command("sync", "-f", disk)
        with after_every_call(maybe, syncs=syncs):
            save_and_prune(disk / "c")
    return reached


@pytest.mark.fault(3)
@pytest.mark.slow
@pytest.mark.parametrize("journal", [False, True], ids=["", "the journal written"])
def test_a_power_cut_of_a_real_file_system_leaves_a_whole_newest_one(ext4, journal):
    moments = cut_at(ext4, -1, journal=journal)
    assert moments > 10
    for moment in range(moments):
        with case():
            cut_at(ext4, moment, journal=journal)


@pytest.mark.slow
def test_a_real_file_system_loses_what_was_not_synced(ext4):
    """What the test above is worth."""

    def cut_everywhere() -> None:
        for moment in range(cut_at(ext4, -1, journal=True)):
            cut_at(ext4, moment, journal=True, syncs=False)

    with pytest.raises(AssertionError):
        cut_everywhere()

"""Power cuts at every moment of a save: the newest checkpoint that is there is whole.

A killed process loses nothing that it has written, since the system still holds it. Here what was
not synced is gone, on a disk that is kept in memory.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from expert.core.hashed import file_integrity, hash_file, write_hashed
from expert.training.checkpoint import prune
from tests.faults.counting import case
from tests.training.checkpoints import assert_is, newest_after, saved

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


@pytest.mark.fault(3)
def test_a_power_cut_at_every_prefix_of_a_save_leaves_a_whole_newest_one(tmp_path: Path):
    saved(tmp_path / "disk", 1)
    disk = Disk(tmp_path / "disk", tmp_path / "after", one_of_both)
    with after_every_call(disk):
        saved(tmp_path / "disk", 2)
        prune(tmp_path / "disk", 1, set())
    assert disk.cuts > 20
    disk.check = lambda folder: assert_is(newest_after(folder), 2)
    disk()


def test_a_save_that_syncs_nothing_is_found_out(tmp_path: Path):
    """What the other tests are worth."""
    saved(tmp_path / "disk", 1)
    disk = Disk(tmp_path / "disk", tmp_path / "after", one_of_both)
    with pytest.raises(AssertionError), after_every_call(disk, syncs=False):
        saved(tmp_path / "disk", 2)


@pytest.mark.fault(3)
@pytest.mark.parametrize("hashed", [True, False])
def test_a_power_cut_at_every_prefix_of_writing_a_plan_leaves_the_old_or_the_new(
    tmp_path: Path, hashed: bool
):
    folder = tmp_path / "disk"
    folder.mkdir()
    write_hashed(folder / "plan.json", "old")
    if not hashed:
        hash_file(folder / "plan.json").unlink()

    def check(after: Path) -> None:
        assert file_integrity(after / "plan.json") in ("sound", "sound" if hashed else "unknown")
        assert (after / "plan.json").read_text() in ("old", "new")

    with after_every_call(Disk(folder, tmp_path / "after", check)):
        write_hashed(folder / "plan.json", "new")

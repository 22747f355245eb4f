"""What lies in the folders of a board. A page names a run by a short name made from its path, and
never a path: what was not found here does not exist for it."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from expert.core.errors import ExpertError
from expert.core.rundir import RunFolder
from expert.manifest.text.document import FILE_NAMES

DEPTH = 5
"""Folders below a given one that are looked into."""
MOST_FOLDERS = 20_000
NOT_LOOKED_INTO = {"checkpoints", "final", "tensorboard", "datasets_optimized", "node_modules",
                   "site-packages", "__pycache__"}  # fmt: skip
LOOK_SHARE = 1 / 300
"""Of the time that may be spent looking for new runs."""
LOOK_SECONDS = 2.0
Kind = Literal["run", "manifest"]


class NoFolder(ExpertError):
    """A folder that the board was given and that is not there."""


@dataclass(frozen=True)
class Found:
    """A run folder or a manifest below one of the folders."""

    id: str
    kind: Kind
    path: Path
    root: Path

    @property
    def name(self) -> str:
        return self.path.name if self.kind == "run" else self.path.parent.name

    @property
    def where(self) -> str:
        """The way to it from the folder that the board was given."""
        way = self.path.relative_to(self.root)
        return str(Path(self.root.name) / way.parent)


@dataclass
class Places:
    """The folders, and what was found in them the last time."""

    roots: tuple[Path, ...]
    found: dict[str, Found] = field(default_factory=dict)
    cut: bool = False
    """Whether there were more folders than are looked into."""
    _next_look: float = 0.0

    @classmethod
    def of(cls, folders: Sequence[Path]) -> Places:
        missing = [str(folder) for folder in folders if not folder.is_dir()]
        if missing:
            raise NoFolder(f"{', '.join(missing)}: there is no such folder  (name folders of runs)")
        roots: list[Path] = []
        for folder in folders:
            path = folder.resolve()
            if path not in roots:
                roots.append(path)
        return cls(roots=tuple(roots))

    def look(self, *, now: bool = False) -> None:
        """Find new runs, unless that was done just now."""
        began = time.monotonic()
        if began < self._next_look and not now:
            return
        self.cut = False
        found: dict[str, Found] = {}
        for root in self.roots:
            for one in self._below(root):
                found.setdefault(one.id, one)
        self.found = found
        took = time.monotonic() - began
        self._next_look = began + max(LOOK_SECONDS, took / LOOK_SHARE)

    def runs(self) -> list[Found]:
        return [one for one in self.found.values() if one.kind == "run"]

    def manifests(self) -> list[Found]:
        return [one for one in self.found.values() if one.kind == "manifest"]

    def get(self, name: str, kind: Kind) -> Found | None:
        """What a page named; None where it is not, or no longer, a plain thing of these folders."""
        one = self.found.get(name)
        if one is None:
            self.look()
            one = self.found.get(name)
        if one is None or one.kind != kind or not is_inside(one.path, one.root):
            return None
        return one

    def _below(self, root: Path) -> Iterator[Found]:
        waiting, seen = [(root, 0)], 0
        while waiting:
            folder, depth = waiting.pop()
            seen += 1
            if seen > MOST_FOLDERS:
                self.cut = True
                return
            run = RunFolder(folder)
            if run.events.is_file() or (run.was_started and run.environment.is_file()):
                yield Found(_name_of(folder), "run", folder, root)
                continue
            inside = _inside(folder)
            for name in FILE_NAMES[:3]:  # config.yaml may be of anything
                if name in inside and not inside[name]:
                    yield Found(_name_of(folder / name), "manifest", folder / name, root)
                    break
            if depth < DEPTH:
                folders = [
                    name for name, is_dir in inside.items() if is_dir and _is_looked_into(name)
                ]
                waiting += [(folder / name, depth + 1) for name in folders]


def _is_looked_into(name: str) -> bool:
    return not name.startswith(".") and name not in NOT_LOOKED_INTO


def is_inside(path: Path, root: Path) -> bool:
    """Whether a path is what it says: no link on the way could lead elsewhere."""
    try:
        return path.resolve(strict=True) == path and path.is_relative_to(root)
    except (OSError, RuntimeError):
        return False


def _inside(folder: Path) -> dict[str, bool]:
    """Plain files and folders by name, and whether it is a folder; links are left alone."""
    found = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.is_symlink():
                    found[entry.name] = entry.is_dir(follow_symlinks=False)
    except OSError:
        return {}
    return found


def _name_of(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:12]

"""The runs and manifests in the folders of a board, and the notes beside a run. Pages refer to them
by a hash of their path, so that nothing else can be reached."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from expert.core.errors import ExpertError
from expert.core.files import exclusive_lock, write_text_atomically
from expert.core.links import refuse_links
from expert.core.rundir import RunFolder
from expert.core.stored_json import read_object_or_empty
from expert.core.text import json_text
from expert.manifest.text.document import FILE_NAMES

DEPTH = 5
"""Levels of folders that are searched."""
MAX_FOLDERS = 20_000
NOT_SEARCHED = {"checkpoints", "final", "tensorboard", "datasets_optimized", "node_modules",
                   "site-packages", "__pycache__"}  # fmt: skip
SEARCH_SHARE = 1 / 300
"""Share of the time that may be spent on searching."""
SEARCH_SECONDS = 2.0
Kind = Literal["run", "manifest"]
NOTES_FILE = "board.json"
"""In the run folder, so that it moves with the run; it is not part of anything hashed."""
MAX_TAGS, TAG_LENGTH, NOTE_LENGTH = 12, 40, 4_000


@dataclass(frozen=True)
class BoardItem:
    """A run folder or a manifest below a root."""

    kind: Kind
    path: Path
    root: Path

    @property
    def id(self) -> str:
        return hashlib.sha256(os.fsencode(self.path)).hexdigest()[:12]

    @property
    def name(self) -> str:
        return self.path.name if self.kind == "run" else self.path.parent.name

    @property
    def where(self) -> str:
        """Its folder, relative to the parent of the root."""
        return str(Path(self.root.name) / self.path.relative_to(self.root).parent)


@dataclass
class BoardFolders:
    """The roots, and what the last search found below them."""

    roots: tuple[Path, ...]
    found: dict[str, BoardItem] = field(default_factory=dict)
    is_truncated: bool = False
    """Whether there were more than MAX_FOLDERS."""
    _next_search: float = 0.0

    @classmethod
    def of(cls, folders: Sequence[Path]) -> BoardFolders:
        missing = [str(folder) for folder in folders if not folder.is_dir()]
        if missing:
            names = ", ".join(missing)
            raise ExpertError(f"{names}: there is no such folder  (name folders of runs)")
        return cls(roots=tuple(dict.fromkeys(folder.resolve() for folder in folders)))

    def search(self, *, now: bool = False) -> None:
        """Search for runs and manifests, unless that was done recently and not `now`."""
        began = time.monotonic()
        if began < self._next_search and not now:
            return
        self.is_truncated = False
        found: dict[str, BoardItem] = {}
        for root in self.roots:
            for item in self._below(root):
                found.setdefault(item.id, item)
        self.found = found
        took = time.monotonic() - began
        self._next_search = began + max(SEARCH_SECONDS, took / SEARCH_SHARE)

    def of_kind(self, kind: Kind) -> list[BoardItem]:
        return [found for found in self.found.values() if found.kind == kind]

    def get(self, name: str, kind: Kind) -> BoardItem | None:
        """The run or manifest with this id; None if it does not exist or is behind a link."""
        if name not in self.found:
            self.search()
        found = self.found.get(name)
        if found is None or found.kind != kind or not is_inside(found.path, found.root):
            return None
        return found

    def _below(self, root: Path) -> Iterator[BoardItem]:
        waiting, seen = [(root, 0)], 0
        while waiting:
            folder, depth = waiting.pop()
            seen += 1
            if seen > MAX_FOLDERS:
                self.is_truncated = True
                return
            run = RunFolder(folder)
            if run.events.is_file() or (run.was_started and run.environment.is_file()):
                yield BoardItem("run", folder, root)
                continue
            try:  # files and folders by name, and whether each is a folder; links are skipped
                with os.scandir(folder) as entries:
                    inside = {entry.name: entry.is_dir(follow_symlinks=False)
                              for entry in entries if not entry.is_symlink()}  # fmt: skip
            except OSError:
                continue
            for name in FILE_NAMES[:3]:  # config.yaml may belong to anything
                if name in inside and not inside[name]:
                    yield BoardItem("manifest", folder / name, root)
                    break
            if depth < DEPTH:
                folders = [name for name, is_dir in inside.items() if is_dir and name[0] != "."]
                waiting += [(folder / name, depth + 1) for name in folders
                            if name not in NOT_SEARCHED]  # fmt: skip


def is_inside(path: Path, root: Path) -> bool:
    """Whether a path is below the root without passing a link."""
    try:
        return path.resolve(strict=True) == path and path.is_relative_to(root)
    except (OSError, RuntimeError):
        return False


# --- tags and notes of a run ---------------------------------------------------------------------


@dataclass(frozen=True)
class Notes:
    tags: tuple[str, ...] = ()
    text: str = ""


def read_notes(run: Path) -> Notes:
    """The notes of a run; empty if the file is missing or damaged."""
    return notes_in(read_object_or_empty(run / NOTES_FILE))


def notes_in(record: dict[str, Any]) -> Notes:
    """The valid tags and text of an object."""
    tags, text = record.get("tags"), record.get("note")
    valid = tags if isinstance(tags, list) and all(isinstance(tag, str) for tag in tags) else []
    words = [" ".join(tag.split())[:TAG_LENGTH] for tag in valid]
    kept = tuple(dict.fromkeys(word for word in words if word))[:MAX_TAGS]
    return Notes(kept, text[:NOTE_LENGTH] if isinstance(text, str) else "")


def write_notes(run: Path, notes: Notes) -> None:
    """Replace the notes of a run, under a lock."""
    file = run / NOTES_FILE
    refuse_links(file, below=run)
    with exclusive_lock(file):
        record = {"tags": list(notes.tags), "note": notes.text}
        write_text_atomically(file, json_text(record) + "\n")

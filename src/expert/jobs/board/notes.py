"""Tags and notes that people write about a run, in a file of the board's own in the run folder:
it belongs to nothing that is hashed, and goes along when the run is moved."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expert.core.files import alone, write_text_atomically
from expert.core.links import refuse_links
from expert.core.stored_json import object_in
from expert.core.text import json_text

FILE = "board.json"
MOST_TAGS, TAG_LENGTH, NOTE_LENGTH = 12, 40, 4_000
_known: dict[Path, tuple[object, Notes]] = {}


@dataclass(frozen=True)
class Notes:
    tags: tuple[str, ...] = ()
    text: str = ""


def read_notes(run: Path) -> Notes:
    """What was written about a run; nothing where the file is missing or damaged."""
    file = run / FILE
    try:
        status = os.lstat(file)
    except OSError:
        return Notes()
    mark = (status.st_ino, status.st_mtime_ns, status.st_size)
    if file not in _known or _known[file][0] != mark:
        _known[file] = (mark, notes_in(object_in(file)))
    return _known[file][1]


def notes_in(told: dict[str, Any]) -> Notes:
    """Tags and text of an object, as far as they are what they should be."""
    tags, text = told.get("tags"), told.get("note")
    given = tags if isinstance(tags, list) and all(isinstance(one, str) for one in tags) else []
    words = [" ".join(one.split())[:TAG_LENGTH] for one in given]
    kept = tuple(dict.fromkeys(word for word in words if word))[:MOST_TAGS]
    return Notes(kept, text[:NOTE_LENGTH] if isinstance(text, str) else "")


def write_notes(run: Path, notes: Notes) -> None:
    """Replace what is written about a run; two tabs take turns."""
    file = run / FILE
    refuse_links(file, below=run)
    with alone(file):
        told = {"tags": list(notes.tags), "note": notes.text}
        write_text_atomically(file, json_text(told, indent=2) + "\n")

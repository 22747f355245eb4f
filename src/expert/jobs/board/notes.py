"""Tags and notes of a run, in a file of the run folder: they move with the run, and are not part of
anything hashed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expert.core.files import exclusive_lock, write_text_atomically
from expert.core.links import refuse_links
from expert.core.stored_json import read_object_or_empty
from expert.core.text import json_text

FILE = "board.json"
MAX_TAGS, TAG_LENGTH, NOTE_LENGTH = 12, 40, 4_000


@dataclass(frozen=True)
class Notes:
    tags: tuple[str, ...] = ()
    text: str = ""


def read_notes(run: Path) -> Notes:
    """The notes of a run; empty if the file is missing or damaged."""
    return notes_in(read_object_or_empty(run / FILE))


def notes_in(record: dict[str, Any]) -> Notes:
    """The valid tags and text of an object."""
    tags, text = record.get("tags"), record.get("note")
    valid = tags if isinstance(tags, list) and all(isinstance(tag, str) for tag in tags) else []
    words = [" ".join(tag.split())[:TAG_LENGTH] for tag in valid]
    kept = tuple(dict.fromkeys(word for word in words if word))[:MAX_TAGS]
    return Notes(kept, text[:NOTE_LENGTH] if isinstance(text, str) else "")


def write_notes(run: Path, notes: Notes) -> None:
    """Replace the notes of a run, under a lock."""
    file = run / FILE
    refuse_links(file, below=run)
    with exclusive_lock(file):
        record = {"tags": list(notes.tags), "note": notes.text}
        write_text_atomically(file, json_text(record) + "\n")

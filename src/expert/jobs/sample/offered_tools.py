"""The tools of a file that a prompt is asked with."""

from __future__ import annotations

import json
from pathlib import Path

from expert.core.errors import ExpertError


class NoTools(ExpertError):
    """A file that names no tools."""


def tools_in(file: Path) -> str:
    """The tools of a JSON file: a list of them, or a row that has a field `tools`."""
    from expert.data.examples.tools import tools_of
    from expert.data.records import UnfitRow

    how = "a JSON list of functions as OpenAI has them, or a file of rows with a column tools"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no text"
        raise NoTools(f"--tools {file}: {why}  ({how})") from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _first_line(text)
    given = value.get("tools") if isinstance(value, dict) else value
    try:
        found = tools_of(given, "tools")
    except UnfitRow as fault:
        raise NoTools(f"--tools {file}: {fault}  ({how})") from None
    if not found:
        raise NoTools(f"--tools {file}: there are no tools in it  ({how})")
    return found


def _first_line(text: str) -> object:
    try:
        return json.loads(text.lstrip().partition("\n")[0])
    except (ValueError, RecursionError):
        return None

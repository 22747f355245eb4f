"""`--manifest FILE`, the same for every command that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer


def manifest_option(what: str) -> Any:
    """The option, with what it is for; a folder means the manifest in it."""
    text = f"{what}; of a folder, the one in it."
    return typer.Option("--manifest", "-m", help=text, callback=named_file)


def named_file(place: Path | None) -> Path | None:
    """The file that is meant, and a line that says which where a folder was named."""
    from expert.cli.display import make_console
    from expert.cli.run_view import say
    from expert.manifest.document import manifest_in

    if place is None or not place.is_dir():
        return place
    file = manifest_in(place)
    if file is None:
        return place  # reading it says what is wrong
    say(make_console(error=True), f"the manifest is {file}", "dim")
    return file

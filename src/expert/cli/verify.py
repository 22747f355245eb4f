"""`expert verify`: whether files are as they were written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expert.cli.show.display import Line, make_console, show_lines, write_json
from expert.cli.show.options import json_option
from expert.core.errors import EXIT_DAMAGED
from expert.core.text import counted

if TYPE_CHECKING:
    from expert.jobs.verify import Verified

VERIFY_EPILOG = (
    f"Exit codes: 0 everything is as it was written; {EXIT_DAMAGED} something is damaged, file by "
    "file; 2 there is nothing to check."
)


def verify(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A run, a checkpoint, final/, an exported folder, a prepared cache, or a folder "
            "above them."
        ),
    ],
    as_json: Annotated[bool, json_option("Print what was found as JSON.")] = False,
) -> None:
    """Hash every file that Expert wrote below a folder, and name those that have changed."""
    from expert.jobs.verify import verify as verify_job

    found = verify_job(folder)
    if as_json:
        write_json(found)
    else:
        show_lines(make_console(), _lines(found))
    if found.of("damaged"):
        raise typer.Exit(EXIT_DAMAGED)


def _lines(found: Verified) -> list[Line]:
    """What is intact, what has no hash, then what is damaged, file by file."""
    lines: list[Line] = [(f"✓ {each.path}", "") for each in found.of("whole")]
    for each in found.of("no hash"):
        lines.append((f"· {each.path}: has no hash to compare it with", "dim"))
    damaged = found.of("damaged")
    for each in damaged:
        lines += [(f"✗ {each.path}: {fault}", "bold red") for fault in each.faults]
        lines.append((f"    {each.advice}", ""))
    whole = counted(len(found.of("whole")), "item")
    if damaged:
        return [*lines, (f"{len(damaged)} damaged, {whole} as written", "bold red")]
    return [*lines, (f"{whole} as written", "bold")]

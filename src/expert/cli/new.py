"""`expert new`: a folder to start an expert with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expert.cli.show.display import Line, Waiting, make_console, show_lines, write_json
from expert.cli.show.options import json_option, output_option
from expert.core.text import counted, shell_quoted

if TYPE_CHECKING:
    from expert.jobs.new.new_expert import NewExpert


def new(
    name: Annotated[str, typer.Argument(help="Name of the expert and of its folder.")],
    data: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="ROWS",
            help="Training rows: a file or folder, which is copied, or owner/name of the Hub.",
        ),
    ] = None,
    template: Annotated[
        str | None, typer.Option(metavar="NAME", help="json, sql, cypher, typescript or text.")
    ] = None,
    mapping: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="PART=COLUMN",
            help="Map a column: instruction, input, response, system, messages, tools or text.",
        ),
    ] = None,
    preferred: Annotated[
        bool, typer.Option("--preferred", help="Preference rows (DPO, KTO): use the preferred.")
    ] = False,
    json_values: Annotated[
        bool, typer.Option("--json-values", help="Train on lists and objects as JSON text.")
    ] = False,
    encoding: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of text rows that are not UTF-8: cp1252.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The base: a folder, a name, a hub id or a GGUF file; settings fit its size.",
        ),
    ] = "tiny",
    output: Annotated[Path | None, output_option("Parent folder; default: this one.")] = None,
    as_json: Annotated[bool, json_option("Print what was made as JSON.")] = False,
) -> None:
    """Create a folder with a manifest, from a template or your rows."""
    from expert.jobs.new.new_expert import new_expert

    progress = make_console(error=True)
    with Waiting(progress, "reading the rows" if progress.is_terminal else ""):
        made = new_expert(
            name,
            data=data,
            template=template,
            into=output,
            mapping=mapping or (),
            preferred=preferred,
            json_values=json_values,
            encoding=encoding,
            model=model,
        )
    if as_json:
        write_json(made)
    else:
        show_lines(make_console(), list(_lines(made)))


def _lines(made: NewExpert) -> Iterator[Line]:
    """What was created, from which rows, and the next commands."""
    what = "tool calls" if made.calls else made.template
    yield f"✓ made {made.folder}  (answers: {what})", "bold green"
    if made.columns:
        parts = ", ".join(f"{part}={column}" for part, column in made.columns.items())
        left = ", ".join(f"{n} (in {counted(rows, 'row')})" for n, rows in made.unused.items())
        yield f"  columns of {made.data}: {parts}{f'; not trained on: {left}' if left else ''}", ""
    else:
        yield f"  example rows to replace: {made.data}", ""
    for note in made.notes:
        yield f"  {note}", ""
    for warning in made.warnings:
        yield f"  warning: {warning}", "yellow"
    yield "next:", ""
    folder = shell_quoted(made.folder)
    for command in ("dataset check", "plan", "train"):
        yield f"  expert {command} {folder}", ""
    judge, ask = f"validate {folder}", f'sample {folder} --prompt "…"'
    yield f"  expert {judge if made.has_answers else ask}", ""

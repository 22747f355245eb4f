"""`expert new`: a folder to begin an expert with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expert.cli.options import json_option, output_option

if TYPE_CHECKING:
    from rich.console import Console

    from expert.jobs.new.row_lengths import LengthChoice


def new(
    name: Annotated[str, typer.Argument(help="Name of the expert, and of its folder.")],
    data: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Rows to learn from; they are copied."),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="json, sql, cypher, typescript or text."),
    ] = None,
    mapping: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="PART=COLUMN",
            help="A column: instruction, input, response, system, messages, tools or text.",
        ),
    ] = None,
    preferred: Annotated[
        bool,
        typer.Option("--preferred", help="Of preference rows (DPO, KTO): the preferred answers."),
    ] = False,
    json_values: Annotated[
        bool,
        typer.Option("--json-values", help="Train on lists and objects as JSON text."),
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="NAME",
            help="The base model: a folder, a name or a hub id. Settings are those of its size.",
        ),
    ] = "tiny",
    output: Annotated[Path | None, output_option("Where the folder goes; here by default.")] = None,
    as_json: Annotated[bool, json_option("What was made, as JSON.")] = False,
) -> None:
    """Make a folder with a manifest, from a template or from a file of rows."""
    from expert.cli.display import make_console, write_line
    from expert.core.text import counted
    from expert.jobs.new.new_expert import new_expert

    made = new_expert(
        name,
        data=data,
        template=template,
        into=output,
        mapping=mapping or (),
        preferred=preferred,
        json_values=json_values,
        model=model,
    )
    if as_json:
        import json
        from dataclasses import asdict

        write_line(json.dumps(asdict(made), default=str, indent=2))
        return
    console = make_console()
    what = "calls of tools" if made.calls else made.template
    console.print(f"✓ made {made.folder}: an expert for {what}", style="bold green")
    if made.columns:
        parts = ", ".join(f"{part}: {column}" for part, column in made.columns.items())
        left = ", ".join(f"{n} (in {counted(rows, 'row')})" for n, rows in made.unused.items())
        unused = f"; not used: {left}" if left else ""
        write_line(f"  rows in {made.data}: {parts}{unused}")
        if made.warning:
            console.print(f"  warning: {made.warning}", style="yellow")
        if made.bad_rows:
            first = counted(made.looked_at, "row")
            bad = f"{made.bad_rows} of the first {first} cannot be used"
            console.print(f"  {bad}: expert dataset check lists them", style="yellow")
        if made.unread:
            write_line(f"  not read: {', '.join(made.unread)}")
    else:
        write_line(f"  a few rows to begin with, to be replaced: {made.data}")
    write_line(f"  base model {made.model}: {made.settings_because}")
    if made.length is not None:
        _show_length(made.length, made.model, console)
    write_line("next:")
    for command in ("dataset check", "plan", "train"):
        write_line(f"  expert {command} --manifest {made.manifest}")
    judge, ask = f"validate --expert {made.folder}", f'sample {made.folder} --prompt "…"'
    write_line(f"  expert {judge if made.has_answers else ask}")


def _show_length(found: LengthChoice, model: str, console: Console) -> None:
    """The length that was written, and what shorter ones would cut."""
    from expert.cli.display import write_line

    write_line(f"  max_seq_length {found.length}: {found.because}")
    if found.estimated:
        text = f"the tokenizer of {model} is not on this machine; expert dataset check counts"
        write_line(f"    {text} exactly where it is")
    for one in found.cuts:
        chosen = one.length == found.length
        if not one.rows:
            continue
        if chosen and found.bound:
            console.print(f"    {one.words()}: {found.bound}", style="yellow")
        else:
            write_line(f"    {one.words()}")

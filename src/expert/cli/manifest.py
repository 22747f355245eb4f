"""`expert manifest`: check, explain, schema, upgrade."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expert.cli.options import Overrides, Strict, json_option, output_option
from expert.core.errors import EXIT_USAGE

if TYPE_CHECKING:
    from rich.console import Console

    from expert.manifest.notices import Notice
    from expert.manifest.reader import ReadManifest

app = typer.Typer(
    help="Check, explain and upgrade manifests.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="Manifests, JSON or YAML.")],
    overrides: Overrides = None,
    strict: Strict = False,
    as_json: Annotated[bool, json_option("Findings as JSON.")] = False,
) -> None:
    """Read manifests and tell every problem at once, with file and line."""
    from expert.cli.display import make_console, show_problems, write_line
    from expert.cli.plan_view import time_in_words
    from expert.jobs.manifest import check_manifests

    results = list(check_manifests(files, overrides=overrides or (), strict=strict))
    if as_json:
        write_line(_as_json(results))
    else:
        console = make_console()
        for result in results:
            if result.error is not None:
                show_problems(str(result.error))
            elif result.read is not None:
                show_notices(result.read, console, brief=False)
                for doubt in result.doubts:
                    show_notice(doubt, console)
                if result.plan is not None and result.plan.length.expected_seconds is not None:
                    console.print(f"  {time_in_words(result.plan)}", style="dim")
    if any(result.error is not None for result in results):
        raise typer.Exit(EXIT_USAGE)


def _as_json(results: list) -> str:  # type: ignore[type-arg]
    import json
    from dataclasses import asdict

    return json.dumps(
        [
            {
                "source": result.source,
                "problems": [asdict(p) for p in result.error.problems] if result.error else [],
                "notices": [
                    asdict(n)
                    for n in (*(result.read.notices if result.read else ()), *result.doubts)
                ],
                "expected_seconds": result.plan.length.expected_seconds if result.plan else None,
            }
            for result in results
        ],
        indent=2,
    )


def show_notices(read: ReadManifest, console: Console, *, brief: bool) -> None:
    """What became of keys that were not simply honoured; brief: only what changes the run."""
    from rich.text import Text

    from expert.cli.words import counted

    console.print(Text(f"✓ {read.source}: {read.manifest.name} reads", style="bold green"))
    shown = [n for n in read.notices if not brief or n.kind in ("warning", "superseded")]
    for one in shown:
        show_notice(one, console)
    if brief and len(read.notices) > len(shown):
        rest = len(read.notices) - len(shown)
        text = f"  {counted(rest, 'more notice')}: expert manifest check {read.source}"
        console.print(Text(text, style="dim"))


def show_notice(notice: Notice, console: Console) -> None:
    """One line, in the colour of its kind."""
    from rich.text import Text

    styles = {"warning": "bold yellow", "superseded": "cyan", "read as": "", "note": "dim"}
    console.print(Text(f"  {notice}", style=styles[notice.kind]))


@app.command()
def explain(
    key: Annotated[str | None, typer.Argument(help="A key, a section, or another name.")] = None,
    as_json: Annotated[bool, json_option("The same as JSON.")] = False,
) -> None:
    """Say what keys mean, what they may be and what they are by default, from the schema."""
    from expert.cli.display import Sheet, make_console, show_sheet, write_line
    from expert.manifest.schema.explain import explain as explain_key

    found = explain_key(key)
    if as_json:
        import json
        from dataclasses import asdict

        write_line(json.dumps([asdict(entry) for entry in found], indent=2))
        return
    rows = [
        (
            entry.path,
            entry.expected,
            entry.default,
            " ".join(entry.meaning.split()),  # a meaning of several lines is one sentence
            ", ".join(entry.also_written),
        )
        for entry in found
    ]
    columns = ("key", "may be", "by default", "means", "also written")
    show_sheet(Sheet(columns, [rows], dim=("also written",)), make_console())


@app.command()
def schema() -> None:
    """Print the JSON Schema that editors check and complete manifests with."""
    import json

    from expert.cli.display import write_line
    from expert.manifest.schema.editor import editor_schema

    write_line(json.dumps(editor_schema(), indent=2))


@app.command()
def upgrade(
    file: Annotated[Path, typer.Argument(help="A manifest of any layout.")],
    output: Annotated[Path | None, output_option("The file to write.")] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Replace the file; the old one becomes FILE.bak.")
    ] = False,
    stdout: Annotated[bool, typer.Option("--stdout", help="Print instead of writing.")] = False,
) -> None:
    """Write a manifest anew beside the old file, as NAME-2.0, in the 2.0 layout with the
    performance fields; comments are kept."""
    from rich.text import Text

    from expert.cli.display import make_console, write_line
    from expert.jobs.manifest import upgrade_file, upgraded_text

    if stdout:
        write_line(upgraded_text(file)[0])
        return
    done = upgrade_file(file, output=output, in_place=in_place)
    console = make_console()
    for one in done.notices:
        console.print(Text(f"  {one}"))
    console.print(Text(f"✓ wrote {done.path}", style="bold green"))
    if done.backup:
        console.print(Text(f"  the old one is {done.backup}"))

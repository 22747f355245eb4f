"""`expert manifest`: check, explain, schema, upgrade."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from expert.cli.plan import show_every_notice
from expert.cli.show.display import (
    Sheet,
    make_console,
    show,
    show_problems,
    show_sheet,
    write_json,
    write_line,
)
from expert.cli.show.options import Overrides, Strict, json_option, output_option
from expert.core.errors import EXIT_USAGE

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
    as_json: Annotated[bool, json_option("Print findings as JSON.")] = False,
) -> None:
    """Check manifests and report every problem at once, with file and line."""
    from expert.jobs.manifest import check_manifests

    results = list(check_manifests(files, overrides=overrides or (), strict=strict))
    if as_json:
        found = []
        for result in results:
            own = result.read.notices if result.read else ()
            notices = [asdict(notice) for notice in (*own, *result.doubts)]
            problems = [asdict(each) for each in (result.error.problems if result.error else ())]
            found.append({"source": result.source, "problems": problems, "notices": notices})
        write_json(found)
    else:
        console = make_console()
        for result in results:
            if result.error is not None:
                show_problems(str(result.error))
            elif result.read is not None:
                read = result.read
                show(console, f"✓ {read.source}: {read.manifest.name} is valid", "bold green")
                show_every_notice((*read.notices, *result.doubts), console)
    if any(result.error is not None for result in results):
        raise typer.Exit(EXIT_USAGE)


@app.command()
def explain(
    key: Annotated[str | None, typer.Argument(help="A key, a section or an alias.")] = None,
    as_json: Annotated[bool, json_option("Print the same as JSON.")] = False,
) -> None:
    """Explain keys: meaning, allowed values and defaults, from the schema."""
    from expert.manifest.explain import explain as explain_key

    found = explain_key(key)
    if as_json:
        write_json([asdict(entry) for entry in found])
        return
    rows = [
        (
            entry.path,
            entry.expected,
            entry.default,
            " ".join(entry.meaning.split()),
            ", ".join(entry.also_written),
        )
        for entry in found
    ]
    columns = ("key", "allowed", "default", "meaning", "aliases")
    show_sheet(Sheet(columns, [rows], dim=("aliases",)), make_console())


@app.command()
def schema() -> None:
    """Print the JSON Schema of the 2.0 layout, with which editors check and complete manifests."""
    from expert.manifest.schema.expectations import schema as manifest_schema

    write_json({"$schema": "https://json-schema.org/draft/2020-12/schema", **manifest_schema()})


@app.command()
def upgrade(
    file: Annotated[Path, typer.Argument(help="A manifest of any layout.")],
    output: Annotated[Path | None, output_option("The file to write.")] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Replace the file; the old one becomes FILE.bak.")
    ] = False,
    stdout: Annotated[bool, typer.Option("--stdout", help="Print instead of writing.")] = False,
) -> None:
    """Rewrite a manifest in the 2.0 layout with the performance fields, as NAME-2.0 next to the old
    file; comments are not kept."""
    from expert.jobs.manifest import upgrade, upgrade_file
    from expert.manifest.text.document import read_document

    if stdout:
        write_line(upgrade(read_document(file))[0])
        return
    done = upgrade_file(file, output=output, in_place=in_place)
    console = make_console()
    for notice in done.notices:
        show(console, f"  {notice}")
    show(console, f"✓ wrote {done.path}", "bold green")
    if done.backup:
        show(console, f"  the old file is {done.backup}")

"""`expert dataset check` and `expert find-datasets`: what is in the data, and where it lies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expert.cli.options import (
    BaseModelName,
    ManifestFile,
    Overrides,
    json_option,
    manifest_option,
    one_manifest,
)
from expert.core.errors import EXIT_USAGE

if TYPE_CHECKING:
    from rich.console import Console

    from expert.data.inspect.audit import SplitReport
    from expert.jobs.datasets.check import DatasetReport
    from expert.jobs.datasets.find import DatasetUser, FoundDataset
    from expert.jobs.datasets.gather import Gathered
    from expert.jobs.datasets.hub_copies import Caches

app = typer.Typer(help="Look into data sets.", no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _dataset() -> None:
    """Look into data sets."""


@app.command()
def check(
    file: ManifestFile = None,
    manifest: Annotated[Path | None, manifest_option("Whose data is looked at")] = None,
    model: BaseModelName = None,
    overrides: Overrides = None,
    rows: Annotated[
        int | None,
        typer.Option(
            "--rows",
            min=0,
            metavar="N",
            help="Rows shown as the model sees them, the longest among them; 3 by default.",
        ),
    ] = None,
    lines: Annotated[
        list[str] | None,
        typer.Option(
            "--row",
            metavar="[FILE:]LINE",
            help="Show the row at this line, as messages name it; may be given several times.",
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Show long rows in full.")] = False,
    as_json: Annotated[bool, json_option("Findings as JSON.")] = False,
) -> None:
    """Read every row as preparing would, write nothing, show some rows as the model sees them, and
    report what is wrong with the data."""
    from expert.cli.display import make_console, show_problems, write_line
    from expert.jobs.datasets.check import check_dataset
    from expert.jobs.datasets.show import DEFAULT_ROWS, JSON_TOKENS, SCREEN_TOKENS, RowsToShow

    chosen = one_manifest(file, manifest)
    if chosen is None:
        raise typer.BadParameter("name a manifest: expert dataset check FILE")
    by_default = 0 if lines else DEFAULT_ROWS
    show = RowsToShow(
        by_default if rows is None else rows,
        tuple(lines or ()),
        most_tokens=None if full else JSON_TOKENS if as_json else SCREEN_TOKENS,
    )
    report = check_dataset(chosen, model=model, overrides=tuple(overrides or ()), show=show)
    if as_json:
        import json
        from dataclasses import asdict

        data = {**asdict(report), "warnings": report.warnings()}
        write_line(json.dumps(data, indent=2, ensure_ascii=False))
    else:
        _show_report(report, make_console())
        if report.problems:
            listed = "\n".join(f"  - {problem}" for problem in report.problems)
            what = "cannot be used as it is" if report.splits else "was not checked"
            show_problems(f"the data of {report.name} {what}\n{listed}")
    if report.problems:
        raise typer.Exit(EXIT_USAGE)


def _show_report(report: DatasetReport, console: Console) -> None:
    from rich.text import Text

    from expert.cli.display import Sheet, show_sheet
    from expert.cli.row_view import show_rows
    from expert.core.visible import visible

    facts = [_facts(split, report.max_seq_length) for split in report.splits]
    if facts:
        table = [[name, *(fact[name] for fact in facts)] for name in facts[0]]
        title = f"{report.name}: prompt template {report.template}"
        columns = ("", *(split.name for split in report.splits))
        show_sheet(Sheet(columns, [table], title=title), console)
    for note in report.notes:
        console.print(Text(visible(note), style="dim"))
    show_rows(report.rows, console)
    if report.rows:
        console.print("")
    for split in report.splits:
        if split.bad_rows:
            console.print(Text(f"{split.name}: bad rows", style="bold"))
            for line in split.bad_row_lines():
                console.print(Text(f"  {visible(line)}"))
    warnings = report.warnings()
    for line in warnings:
        inner = line.startswith(" ")
        line = visible(line)
        console.print(Text(line if inner else f"warning: {line}", style="" if inner else "yellow"))
    if not report.problems:
        style = "bold yellow" if warnings else "bold green"
        console.print(Text(report.verdict(), style=style))


def _facts(split: SplitReport, max_seq_length: int) -> dict[str, str]:
    from expert.cli.words import count

    lengths = split.lengths
    left_out = ", ".join(f"{number:,} {reason}" for reason, number in split.dropped.items())
    leaked = sum(pairs.count for pairs in split.leaks.values())
    over = lengths["over_long_share"]
    read = {
        "rows read": f"{split.rows:,}",
        "bad rows": f"{split.bad_rows:,}",
        "without an answer": f"{split.empty_answers:,}",
        "left out": left_out or "0",
    }
    if split.split_off:
        read = {**dict.fromkeys(read, "–"), "rows read": "drawn from train"}
    return {
        **read,
        "examples": f"{lengths['examples']:,}",
        "tokens": count(lengths["tokens"]),
        "learnt": f"{lengths['learnt_share']:.1%}",
        "lengths p50 / p90 / p95": " / ".join(str(lengths[key]) for key in ("p50", "p90", "p95")),
        "lengths p99 / longest": f"{lengths['p99']} / {lengths['longest']}",
        f"longer than {max_seq_length} tokens": "–" if over is None else f"{over:.1%}",
        "tokens lost to cutting": "–" if over is None else f"{lengths['tokens_lost']:,}",
        "nothing of them is learnt": f"{lengths['unlearnt']:,}",
        "duplicates": f"{split.duplicates.count:,}" if split.duplicates else "0",
        "also in train": f"{leaked:,}" if split.leaks else "–",
        "template remnants": "–" if split.split_off else f"{sum(split.remnants.values()):,}",
    }


def find_datasets(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders to look in; this one by default.")
    ] = None,
    manifests: Annotated[
        Path | None, typer.Option("--manifests", help="Say which manifests below use the data.")
    ] = None,
    destination: Annotated[
        Path | None,
        typer.Option("--consolidate", metavar="DEST", help="Copy what the manifests need to here."),
    ] = None,
    as_json: Annotated[bool, json_option("The list as JSON.")] = False,
) -> None:
    """List the data sets on this machine, or gather what manifests need in one place."""
    import os

    from expert.cli.display import make_console, show_problems, write_line
    from expert.jobs.datasets.find import datasets_cache, hub_cache, read_users
    from expert.jobs.datasets.find import find_datasets as find
    from expert.jobs.datasets.gather import consolidate
    from expert.jobs.datasets.hub_copies import Caches

    if destination is not None and manifests is None:
        raise typer.BadParameter("--consolidate needs the manifests: --manifests FOLDER")
    users, unread = read_users(manifests) if manifests else ([], [])
    caches = Caches(hub_cache(os.environ, Path.home()), datasets_cache(os.environ, Path.home()))
    console = make_console()
    if destination is not None:
        gathered = consolidate(users, destination, caches)
        if as_json:
            write_line(_as_json("gathered", gathered, unread, caches))
        else:
            _show_gathered(gathered, console)
    else:
        looked_in = folders or [manifests or Path()]
        found = find(looked_in, environ=os.environ, home=Path.home(), users=users)
        if as_json:
            write_line(_as_json("datasets", found, unread, caches))
        else:
            _show_found(found, console, with_users=manifests is not None)
    if not as_json:
        _show_caches(caches, users, console)
    if unread and not as_json:
        show_problems("\n".join(["some manifests were passed over", *unread]))


def _show_caches(caches: Caches, users: list[DatasetUser], console: Console) -> None:
    """Where what was fetched and what was prepared lies, whether or not anything is there."""
    from expert.cli.run_view import say

    places = {"hub cache": caches.hub, "datasets cache": caches.datasets}
    places |= {f"prepared tokens of {user.name}": user.cache for user in users}
    for name, folder in places.items():
        there = "" if folder.is_dir() else " (not there)"
        say(console, f"{name}: {folder}{there}", "dim")


def _as_json(
    name: str, entries: list[FoundDataset] | list[Gathered], unread: list[str], caches: Caches
) -> str:
    import json
    from dataclasses import asdict

    data = {
        name: [asdict(entry) for entry in entries],
        "manifests_not_read": unread,
        "caches": {"hub": str(caches.hub), "datasets": str(caches.datasets)},
    }
    return json.dumps(data, indent=2, ensure_ascii=False)


def _show_found(found: list[FoundDataset], console: Console, *, with_users: bool) -> None:
    from datetime import datetime

    from expert.cli.display import Sheet, show_sheet
    from expert.cli.words import count, gib

    rows = []
    for entry in found:
        used = datetime.fromtimestamp(entry.last_used) if entry.last_used is not None else None
        amount = "–" if entry.rows is None else f"{entry.rows:,}"
        if entry.tokens is not None:
            amount += f" ({count(entry.tokens)} tokens)"
        local = entry.kind not in ("hub cache", "datasets cache")
        rows.append(
            (
                entry.kind,
                entry.path if local else f"{entry.name}\n{entry.path}",
                ", ".join(entry.splits) or "–",
                amount,
                gib(entry.size),
                f"{used:%Y-%m-%d %H:%M}" if used else "–",
                *([", ".join(entry.used_by) or "–"] if with_users else []),
            )
        )
    if not rows:
        console.print("no data sets were found")
        return
    columns = ("kind", "name", "splits", "rows", "size", "last used")
    show_sheet(Sheet((*columns, *(["used by"] if with_users else [])), [rows]), console)


def _show_gathered(gathered: list[Gathered], console: Console) -> None:
    from rich.text import Text

    from expert.cli.words import gib

    for one in gathered:
        console.print(Text(one.expert, style="bold"))
        for copy in one.copies:
            console.print(
                Text(f"  {copy.done}: {copy.target}  ({gib(copy.size)}, sha256 {copy.sha256[:12]})")
            )
        for line in one.left:
            console.print(Text(f"  not copied: {line}", style="yellow"))
        if one.set_options:
            console.print(Text(f"  use it with: {one.set_options}"))

"""`expert report`: a run as a page."""

from __future__ import annotations

import webbrowser
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expert.cli.show.display import Line, make_console, show_lines, write_json
from expert.cli.show.options import RUN_HELP, json_option
from expert.core.text import counted, gib, shell_quoted

if TYPE_CHECKING:
    from expert.jobs.report import WrittenReport

_STYLES = {"error": "bold red", "warning": "yellow", "note": ""}


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]", help=f"{RUN_HELP} Default: runs/.", show_default=False),
    ] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN", help="Compare with this run on the same axes; repeatable."),
    ] = None,
    ladder: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A benchmark result; default: RUN/ladder.json."),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER|FILE.html",
            help="Write into this folder, or to this file, instead of the run folder.",
        ),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    as_json: Annotated[bool, json_option("Print what was written as JSON.")] = False,
) -> None:
    """Write a page about a run, as one HTML file: verdict, curves, settings, environment."""
    from expert.jobs.report import report as report_job

    named = runs or []
    if len(named) > 1 and not compare:
        raise typer.BadParameter("give one run; compare with others by --compare RUN")
    others = [*(compare or ()), *named[1:]]
    done = report_job(named[0] if named else None, compare=others, ladder=ladder, to=to)
    if as_json:
        write_json(asdict(done))
    else:
        show_lines(make_console(), _lines(done))
    if open_it:
        webbrowser.open(done.html.resolve().as_uri())


def _lines(done: WrittenReport) -> list[Line]:
    """The verdict, the number of findings, and where the page is."""
    from expert.insight.findings.finding import ORDER

    found = Counter(finding.severity for finding in done.findings)
    bad = [kind for kind in ORDER if found[kind] and kind != "good"]
    lines = [(done.verdict.sentence, "bold")]
    if done.learning.kind != "unknown":
        style = "bold" if done.learning.is_good else "bold yellow"
        lines.insert(0, (f"{done.learning.kind}: {done.learning.sentence}", style))
    if bad:
        counts = ", ".join(counted(found[kind], kind) for kind in bad)
        where = f"see the page, or expert diagnose {shell_quoted(done.run)}"
        lines.append((f"  {counts}: {where}", _STYLES[bad[0]]))
    size = f"{gib(done.html_bytes)}, {len(done.figures)} figures"
    return [*lines, (f"✓ wrote {done.html}  ({size})", "")]

"""`expert report`: a run as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expert.cli.options import RUN_HELP, json_option

if TYPE_CHECKING:
    from expert.jobs.report import Written

_STYLES = {"error": "bold red", "warning": "yellow", "note": ""}


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN]",
            help=f"{RUN_HELP} runs/",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN", help="Another run on the same axes; several may follow or be named."
        ),
    ] = None,
    ladder: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A result of expert benchmark; by default RUN/ladder.json."
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER|FILE.html",
            help="Write into this folder, or this page with its .md beside it, not into the run.",
        ),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    as_json: Annotated[bool, json_option("What was written, as JSON.")] = False,
) -> None:
    """Make one HTML page of a run, and the same in Markdown: verdict, curves, reasons, hashes."""
    from expert.cli.display import make_console, write_line
    from expert.cli.run_view import say
    from expert.jobs.report import report as report_job

    named = runs or []
    if len(named) > 1 and not compare:
        raise typer.BadParameter("name one run; others are compared with --compare RUN")
    others = [*(compare or ()), *named[1:]]
    done = report_job(named[0] if named else None, compare=others, ladder=ladder, to=to)
    if as_json:
        import json

        write_line(json.dumps(written_as_dict(done), indent=2))
    else:
        console = make_console()
        for text, style in written_lines(done):
            say(console, text, style)
    if open_it:
        import webbrowser

        webbrowser.open(done.html.resolve().as_uri())


def written_lines(done: Written) -> list[tuple[str, str]]:
    """The verdict, how much was found, and where the page lies."""
    from collections import Counter

    from expert.cli.words import gib
    from expert.insight.findings.finding import ORDER

    counted = Counter(finding.severity for finding in done.findings)
    bad = [kind for kind in ORDER if counted[kind] and kind != "good"]
    found = ", ".join(f"{counted[kind]} {kind}{'s' * (counted[kind] > 1)}" for kind in bad)
    lines = [(done.verdict.sentence, "bold")]
    if done.learning is not None and done.learning.kind != "unknown":
        style = "bold" if done.learning.is_good else "bold yellow"
        lines.insert(0, (f"{done.learning.kind}: {done.learning.sentence}", style))
    if bad:
        where = f"see the page, or expert diagnose {done.run}"
        lines.append((f"  {found}: {where}", _STYLES[bad[0]]))
    size = f"{gib(done.html_bytes)}, {len(done.figures)} figures"
    lines.append((f"✓ wrote {done.html}  ({size})", ""))
    lines.append((f"  and {done.markdown}", "dim"))
    return lines


def written_as_dict(done: Written) -> dict[str, Any]:
    """The same for machines."""
    return {
        "run": str(done.run),
        "html": str(done.html),
        "markdown": str(done.markdown),
        "html_bytes": done.html_bytes,
        "state": done.state,
        "verdict": done.verdict.as_dict(),
        "learning": done.learning.as_dict() if done.learning is not None else None,
        "findings": [finding.as_dict() for finding in done.findings],
        "figures": list(done.figures),
        "compared": [str(run) for run in done.compared],
    }

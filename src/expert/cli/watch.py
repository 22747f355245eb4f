"""`expert watch`: follow a run from its events."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from expert.cli.options import RUN_HELP, json_option


def watch(
    run: Annotated[Path | None, typer.Argument(help=f"{RUN_HELP} runs/")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print how it stands, and leave.")] = False,
    as_json: Annotated[bool, json_option("How it stands as JSON, once.")] = False,
) -> None:
    """Follow a run from its events until it ends; Ctrl-C leaves, the run goes on."""
    from expert.cli.display import make_console, show_sheet, write_line
    from expert.cli.run_view import RunView, say, status_sheet
    from expert.run.stored.locate import find_trained
    from expert.run.stored.resume_command import command_of_run
    from expert.run.stored.status import ENDED_BEFORE, follow_run, run_status

    folder = find_trained(run)
    console = make_console()
    if as_json:
        import json
        from dataclasses import asdict

        write_line(json.dumps(asdict(run_status(folder)), indent=2, default=str))
        return
    if not once:
        with RunView(console) as view:
            for event in follow_run(folder):
                view(event)
                if console.quiet:  # the reader of a pipe left
                    return
    status = run_status(folder)
    if once:
        show_sheet(status_sheet(status), console)
    elif status.state == "gone":
        last = f" after step {status.step}" if status.step else ""
        say(console, f"{status.because}{last}", "bold red")
    if status.state in ENDED_BEFORE:
        say(console, f"go on with: {command_of_run(folder)}")

"""`expert board`: all runs as live pages in a browser."""

from __future__ import annotations

import os
import secrets
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from expert.cli.show.display import make_console, show, write_line

PORT = 7373


def board(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FOLDER…]", help="Folders with runs and manifests; default: ."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = PORT,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Pages show everything and change nothing.")
    ] = False,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Show all runs live in a browser; start and stop them there."""
    from expert.jobs.board import app
    from expert.jobs.board.actions import TOKEN
    from expert.jobs.serve.listen import address_of, listening_socket, refuse_without_packages

    refuse_without_packages()
    from expert.jobs.board.routes import make_board

    made = make_board(folders or [Path()], read_only=read_only)
    token = os.environ.get(TOKEN) or secrets.token_urlsafe(24)
    listening = listening_socket(host, port)
    url = f"{address_of(listening)}/?token={token}"
    console = make_console(needed=False)
    warning = app.warning_about(host)
    if warning:
        show(console, f"warning: {warning}", "yellow")
    write_line(url, needed=False)  # in full: `show` would hide the token
    show(console, "Ctrl-C ends the board; runs continue.")
    if open_it:
        webbrowser.open(url)
    app.make_server(made, token=token, host=host).run(sockets=[listening])

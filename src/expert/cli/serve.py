"""`expert serve`: trained experts behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import os
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from expert.cli.show.display import make_console, show, write_line
from expert.cli.show.options import Checkpoint, ComputeDevice, Device
from expert.core.text import visible

if TYPE_CHECKING:
    from expert.jobs.serve.app import LogEntry

SERVE_EPILOG = (
    "Exit codes: 130 after Ctrl-C and 143 after SIGTERM, when answers under way were finished or, "
    "after 10 s, cut; 2 nothing could be served; 65 an expert is damaged."
)


def serve(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Run folders, or folders of runs or of an expert: the newest run; or exported "
            "folders. Adapters of one base share it in memory. NAME=RUN: what requests call it; "
            "default: the expert's name.",
        ),
    ],
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. Other machines need a token: EXPERT_SERVE_TOKEN, or "
            "one that is generated and printed."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8000,
    with_base: Annotated[
        bool,
        typer.Option("--with-base", help="Serve the untrained base too, as the model base."),
    ] = False,
    checkpoint: Checkpoint = None,
    device: ComputeDevice = Device.auto,
    parallel: Annotated[
        int | None,
        typer.Option(min=1, help="Concurrent answers per model; default: as many as fit."),
    ] = None,
    queue: Annotated[
        int, typer.Option(min=1, help="Answers that may wait; more are refused with status 429.")
    ] = 256,
    vote: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=64,
            help="Answers to each conversation, of which the one is sent whose result most share.",
        ),
    ] = None,
    time_limit: Annotated[
        float, typer.Option(min=1, help="Longest time for an answer, in seconds.")
    ] = 300,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No line for each request.")] = False,
) -> None:
    """Serve trained experts to OpenAI clients on this machine."""
    from expert.jobs.serve.listen import refuse_without_packages

    refuse_without_packages()  # before what they are for is imported
    from expert.jobs.serve.serve import TOKEN, log_line, serving
    from expert.parallel.launch import stop_with_parent

    stop_with_parent()
    console, notes = make_console(needed=False), make_console(error=True)

    def log(entry: LogEntry) -> None:
        if not quiet:
            show(console, f"{datetime.now():%H:%M:%S}  {log_line(entry, ready.engine)}")

    ready = serving(
        runs,
        host=host,
        port=port,
        environment=os.environ,
        parallel=parallel,
        queue=queue,
        votes=vote or 0,
        seconds=time_limit,
        log=log,
        note=lambda text: show(notes, text, "yellow"),
        checkpoint=checkpoint,
        device=device.value,
        with_base=with_base,
        loading=lambda what: show(notes, f"{what} …", "dim"),
    )
    for line in ready.lines():  # unredacted: anything that looks like a key is an example
        write_line(visible(line), needed=False)
    if ready.generated_token:  # unredacted: it is not stored anywhere else
        write_line(f"\nexport {TOKEN}={ready.generated_token}", needed=False)
    show(console, "\nCtrl-C stops it", "dim")
    ready.run()

"""`expert benchmark`: what each thing a plan does is worth, on one's own model and data."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from expert.cli.manifest_option import manifest_option
from expert.cli.train_commands import Device, NotAsked, asked_manifest, flag_overrides
from expert.core.interrupts import Interrupted


def benchmark(
    manifest: Annotated[Path | None, manifest_option("The manifest to measure")] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Other rows than the manifest's; without a manifest a text (shakespeare, "
            "python-stdlib or a .txt file) for the built-in character GPT.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="About two minutes instead of ten.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="RUNG", help="Measure this rung and the one below; several times."),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Two results or two run folders side by side."),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where the result goes as JSON; .md and .html go beside it."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where benchmarks/ is made; runs/ by default."),
    ] = None,
    device: Annotated[Device | None, typer.Option(help="Where to train.")] = None,
    model: Annotated[str | None, typer.Option(help="Which of the base models.")] = None,
    vram: Annotated[str | None, typer.Option(help='Memory to use at most, as "16GB".')] = None,
    no_remember: Annotated[
        bool, typer.Option("--no-remember", help="Later plans shall not use what won.")
    ] = False,
    remote_code: Annotated[
        bool,
        typer.Option(
            "--allow-remote-code",
            help="Run Python code that comes with the model; needs a revision of 40 digits.",
        ),
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Override a key of the manifest."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The result as JSON; progress goes to standard error.")
    ] = False,
) -> None:
    """Climb from the way most people begin to all that a plan can do, and measure every rung."""
    from expert.cli.benchmark_view import ClimbView, show_compared, show_ladder
    from expert.cli.display import make_console, write_line
    from expert.cli.run_view import say
    from expert.insight.ladder import FILE
    from expert.jobs.benchmarking import Asked, check_result_file, new_folder, write_result
    from expert.jobs.benchmarking import benchmark as benchmark_job

    console = make_console(error=as_json)
    if compare is not None:
        show_compared(compare[0], compare[1], console, as_json=as_json)
        return
    flags = flag_overrides(dataset=dataset, output=output, epochs=None, device=device)
    told = (*flags, *(overrides or ()))
    if manifest is None and dataset is None:
        raise NotAsked(
            "nothing to measure is named  (expert benchmark --manifest FILE; or a text for the "
            "built-in character GPT: expert benchmark --dataset shakespeare)"
        )
    asked = Asked(
        read=lambda more: asked_manifest(manifest, dataset, (*told, *more)),
        command=command_line(),
        model=model,
        vram=vram,
        quick=quick,
        only=tuple(only or ()),
        remember=not no_remember,
        allow_remote_code=remote_code,
    )
    if to is not None:
        check_result_file(to)
    place = None if to is not None else new_folder(asked)
    try:
        with ClimbView(console) as view:
            ladder = benchmark_job(asked, folder=place, watcher=view)
    except Interrupted:
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)
        raise
    files = write_result(ladder, to or (place or Path()) / FILE)
    if as_json:
        write_line(ladder.model_dump_json(indent=2))
    else:
        show_ladder(ladder, console)
    say(console, f"result: {', '.join(map(str, files))}")


def command_line() -> str:
    """What was typed, without the folder of the program."""
    import shlex

    return shlex.join(["expert", *sys.argv[1:]])

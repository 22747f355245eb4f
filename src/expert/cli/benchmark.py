"""`expert benchmark`: what each thing a plan does is worth, on one's own model and data."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expert.cli.asked_manifest import NotAsked, asked_manifest, flag_overrides
from expert.cli.options import (
    AllowRemoteCode,
    BaseModelName,
    ManifestFile,
    MemoryLimit,
    Overrides,
    ResultAsJson,
    Rows,
    WhereToTrain,
    manifest_option,
    one_manifest,
    output_option,
)
from expert.core.interrupts import Interrupted

if TYPE_CHECKING:
    from rich.console import Console

    from expert.jobs.benchmark.benchmark import BenchmarkRequest

Minutes = Annotated[
    float | None, typer.Option("--minutes", min=0.5, help="About so many instead of ten.")
]
Quick = Annotated[bool, typer.Option("--quick", help="About two minutes instead of ten.")]
OnlyRungs = Annotated[
    list[str] | None,
    typer.Option(metavar="RUNG", help="Measure this rung and the one below; several times."),
]
TwoResults = Annotated[
    tuple[Path, Path] | None,
    typer.Option(metavar="A B", help="Two results or two runs side by side."),
]
ResultFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Where the result goes as JSON; .md and .html go beside it."),
]
NoRemember = Annotated[
    bool, typer.Option("--no-remember", help="Later plans shall not use what won.")
]

Forget = Annotated[
    bool,
    typer.Option(
        "--forget",
        help="Measure nothing: later plans forget what won, of the manifest's model or all.",
    ),
]


def benchmark(
    file: ManifestFile = None,
    manifest: Annotated[Path | None, manifest_option("The manifest to measure")] = None,
    dataset: Rows = None,
    quick: Quick = False,
    minutes: Minutes = None,
    only: OnlyRungs = None,
    compare: TwoResults = None,
    to: ResultFile = None,
    output: Annotated[
        Path | None, output_option("Where benchmarks/ is made; runs/ by default.")
    ] = None,
    device: WhereToTrain = None,
    model: BaseModelName = None,
    vram: MemoryLimit = None,
    no_remember: NoRemember = False,
    forget: Forget = False,
    remote_code: AllowRemoteCode = False,
    overrides: Overrides = None,
    as_json: ResultAsJson = False,
) -> None:
    """Climb from the way most people begin to all that a plan can do, and measure every rung."""
    from expert.cli.benchmark_view import show_compared
    from expert.cli.display import make_console
    from expert.jobs.benchmark.benchmark import BenchmarkRequest
    from expert.run.locate import run_or_result

    console = make_console(error=as_json, needed=compare is not None)
    if compare is not None:
        first, second = (run_or_result(place) for place in compare)
        show_compared(first, second, console, as_json=as_json)
        return
    manifest = one_manifest(file, manifest)
    flags = flag_overrides(dataset=dataset, output=output, epochs=None, device=device)
    told = (*flags, *(overrides or ()))
    if manifest is None and dataset is None:
        if forget:
            _forget(None, console)
            return
        raise NotAsked(
            "nothing to measure is named  (expert benchmark --manifest FILE; or a text for the "
            "built-in character GPT: expert benchmark --dataset shakespeare)"
        )
    asked = BenchmarkRequest(
        read=lambda more: asked_manifest(manifest, dataset, (*told, *more)),
        command=command_line(),
        model=model,
        vram=vram,
        quick=quick,
        minutes=minutes,
        only=tuple(only or ()),
        remember=not no_remember,
        allow_remote_code=remote_code,
    )
    if forget:
        _forget(asked, console)
        return
    _measure(asked, to, console, as_json=as_json)


def _forget(asked: BenchmarkRequest | None, console: Console) -> None:
    from expert.cli.run_view import say
    from expert.jobs.benchmark.benchmark import forget

    file, count = forget(asked)
    if count:
        ladders = "1 ladder" if count == 1 else f"{count} ladders"
        say(console, f"later plans know nothing of {ladders} any more: {file}")
    else:
        say(console, f"nothing was remembered: {file}")


def _measure(asked: BenchmarkRequest, to: Path | None, console: Console, *, as_json: bool) -> None:
    """Climbs, shows the ladder, and says in which files it is kept."""
    from expert.cli.benchmark_view import ClimbView, show_ladder
    from expert.cli.display import write_line
    from expert.cli.run_view import say
    from expert.insight.ladder.ladder import FILE
    from expert.jobs.benchmark.benchmark import benchmark as benchmark_job
    from expert.jobs.benchmark.benchmark import check_result_file, new_folder, write_result

    if to is not None:
        check_result_file(to)
    place = None if to is not None else new_folder(asked)
    file = to or (place or Path()) / FILE
    try:
        with ClimbView(console) as view:
            ladder = benchmark_job(asked, folder=place, watcher=view)
    except Interrupted as end:
        if view.measured is not None:
            kept = write_result(view.measured, file)
            end.left = f"what was measured is kept: {', '.join(map(str, kept))}"
        elif place is not None:
            shutil.rmtree(place, ignore_errors=True)
        raise
    files = write_result(ladder, file)
    if as_json:
        write_line(ladder.model_dump_json(indent=2))
    else:
        show_ladder(ladder, console)
    say(console, f"result: {', '.join(map(str, files))}")


def command_line() -> str:
    """What was typed, without the folder of the program."""
    import shlex

    return shlex.join(["expert", *sys.argv[1:]])

"""`expert benchmark`: what each optimization is worth, on your model and data."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expert.cli.show import options
from expert.cli.show.display import Sheet, make_console, show, show_bars, show_sheet, write_json
from expert.cli.show.progress import PreparingView
from expert.core.errors import ExpertError
from expert.core.secrets import redacted

if TYPE_CHECKING:
    from rich.console import Console

    from expert.insight.ladder import Ladder

SHOWN = ("setting", "tokens/s", "±", "gain", "in all", "loss", "")
"""Columns that a terminal has room for; the HTML page has all."""
QUICK_MINUTES, USUAL_MINUTES = 2.0, 10.0

Minutes = Annotated[float | None, typer.Option(min=0.5, help="Time budget; default: about ten.")]
Quick = Annotated[bool, typer.Option("--quick", help="About two minutes instead of ten.")]
OnlySettings = Annotated[
    list[str] | None,
    typer.Option(metavar="SETTING", help="Measure this setting after the baseline; repeatable."),
]
ResultFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the result here as JSON and .html.")
]


def benchmark(
    file: options.ManifestFile = None,
    manifest: Annotated[Path | None, options.manifest_option("The manifest to measure")] = None,
    dataset: options.Rows = None,
    quick: Quick = False,
    minutes: Minutes = None,
    only: OnlySettings = None,
    to: ResultFile = None,
    output: Annotated[
        Path | None, options.output_option("Folder for benchmarks/; default: runs/.")
    ] = None,
    device: options.TrainingDevice = None,
    model: options.BaseModelName = None,
    vram: options.MemoryLimit = None,
    remote_code: options.AllowRemoteCode = False,
    overrides: options.Overrides = None,
    as_json: options.ResultAsJson = False,
) -> None:
    """Measure every optimization, from the settings most people start with to the full plan."""
    from expert.jobs.benchmark.benchmark import BenchmarkRequest
    from expert.jobs.benchmark.benchmark import benchmark as benchmark_job

    console = make_console(error=as_json, needed=False)
    manifest = options.one_manifest(file, manifest)
    flags = options.flag_overrides(dataset=dataset, output=output, epochs=None, device=device)
    changes = (*flags, *(overrides or ()))
    if manifest is None and dataset is None:
        raise ExpertError(
            "nothing to measure  (expert benchmark --manifest FILE; or a text for the built-in "
            "character GPT: expert benchmark --dataset shakespeare)"
        )
    named = {"--manifest": manifest, "--dataset": None if manifest else dataset}
    named |= {"--model": model, "--vram": vram}
    arguments = [word for key, value in named.items() if value for word in (key, str(value))]
    arguments += [word for change in changes for word in ("--set", change)]
    arguments += ["--allow-remote-code"] if remote_code else []
    asked = BenchmarkRequest(
        read=lambda more: options.read_requested_manifest(manifest, dataset, (*changes, *more)),
        arguments=tuple(arguments),
        command=redacted(shlex.join(["expert", *sys.argv[1:]])),
        model=model,
        vram=vram,
        minutes=minutes or (QUICK_MINUTES if quick else USUAL_MINUTES),
        only=tuple(only or ()),
    )
    with ExitStack() as before:
        preparing = before.enter_context(PreparingView(console))

        def show_line(text: str, style: str) -> None:
            before.close()  # the rows are prepared
            show(console, text, style)

        ladder, files = benchmark_job(asked, to=to, show=show_line, preparing=preparing)
    if as_json:
        write_json(ladder.model_dump(mode="json"))
    else:
        show_ladder(ladder, console)
    show(console, f"result: {', '.join(map(str, files))}")


def show_ladder(ladder: Ladder, console: Console) -> None:
    """The headline, the bars, the table, and how it was measured."""
    from expert.insight.ladder import COLUMNS, headline, how_measured, table_rows

    show(console, f"\n{headline(ladder)}\n", "bold")
    if console.is_terminal:
        bars = [
            (one.name, one.cumulative or 0.0, f"{one.cumulative or 0.0:.2f}x")
            for one in ladder.kept
            if ladder.is_compared_with_baseline
        ]
        show_bars(bars, max((amount for _, amount, _ in bars), default=0.0), console)
    places = [COLUMNS.index(column) for column in SHOWN]
    rows = [[row[place] for place in places] for row in table_rows(ladder)]
    show_sheet(Sheet(SHOWN, [rows]), console)
    for line in how_measured(ladder):
        show(console, line, "dim")

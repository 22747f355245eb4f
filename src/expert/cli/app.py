"""The command line: `expert` and `expert-cli`."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from expert.cli import benchmark as benchmark_commands
from expert.cli import dataset as dataset_commands
from expert.cli import diagnose as diagnose_commands
from expert.cli import manifest as manifest_commands
from expert.cli import new as new_commands
from expert.cli import report as report_commands
from expert.cli import runs as run_commands
from expert.cli import train as train_commands
from expert.cli import validate as validate_commands
from expert.cli import watch as watch_commands
from expert.cli.options import (
    BaseModelName,
    ManifestFile,
    Overrides,
    Strict,
    json_option,
    manifest_option,
    one_manifest,
)
from expert.cli.usage_words import CommandsInWords
from expert.core.errors import (
    EXIT_DOES_NOT_FIT,
    EXIT_INTERNAL,
    EXIT_MEANINGS,
    EXIT_OK,
    EXIT_USAGE,
    ExpertError,
)
from expert.core.version import __version__

IN_ORDER_OF_USE = (
    *("new", "find-datasets", "manifest", "dataset", "machine", "presets", "plan", "pretokenize"),
    *("train", "watch", "sample", "validate", "export", "report", "diagnose", "benchmark"),
    "clear-cuda-cache",
)
_EPILOG = "\n".join(
    ["Exit codes:", *(f"{code:<3}  {text}" for code, text in EXIT_MEANINGS.items())]
)


class _InOrderOfUse(CommandsInWords):
    """Lists commands as somebody with new rows comes to need them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=IN_ORDER_OF_USE.index)


app = typer.Typer(
    name="expert",
    cls=_InOrderOfUse,
    help="Fine-tune small language-model experts at the full speed of the card you have.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(manifest_commands.app, name="manifest")
app.add_typer(dataset_commands.app, name="dataset")
app.command()(new_commands.new)
app.command("find-datasets")(dataset_commands.find_datasets)
app.command(cls=train_commands.TrainCommand, epilog=train_commands.TRAIN_EPILOG)(
    train_commands.train
)
app.command()(watch_commands.watch)
app.command()(report_commands.report)
app.command()(run_commands.sample)
app.command()(run_commands.export)
app.command(epilog=diagnose_commands.DIAGNOSE_EPILOG)(diagnose_commands.diagnose)
app.command()(benchmark_commands.benchmark)
app.command()(validate_commands.validate)
app.command("clear-cuda-cache")(run_commands.clear_cuda_cache)


def _show_version(asked: bool) -> None:
    if asked:
        from expert.cli.display import write_line

        write_line(f"expert {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="The version.")
    ] = False,
) -> None:
    """Fine-tune small language-model experts at the full speed of the card you have."""


@app.command()
def machine(
    as_json: Annotated[bool, json_option("Every fact as JSON.")] = False,
    cards: Annotated[bool, typer.Option("--cards", help="List the cards known by name.")] = False,
) -> None:
    """Show GPUs, CPU, memory, disk and versions, each with where it was read."""
    from expert.cli.display import make_console, show_sheet, write_line

    if cards:
        from expert.cli.card_view import cards_as_json, cards_sheet

        if as_json:
            write_line(cards_as_json())
        else:
            show_sheet(cards_sheet(), make_console())
        return
    import json

    from expert.cli.machine_view import machine_sheet
    from expert.planning.machine.machine import describe_machine, machine_as_dict

    found = describe_machine(Path())
    if as_json:
        write_line(json.dumps(machine_as_dict(found), indent=2))
    else:
        show_sheet(machine_sheet(found), make_console())


@app.command()
def plan(
    file: ManifestFile = None,
    manifest: Annotated[Path | None, manifest_option("The manifest to plan")] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(help="Plan for this card; several times: side by side."),
    ] = None,
    vram: Annotated[str | None, typer.Option(help='Memory to plan for, such as "16GB".')] = None,
    model: BaseModelName = None,
    overrides: Overrides = None,
    strict: Strict = False,
    everything: Annotated[bool, typer.Option("--all", help="Show defaults too.")] = False,
    as_json: Annotated[bool, json_option("The plan as JSON.")] = False,
) -> None:
    """Settle every "auto" for a card, with reasons, before a weight is loaded."""
    from expert.cli.display import make_console, write_line
    from expert.cli.plan_view import (
        show_doubts,
        show_plan,
        show_remarks,
        show_side_by_side,
    )
    from expert.manifest.reader import read_manifest
    from expert.planning.machine.machine import describe_machine
    from expert.run.plan import plan as plan_job

    chosen = one_manifest(file, manifest)
    if chosen is None:
        raise typer.BadParameter("name a manifest: expert plan FILE")
    read = read_manifest(chosen, overrides=overrides or (), strict=strict)
    cards: list[str | None] = [*gpu] if gpu else [None]
    here = describe_machine(read.folder)
    plans = [plan_job(read, gpu=card, vram=vram, model=model, machine=here) for card in cards]
    console = make_console()
    if as_json:
        texts = [one.model_dump_json(indent=2) for one in plans]
        write_line(texts[0] if len(texts) == 1 else "[\n" + ",\n".join(texts) + "\n]")
    elif len(plans) == 1:
        manifest_commands.show_notices(read, console, brief=True)
        show_plan(plans[0], console, everything=everything)
    else:
        show_side_by_side(plans, console)
        for one in plans:
            if not one.fits:
                show_remarks(one, console)
        if all(one.fits for one in plans):
            show_doubts(plans[0], console)
    if not all(one.fits for one in plans):
        raise typer.Exit(EXIT_DOES_NOT_FIT)


@app.command()
def pretokenize(
    file: ManifestFile = None,
    manifest: Annotated[Path | None, manifest_option("The manifest whose data is prepared")] = None,
    everything: Annotated[
        Path | None,
        typer.Option(
            "--all", help="Every manifest.json or .yaml below this folder whose rows are there."
        ),
    ] = None,
    model: BaseModelName = None,
    overrides: Overrides = None,
) -> None:
    """Tokenise and pack the data once; training does the same where it was not done."""
    from expert.cli.display import make_console
    from expert.cli.prepare_view import progress, show_outcomes, show_prepared
    from expert.cli.run_view import say
    from expert.jobs.pretokenize import attempt, manifests_below
    from expert.run.prepare import prepare

    chosen = one_manifest(file, manifest)
    if (chosen is None) == (everything is None):
        raise typer.BadParameter("name one manifest, or a folder with --all")
    console = make_console()
    changes = tuple(overrides or ())
    if chosen is not None:
        with progress(console) as tell:
            done = prepare(chosen, model=model, overrides=changes, tell=tell)
        show_prepared(done, console)
        return
    outcomes = []
    for each in manifests_below(everything or Path()):
        say(console, f"\n{each}", "bold")
        with progress(console) as tell:
            outcome = attempt(each, model=model, overrides=changes, tell=tell)
        if outcome.data is not None:
            show_prepared(outcome.data, console)
        outcomes.append(outcome)
    show_outcomes(outcomes, console)
    if any(outcome.state == "failed" for outcome in outcomes):
        raise typer.Exit(EXIT_USAGE)


@app.command()
def presets() -> None:
    """What guides recommend for single cards, held to the memory model."""
    from expert.cli.display import Sheet, make_console, show_sheet
    from expert.planning.models.presets import verdicts

    rows = [
        (
            verdict.card.slug,
            verdict.preset.model,
            f"{verdict.preset.rows} × {verdict.preset.row_tokens} tokens",
            verdict.preset.settings,
            verdict.words(),
        )
        for verdict in verdicts()
    ]
    columns = ("card", "model", "rows at once", "with", "verdict")
    show_sheet(Sheet(columns, [rows], dim=("with",)), make_console())


def run() -> None:
    """Run the command; a fault is told in words, never as a traceback."""
    from expert.cli.display import flush_outputs, outputs, show_problems

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a Windows pipe may not know ✓ or ×
            stream.reconfigure(encoding="utf-8", errors="replace")
    watched = outputs()
    try:
        _run_command(watched)
    except ExpertError as error:
        show_problems(str(error))
        sys.exit(error.exit_code)
    except BrokenPipeError as error:
        sys.exit(_code_of_broken_pipe(error, watched))
    except OSError as error:
        show_problems(f"{error.filename or 'output'}: {error.strerror or error}")
        sys.exit(EXIT_USAGE)
    except Exception as error:  # noqa: BLE001 - the last net: users see words and a file name
        sys.exit(_report_fault(error))
    finally:
        with contextlib.suppress(OSError):  # it was told, or nobody is left to tell
            flush_outputs()


def _run_command(watched: list[int]) -> None:
    """Run the command; its last words are said here, where it is noticed that nobody listens."""
    from expert.cli.display import flush_outputs

    try:
        app()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer and rich make exit code 1 of it
            sys.exit(_code_of_broken_pipe(end.__context__, watched))
        flush_outputs()  # the command itself went well or not: its own code is told
        raise


def _code_of_broken_pipe(error: BrokenPipeError, watched: list[int]) -> int:
    """The exit code where the reader of a pipe left: what it wanted it has. A complaint that nobody
    read keeps its own."""
    from expert.cli.display import nobody_reads, say_no_more

    if not any(map(nobody_reads, watched)):  # some other pipe: that is no end that was wanted
        return _report_fault(error)
    for stream in (sys.stdout, sys.stderr):  # Python would complain at exit
        say_no_more(stream)
    return int(getattr(error.__context__, "exit_code", EXIT_OK))


def _report_fault(error: Exception) -> int:
    from expert.cli.display import show_problems

    handle, name = tempfile.mkstemp(prefix="expert-fault-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(f"expert {__version__}, Python {sys.version}\n{' '.join(sys.argv)}\n\n")
        traceback.print_exc(file=stream)
    kind = type(error).__name__
    show_problems(
        f"Expert failed in a way it should not: {kind}: {error}\n"
        f"The details are in {name}; please report them."
    )
    return EXIT_INTERNAL

"""`expert train`: start a run, or go on with one."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from expert.cli.asked_manifest import NotAsked, asked_manifest, flag_overrides
from expert.cli.dry_run_view import show_dry_run
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
from expert.core.errors import EXIT_OK, ExpertError
from expert.core.interrupts import Interrupted
from expert.jobs.resumable import EPOCHS, RESUME, command_to_go_on, with_resume_value

if TYPE_CHECKING:
    from rich.console import Console

    from expert.jobs.train import RunResult
    from expert.manifest.reader import ReadManifest
    from expert.planning.run_plan import RunPlan
    from expert.run.open import Opened

STOPPING = "stopping after this update; once more to stop now"
TRAIN_EPILOG = (
    "Exit codes of a run: 0 finished; 2 command line, manifest or data wrong; 3 the plan does not "
    "fit (with --dry-run); 4 the run could not go on; 75 no room for a checkpoint; 130 stopped "
    "with Ctrl-C and 143 with SIGTERM, after a checkpoint was saved: --resume goes on."
)


class TrainCommand(TyperCommand):
    """`--resume` alone means `--resume auto`. Typer has no option whose value may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_resume_value(args))


Epochs = Annotated[float | None, typer.Option(EPOCHS, help="Passes over the data.")]
Resume = Annotated[
    str | None,
    typer.Option(
        RESUME,
        metavar="[auto|PATH]",
        help="Go on with the newest run of this expert, or with a run, the newest of a folder, or "
        "a checkpoint.",
    ),
]
AllowChanged = Annotated[
    bool, typer.Option("--allow-changed", help="Resume although data, model or schedule changed.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show plan and data, write nothing.")]


def train(
    file: ManifestFile = None,
    manifest: Annotated[Path | None, manifest_option("The manifest to train")] = None,
    dataset: Rows = None,
    output: Annotated[Path | None, output_option("Where run folders go; runs/ by default.")] = None,
    epochs: Epochs = None,
    device: WhereToTrain = None,
    resume: Resume = None,
    allow_changed: AllowChanged = False,
    remote_code: AllowRemoteCode = False,
    model: BaseModelName = None,
    vram: MemoryLimit = None,
    dry_run: DryRun = False,
    overrides: Overrides = None,
    as_json: ResultAsJson = False,
) -> None:
    """Train an expert from its manifest, or the built-in character GPT on a text."""
    from expert.cli.display import make_console
    from expert.cli.run_view import say
    from expert.run.open import open_run, refuse_absent_gpu

    flags = flag_overrides(dataset=dataset, output=output, epochs=epochs, device=device)
    read = asked_manifest(one_manifest(file, manifest), dataset, (*flags, *(overrides or ())))
    if vram is not None and read.manifest.training.config.device == "cpu":
        raise NotAsked("--vram: limits the memory of a card, and device is cpu  (leave one out)")
    if resume not in (None, "auto") and not Path(resume or "").is_dir():
        what = "is no folder" if Path(resume or "").exists() else "there is no such folder"
        raise NotAsked(
            f"{RESUME} {resume}: {what}  (name one under runs/; a manifest stands before {RESUME})"
        )
    console = make_console(error=as_json, needed=False)
    asked: dict[str, Any] = {"model": model, "vram": vram, "resume": resume}
    if dry_run:
        opened = open_run(read, data="counted", **asked)
        refuse_absent_gpu(opened)
        _say_which_run(opened, resume)
        show_dry_run(opened, console, as_json=as_json)
        return
    for notice in read.notices:
        if notice.kind == "warning":
            say(console, f"warning: {read.source}: {notice.where}: {notice.text}", "yellow")
    result, plan = _run(
        read, console, asked, allow_changed=allow_changed, allow_remote_code=remote_code
    )
    _show_result(result, plan, console, as_json=as_json)
    if result.exit_code != EXIT_OK:
        raise typer.Exit(result.exit_code)


def _say_which_run(opened: Opened, resume: str | None) -> None:
    """Which run is resumed, where a folder of runs or of an expert was named."""
    from expert.cli.display import make_console
    from expert.cli.run_view import say

    named = Path(str(resume))
    if opened.resumed is None or resume == "auto":
        return
    path = opened.resumed.folder.path
    if path not in (named, *named.parents):  # neither the run itself nor a checkpoint of it
        say(make_console(error=True), f"the run is {path}", "dim")


def _run(
    read: ReadManifest, console: Console, asked: dict[str, Any], **options: Any
) -> tuple[RunResult, RunPlan]:
    from expert.cli.run_view import PreparingView, RunView, say
    from expert.jobs.train import train as train_job
    from expert.run.open import open_run

    resume = asked["resume"]
    with RunView(console, live=True) as view, ExitStack() as before:
        tell = before.enter_context(PreparingView(console))

        def show(event: dict[str, Any]) -> None:
            before.close()  # the data is ready: its display makes room for that of the run
            view(event)

        try:
            opened = open_run(read, tell=tell, **asked)
            _say_which_run(opened, resume)
            result = train_job(
                opened,
                **options,
                sinks=(show,),
                acknowledge=_say_stopping,
                progress=view.progress,
                evaluating=view.evaluating,
            )
        except ExpertError as error:
            started_with = getattr(error, "started_with", None)
            if not started_with:
                raise
            run = None if resume == "auto" or not opened.resumed else opened.resumed.folder.path
            command = command_to_go_on(sys.argv, run, started_with)
            raise ExpertError(f"{error}\n  go on as it was started: {command}") from None
        except Interrupted as end:  # before the run itself listens for it
            before.close()
            left = "no run was begun" if resume is None else "the run is as it was"
            kept = "what is prepared of the data stays so; the same command goes on from there"
            say(console, f"stopped by {end.by} before the first update: {left}; {kept}")
            end.told = True
            raise
        before.close()
        return result, opened.plan


def _say_stopping() -> None:
    """Written past Python's buffers: it is called in the middle of anything, even of writing."""
    start = b"\r\x1b[K" if os.isatty(2) else b""  # a bar may stand there
    with suppress(OSError):
        os.write(2, start + f"{STOPPING}\n".encode())


def _show_result(result: RunResult, plan: RunPlan, console: Console, *, as_json: bool) -> None:
    import json
    from dataclasses import asdict

    from expert.cli.display import write_line
    from expert.cli.run_view import say
    from expert.data.plain_text import trained_on_text

    if as_json:
        write_line(json.dumps(asdict(result), indent=2, default=str))
        return
    if result.nothing_left:
        longer = command_to_go_on(sys.argv, result.folder, [("training.config.epochs", "N")])
        say(console, f"✓ nothing left to do: {result.folder} is finished")
        say(console, f"to train it longer: {longer} --allow-changed")
    if result.final is not None:
        # What continues a text gives no answers to judge.
        rows = "" if result.held_out else " --test-set FILE"  # it has learnt all it was given
        judge = f"expert validate --expert {result.folder}{rows} --baseline base"
        commands = [] if trained_on_text(plan) else [judge]
        commands.append(f'expert sample {result.folder} --prompt "…"')
        commands.append(f"expert export {result.folder} --to FOLDER")
        for number, command in enumerate(commands):
            say(console, f"{'      ' if number else 'next: '}{command}")
    else:
        say(console, f"go on with: {command_to_go_on(sys.argv, result.folder)}")

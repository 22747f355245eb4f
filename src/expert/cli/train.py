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
from expert.run.stored.resume_command import EPOCHS, RESUME, command_to_go_on, with_resume_value

if TYPE_CHECKING:
    from rich.console import Console

    from expert.manifest.reader import ReadManifest
    from expert.planning.run_plan import RunPlan
    from expert.run.session.finish import RunResult

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
    from expert.jobs.train import kept_by_run
    from expert.run.plan import plan as plan_job

    flags = flag_overrides(dataset=dataset, output=output, epochs=epochs, device=device)
    read = asked_manifest(one_manifest(file, manifest), dataset, (*flags, *(overrides or ())))
    if vram is not None and read.manifest.training.config.device == "cpu":
        raise NotAsked("--vram: limits the memory of a card, and device is cpu  (leave one out)")
    if resume not in (None, "auto") and not Path(resume or "").is_dir():
        what = "is no folder" if Path(resume or "").exists() else "there is no such folder"
        raise NotAsked(
            f"{RESUME} {resume}: {what}  (name one under runs/; a manifest stands before {RESUME})"
        )
    kept = kept_by_run(read, resume, model=model, vram=vram) if dry_run else None
    plan = plan_job(read, model=model, vram=vram, look=dry_run, kept=kept)
    if read.manifest.training.config.device == "cuda" and plan.kernels.device == "cpu":
        raise NotAsked(
            "device: cuda was asked for, and no GPU was found: see expert machine  (use --device "
            "cpu, or auto)"
        )
    resume = _run_that_is_meant(resume, plan)
    console = make_console(error=as_json, needed=False)
    if dry_run:
        show_dry_run(read, plan, resume, console, as_json=as_json)
        return
    _show_warnings(read, plan, console)
    result = _run(
        read,
        console,
        model=model,
        vram=vram,
        resume=resume,
        allow_changed=allow_changed,
        allow_remote_code=remote_code,
    )
    _show_result(result, plan, console, as_json=as_json)
    if result.exit_code != EXIT_OK:
        raise typer.Exit(result.exit_code)


def _run_that_is_meant(resume: str | None, plan: RunPlan) -> str | None:
    """What to go on with; where a folder of runs or of an expert was named, its newest run, which
    is said."""
    from expert.cli.display import make_console
    from expert.cli.run_view import say
    from expert.run.stored.locate import run_to_resume

    if resume in (None, "auto"):
        return resume
    named = Path(str(resume))
    runs = Path(plan.watch.output_dir)
    folder, _ = run_to_resume(str(resume), runs=runs, expert=plan.expert)
    if folder.path in (named, *named.parents):  # the run itself, or a checkpoint of it
        return resume
    say(make_console(error=True), f"the run is {folder.path}", "dim")
    return str(folder.path)


def _run(
    read: ReadManifest,
    console: Console,
    **options: Any,
) -> RunResult:
    from expert.cli.run_view import PreparingView, RunView, say
    from expert.jobs.train import train as train_job

    with RunView(console, live=True) as view, ExitStack() as before:
        tell = before.enter_context(PreparingView(console))

        def show(event: dict[str, Any]) -> None:
            before.close()  # the data is ready: its display makes room for that of the run
            view(event)

        try:
            result = train_job(
                read,
                **options,
                sinks=(show,),
                tell=tell,
                acknowledge=_say_stopping,
                progress=view.progress,
                evaluating=view.evaluating,
            )
        except ExpertError as error:
            started_with = getattr(error, "started_with", None)
            if not started_with:
                raise
            run = None if options["resume"] == "auto" else Path(options["resume"])
            command = command_to_go_on(sys.argv, run, started_with)
            raise ExpertError(f"{error}\n  go on as it was started: {command}") from None
        except Interrupted as end:  # before the run itself listens for it
            before.close()
            left = "no run was begun" if options["resume"] is None else "the run is as it was"
            kept = "what is prepared of the data stays so; the same command goes on from there"
            say(console, f"stopped by {end.by} before the first update: {left}; {kept}")
            end.told = True
            raise
        before.close()
        return result


def _say_stopping() -> None:
    """Written past Python's buffers: it is called in the middle of anything, even of writing."""
    start = b"\r\x1b[K" if os.isatty(2) else b""  # a bar may stand there
    with suppress(OSError):
        os.write(2, start + f"{STOPPING}\n".encode())


def _show_warnings(read: ReadManifest, plan: RunPlan, console: Console) -> None:
    from expert.cli.run_view import say

    for notice in read.notices:
        if notice.kind == "warning":
            say(console, f"warning: {read.source}: {notice.where}: {notice.text}", "yellow")
    for remark in plan.remarks:
        if remark.kind == "warning":
            say(console, f"warning: {remark.path}: {remark.text}", "yellow")


def _show_result(result: RunResult, plan: RunPlan, console: Console, *, as_json: bool) -> None:
    import json
    from dataclasses import asdict

    from expert.cli.display import write_line
    from expert.cli.run_view import say
    from expert.run.row_kind import trained_on_text

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

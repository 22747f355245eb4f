"""`expert train`: start a run, or resume one."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from expert.cli.plan import show_notices, show_plan
from expert.cli.show import options
from expert.cli.show.display import (
    Sheet,
    Waiting,
    make_console,
    show,
    show_problems,
    show_sheet,
    write_json,
)
from expert.cli.show.progress import PreparingView, RunProgress
from expert.core.errors import EXIT_DOES_NOT_FIT, EXIT_OK, ExpertError
from expert.core.interrupts import Interrupted, show_cursor
from expert.core.text import loss, shell_quoted

if TYPE_CHECKING:
    from rich.console import Console

    from expert.manifest.reader import ReadManifest
    from expert.planning.run_plan import RunPlan
    from expert.run.open import Opened
    from expert.run.session.result import RunResult

STOPPING = "Finishing this step; press Ctrl-C again to stop immediately."
STOPPED = "Stopped without saving; --resume continues from the last checkpoint, if there is one."
TRAIN_EPILOG = (
    "Exit codes: 0 finished; 2 wrong command line, manifest or data; 3 the plan does not fit (with "
    "--dry-run); 4 the run failed; 70 it hung; 75 the disk is full; 130 stopped by Ctrl-C "
    "(143: SIGTERM, 129: SIGHUP) after a checkpoint was saved: --resume continues after it. "
    "SIGUSR1 saves a checkpoint and the run continues (on_sigusr1)."
)


class TrainCommand(TyperCommand):
    """`--resume` alone means `--resume auto`; typer has no options with an optional value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from expert.run.stored.resume_command import with_resume_value

        return super().parse_args(ctx, with_resume_value(args))


Resume = Annotated[
    str | None,
    typer.Option(
        metavar="[auto|if-any|PATH]",
        help="Resume the newest run of this expert, a run, the newest run in a folder, or a "
        "checkpoint. if-any: the newest that has saved something, else start one.",
    ),
]
StartFrom = Annotated[
    Path | None,
    typer.Option(metavar="RUN", help="Start from the adapter of a run, or of a PEFT folder."),
]
AllowChanged = Annotated[
    bool, typer.Option("--allow-changed", help="Resume even if data, model or settings changed.")
]
Manifests = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[FILE]",
        help="The manifest, same as --manifest; several with --each-gpu.",
        callback=lambda files: [options.manifest_file(file) for file in files or ()],
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        metavar="all|N|0,2",
        help="Train on several GPUs of this machine: all, a number of them, or these. With "
        "--device cpu: that many processes. With --each-gpu: where runs may go.",
    ),
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        min=0,
        help="With --gpus: restart and resume after a crash, up to this many times.",
    ),
]
EachGpu = Annotated[
    bool,
    typer.Option(
        "--each-gpu", help="Train several manifests, each on one GPU; others wait for a free one."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan; write nothing.")]


def train(
    context: typer.Context,
    files: Manifests = None,
    manifest: Annotated[Path | None, options.manifest_option("The manifest to train")] = None,
    dataset: options.Rows = None,
    output: Annotated[
        Path | None, options.output_option("Folder for runs; default: runs/.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    device: options.TrainingDevice = None,
    start_from: StartFrom = None,
    resume: Resume = None,
    allow_changed: AllowChanged = False,
    remote_code: options.AllowRemoteCode = False,
    model: options.BaseModelName = None,
    vram: options.MemoryLimit = None,
    gpus: Gpus = None,
    max_restarts: MaxRestarts = 0,
    each_gpu: EachGpu = False,
    dry_run: DryRun = False,
    overrides: options.Overrides = None,
    as_json: options.ResultAsJson = False,
) -> None:
    """Train an expert, or the built-in character GPT on a text."""
    from expert.jobs.launch.ranks import joined
    from expert.jobs.train import join
    from expert.parallel.launch import redirect_output, stop_with_parent, world_from_environment
    from expert.run.open import check_base
    from expert.run.stored.locate import newest_resumable

    stop_with_parent()
    world = world_from_environment()
    problems = []
    if world.size > 1 and each_gpu:
        problems.append("--each-gpu starts its runs itself  (leave torchrun or srun out)")
    if files and len(files) > 1 and not each_gpu:
        problems.append("several manifests: give one manifest, or train each with --each-gpu")
    if each_gpu and (manifest is not None or not files):
        problems.append("--each-gpu: name the manifests, such as --each-gpu a.json b.json")
    if max_restarts and (gpus is None or each_gpu):
        problems.append("--max-restarts needs --gpus  (torchrun has its own --max-restarts)")
    if problems:
        raise ExpertError("\n".join(problems))
    if each_gpu:
        where = device.value if device is not None else "auto"
        _train_each(context, files or [], gpus, device=where, as_json=as_json)
        return
    flags = options.flag_overrides(
        dataset=dataset, output=output, epochs=epochs, device=device, start=start_from
    )
    manifest = options.one_manifest(files[0] if files else None, manifest)
    read = options.read_requested_manifest(manifest, dataset, (*flags, *(overrides or ())))
    if vram is not None and read.manifest.training.config.device == "cpu":
        raise ExpertError("--vram limits GPU memory, but device is cpu  (leave one out)")
    if resume == "if-any":
        resume = newest_resumable(read)
    if resume not in (None, "auto") and not Path(resume or "").is_dir():
        what = "not a folder" if Path(resume or "").exists() else "folder not found"
        fix = "give a run folder such as those in runs/; put the manifest before --resume"
        raise ExpertError(f"--resume {resume}: {what}  ({fix})")
    console = make_console(error=as_json, needed=False)
    if gpus is not None:
        _start_ranks(read, gpus, max_restarts)
    asked: dict[str, Any] = {"model": model, "vram": vram, "resume": resume}
    asked |= {"ranks": world.size, "nodes": world.nodes}
    if dry_run and not world.is_first:
        return
    if dry_run:
        _dry_run(read, console, asked, gpus, as_json=as_json)
        return
    allowed: dict[str, Any] = {"allow_changed": allow_changed, "allow_remote_code": remote_code}
    result: RunResult | None
    check_base(read, model, allow_remote_code=remote_code)
    stage = Waiting(console)
    if world.size == 1 and console.is_terminal:
        stage("loading PyTorch")
    with stage, joined(world, read, (*flags, *(overrides or ()))) as group:
        stage()
        allowed["begin"] = lambda run: redirect_output(run, group.world)
        if world.is_first:
            show_notices(read, console, shown_by=_full_plan(read))
            result, plan = _run(read, console, asked, gpus, group=group, **allowed)
            _show_result(result, plan, console, as_json=as_json)
        else:
            # This rank takes part in the run of the first, and writes only into its log.
            result = join(read, group, **allowed)
        group.run_on_rank_0(lambda: None)  # it may still write, and the launcher ends all with one
        group.barrier()
    if result is not None and result.exit_code != EXIT_OK:
        raise typer.Exit(result.exit_code)


def _dry_run(
    read: ReadManifest, console: Console, asked: dict[str, Any], gpus: str | None, *, as_json: bool
) -> None:
    """The plan and the run folder; the exit code says whether it fits."""
    from expert.run.open import open_run, refuse_missing_gpu

    opened = open_run(read, data="counted", **asked)
    refuse_missing_gpu(opened)
    _show_resumed(opened, asked["resume"])
    plan = opened.plan
    options.hint_unused_gpus(console, gpus, opened)
    resume = str(opened.resumed.folder.path) if opened.resumed else None
    if as_json:
        write_json({"plan": plan.model_dump(mode="json"), "resume": resume})
    else:
        show_plan(plan, console, full=False)
        show_notices(opened.read, console, shown_by=_full_plan(read))
        where = f"resume {resume}" if resume else f"create a folder in {plan.watch.output_dir}"
        show(console, f"the run would {where}; nothing was written")
    if not plan.fits:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _full_plan(read: ReadManifest) -> str:
    return f"expert plan {shell_quoted(read.source)} --full"


def _show_resumed(opened: Opened, resume: str | None) -> None:
    """Report which run is resumed, if a folder of runs or of an expert was given."""
    if opened.resumed is None or resume == "auto":
        return
    named, path = Path(str(resume)), opened.resumed.folder.path
    if path not in (named, *named.parents):  # neither the run itself nor a checkpoint of it
        show(make_console(error=True), f"run: {path}", "dim")


def _run(
    read: ReadManifest, console: Console, asked: dict[str, Any], gpus: str | None, **allowed: Any
) -> tuple[RunResult, RunPlan]:
    from expert.jobs.launch.ranks import given_command
    from expert.jobs.train import train as train_job
    from expert.run.open import open_run
    from expert.run.stored.resume_command import command_to_resume

    resume = asked["resume"]
    with RunProgress(console, live=True) as view, ExitStack() as before:
        tell = before.enter_context(PreparingView(console, brief=True))

        def show_event(event: dict[str, Any]) -> None:
            before.close()  # the data is ready: its display makes room for the run's
            view(event)

        try:
            opened = open_run(read, tell=tell, **asked)
            _show_resumed(opened, resume)
            options.hint_unused_gpus(console, gpus, opened)
            result = train_job(
                opened,
                **allowed,
                sinks=(show_event,),
                acknowledge=show_stopping,
                progress=view.progress,
                evaluating=view.evaluating,
            )
        except ExpertError as error:
            started_with = getattr(error, "started_with", None)
            if not started_with:
                raise
            run = opened.resumed.folder.path if opened.resumed and resume != "auto" else None
            command = command_to_resume(given_command(), run, started_with)
            raise ExpertError(f"{error}\n  resume it as it was started: {command}") from None
        except Interrupted as end:  # before the run itself handles signals
            before.close()
            left = "no run was started" if resume is None else "the run is unchanged"
            kept = "finished data sets are kept; the same command prepares the rest"
            show(console, f"stopped by {end.by} before the first step: {left}; {kept}")
            end.shown = True
            raise
        before.close()
        return result, opened.plan


def show_stopping(again: bool) -> None:
    """Bypasses Python's buffers: it may be called in the middle of a write."""
    start = b"\r\x1b[K" if os.isatty(2) else b""  # there may be a bar on this line
    with suppress(OSError):
        os.write(2, start + f"{STOPPED if again else STOPPING}\n".encode())


def _show_result(result: RunResult, plan: RunPlan, console: Console, *, as_json: bool) -> None:
    from expert.data.plain_text import trained_on_text
    from expert.jobs.launch.ranks import given_command
    from expert.run.stored.resume_command import command_to_resume

    if as_json:
        write_json(result, needed=False)
        return
    if result.nothing_left:
        longer = command_to_resume(
            given_command(), result.folder, [("training.config.epochs", "N")]
        )
        show(console, f"✓ nothing left to do: {result.folder} is finished")
        show(console, f"to train it longer: {longer} --allow-changed")
    if result.final is None:
        show(console, f"resume with: {command_to_resume(given_command(), result.folder)}")
        return
    rows = "" if result.held_out else " --test-set FILE"  # it was trained on all its rows
    folder = shell_quoted(result.folder)
    commands = [
        f"expert validate {folder}{rows} --baseline base",
        f'expert sample {folder} --prompt "…"',
        f"expert export {folder} --to FOLDER",
    ]
    for place, command in enumerate(commands[trained_on_text(plan) :]):  # text has no answers
        show(console, f"{'      ' if place else 'next: '}{command}")


# --- several GPUs --------------------------------------------------------------------------------


def _start_ranks(read: ReadManifest, gpus: str, max_restarts: int) -> None:
    """Run this command on each of the cards and exit with their exit code. For a single card, make
    it the only visible one and return."""
    from expert.core.rundir import RunFolder
    from expert.jobs.launch.cards import choose_cards
    from expert.jobs.launch.ranks import train_on_ranks
    from expert.planning.machine.machine import describe_machine
    from expert.run.stored.locate import has_saved
    from expert.run.stored.resume_command import command_to_resume

    device = read.manifest.training.config.device
    machine = describe_machine(read.folder)
    cards = choose_cards(gpus, machine, device=device, env=os.environ)
    if cards.ranks == 1 and not max_restarts:
        if cards.visible:
            os.environ["CUDA_VISIBLE_DEVICES"] = cards.visible[0]
        return
    ended = train_on_ranks(sys.argv, cards, max_restarts=max_restarts, tell=_show_rank_message)
    if ended.exit_code == EXIT_OK:
        raise typer.Exit
    show_cursor()  # the first rank may have been killed
    if ended.message and ended.run is not None and has_saved(RunFolder(ended.run)):
        command = command_to_resume(sys.argv, ended.run)
        show(make_console(error=True), f"resume with: {command}")
    raise typer.Exit(ended.exit_code)


def _show_rank_message(text: str) -> None:
    """The first rank may have a bar on this line."""
    if os.isatty(2):
        with suppress(OSError):
            os.write(2, b"\r\x1b[K")
    show_problems(text)


def _train_each(
    context: typer.Context, files: list[Path], gpus: str | None, *, device: str, as_json: bool
) -> None:
    from expert.jobs.launch.cards import choose_cards
    from expert.jobs.launch.each_gpu import train_each
    from expert.planning.machine.machine import describe_machine
    from expert.run.stored.resume_command import with_resume_value

    machine = describe_machine()
    asked = gpus or ("1" if device == "cpu" else "all")
    cards = choose_cards(asked, machine, device=device, env=os.environ)
    console = make_console(error=as_json, needed=False)
    given = with_resume_value(sys.argv[sys.argv.index("train") + 1 :])
    words = _options_of(context, given, without=("--gpus", "--each-gpu", "--json"))
    places = cards.environment_per_card(os.environ)
    runs, code = train_each(files, words, places, tell=lambda text: show(console, text))
    if as_json:
        write_json([asdict(run) for run in runs], needed=False)
    else:
        columns = ("manifest", "ended", "loss", "eval loss", "run")
        rows = []
        for run in runs:
            losses = [run.result.get("loss"), run.result.get("eval_loss")]
            words = ["" if each is None else loss(each) for each in losses]
            rows.append([str(run.manifest), run.text, *words, str(run.result.get("folder", ""))])
        show_sheet(Sheet(columns, [rows]), console)
    if code != EXIT_OK:
        raise typer.Exit(code)


def _options_of(
    context: typer.Context, words: Sequence[str], *, without: Sequence[str]
) -> list[str]:
    """The options among the words of a command, with their values, except `without`."""
    flags = {
        name
        for parameter in context.command.params
        if getattr(parameter, "is_flag", False)
        for name in parameter.opts
    }
    kept, waiting = [], list(words)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("-"):
            continue
        name, joined, _ = word.partition("=")
        value = [] if joined or name in flags or not waiting else [waiting.pop(0)]
        if name not in without:
            kept += [word, *value]
    return kept

"""`expert train` and `expert watch`: start a run, go on with one, follow one."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from expert.cli.manifest_option import manifest_option
from expert.core.errors import EXIT_DOES_NOT_FIT, EXIT_OK, ExpertError
from expert.core.interrupts import Interrupted

if TYPE_CHECKING:
    from rich.console import Console

    from expert.jobs.training import RunResult
    from expert.manifest.reader import ReadManifest
    from expert.planning.run_plan import RunPlan

RESUME = "--resume"
STOPPING = "stopping after this update; once more to stop now"
TRAIN_EPILOG = (
    "Exit codes of a run: 0 finished; 2 command line, manifest or data wrong; 3 the plan does not "
    "fit (with --dry-run); 4 the run could not go on; 75 no room for a checkpoint; 130 stopped "
    "with Ctrl-C and 143 with SIGTERM, after a checkpoint was saved: --resume goes on."
)
# What a corpus is trained with where there is no manifest; everything else is the plan's default.
CHARACTER_EPOCHS = 25
# Keys of a manifest that speak of its own rows and not of those named with --dataset.
_OF_OTHER_ROWS = ("tasks", "type", "format", "validation_path", "test_path")


class Device(StrEnum):
    """Where to compute."""

    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class NotAsked(ExpertError):
    """Flags that leave open what is to be trained, or that contradict each other."""


class TrainCommand(TyperCommand):
    """`--resume` alone means `--resume auto`. Typer has no option whose value may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_resume_value(args))


def with_resume_value(args: list[str]) -> list[str]:
    """The arguments with `auto` behind every --resume that no value follows."""
    filled: list[str] = []
    for place, word in enumerate(args):
        filled.append(word)
        following = args[place + 1] if place + 1 < len(args) else "-"
        if word == RESUME and following.startswith("-"):
            filled.append("auto")
    return filled


def train(
    manifest: Annotated[Path | None, manifest_option("The manifest to train")] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Other rows than the manifest's; without a manifest a text (shakespeare, "
            "python-stdlib or a .txt file) for the built-in character GPT.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where run folders go; runs/ by default.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    device: Annotated[Device | None, typer.Option(help="Where to train.")] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            RESUME,
            metavar="[auto|PATH]",
            help="Go on with the newest run of this expert, or with a run folder or checkpoint.",
        ),
    ] = None,
    allow_changed: Annotated[
        bool,
        typer.Option("--allow-changed", help="Resume although data, model or schedule changed."),
    ] = False,
    remote_code: Annotated[
        bool,
        typer.Option(
            "--allow-remote-code",
            help="Run Python code that comes with the model; needs a revision of 40 digits.",
        ),
    ] = False,
    model: Annotated[str | None, typer.Option(help="Which of the base models.")] = None,
    vram: Annotated[str | None, typer.Option(help='Memory to use at most, as "16GB".')] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show plan and data, write nothing.")
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Override a key of the manifest."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The result as JSON; progress goes to standard error.")
    ] = False,
) -> None:
    """Train an expert from its manifest, or the built-in character GPT on a text."""
    from expert.cli.display import make_console
    from expert.jobs.planning import plan as plan_job

    flags = flag_overrides(dataset=dataset, output=output, epochs=epochs, device=device)
    read = asked_manifest(manifest, dataset, (*flags, *(overrides or ())))
    if vram is not None and read.manifest.training.config.device == "cpu":
        raise NotAsked("--vram: limits the memory of a card, and device is cpu  (leave one out)")
    if resume not in (None, "auto") and not Path(resume or "").exists():
        raise NotAsked(f"{RESUME} {resume}: there is no such folder  (name one under runs/)")
    plan = plan_job(read, model=model, vram=vram, look=dry_run)
    if read.manifest.training.config.device == "cuda" and plan.kernels.device == "cpu":
        raise NotAsked(
            "device: cuda was asked for, and no GPU was found: see expert machine  (use --device "
            "cpu, or auto)"
        )
    console = make_console(error=as_json)
    if dry_run:
        _show_dry_run(read, plan, resume, console, as_json=as_json)
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


def flag_overrides(
    *, dataset: str | None, output: Path | None, epochs: float | None, device: Device | None
) -> list[str]:
    """The flags as overrides of the manifest. Paths are the caller's: relative to this folder."""
    import json

    found = []
    if dataset is not None:
        local = Path(dataset)
        path = str(local.absolute()) if local.exists() else dataset
        found.append(f"training.dataset.path={json.dumps(path)}")
        found += [f"training.dataset.{key}=null" for key in _OF_OTHER_ROWS]
    if output is not None:
        found.append(f"training.config.output_dir={json.dumps(str(output.absolute()))}")
    if epochs is not None:
        found.append(f"training.config.epochs={epochs:g}")
    if device is not None:
        found.append(f"training.config.device={device.value}")
    return found


def asked_manifest(
    manifest: Path | None, dataset: str | None, overrides: tuple[str, ...]
) -> ReadManifest:
    """The manifest named; without one, that of the character GPT on the text that was named."""
    from expert.manifest.document import parse_document
    from expert.manifest.names import CORPORA
    from expert.manifest.reader import read_manifest, understand
    from expert.manifest.schema import CHAR_GPT

    if manifest is not None:
        return read_manifest(manifest, overrides=overrides)
    if dataset is None:
        raise NotAsked(
            "nothing to train is named  (expert train --manifest FILE; or a text for the built-in "
            "character GPT: expert train --dataset shakespeare)"
        )
    if dataset not in CORPORA and Path(dataset).suffix != ".txt":
        raise NotAsked(
            f"--dataset {dataset}: without a manifest the built-in character GPT is trained, on "
            f"{', '.join(CORPORA)} or a .txt file  (name a manifest for other rows: --manifest "
            "FILE)"
        )
    if dataset not in CORPORA and not Path(dataset).is_file():
        raise NotAsked(f"--dataset {dataset}: there is no such file  (check the path)")
    import json

    text = {
        "name": f"char-{Path(dataset).stem}",
        "base_model": {"name": CHAR_GPT},
        "training": {"config": {"adapter_type": "full", "epochs": CHARACTER_EPOCHS}},
    }
    document = parse_document(json.dumps(text), "json", source=f"--dataset {dataset}")
    return understand(document, overrides=overrides)


def _run(
    read: ReadManifest,
    console: Console,
    **options: Any,
) -> RunResult:
    from expert.cli.run_view import PreparingView, RunView, quiet_libraries, say
    from expert.jobs.training import train as train_job

    quiet_libraries()
    with RunView(console, live=True) as view, ExitStack() as before:
        tell = before.enter_context(PreparingView(console))

        def show(event: dict[str, Any]) -> None:
            before.close()  # the data is ready: its display makes room for that of the run
            view(event)

        try:
            return train_job(
                read,
                **options,
                sinks=(show,),
                tell=tell,
                acknowledge=_say_stopping,
                progress=view.progress,
            )
        except Interrupted as end:  # before the run itself listens for it
            before.close()
            left = "no run was begun" if options["resume"] is None else "the run is as it was"
            kept = "what is prepared of the data stays so; the same command goes on from there"
            say(console, f"stopped by {end.by} before the first update: {left}; {kept}")
            end.told = True
            raise


def _say_stopping() -> None:
    """Written past Python's buffers: it is called in the middle of anything, even of writing."""
    start = b"\r\x1b[K" if os.isatty(2) else b""  # a bar may stand there
    with suppress(OSError):
        os.write(2, start + f"{STOPPING}\n".encode())


def _show_warnings(read: ReadManifest, plan: RunPlan, console: Console) -> None:
    from expert.cli.run_view import say

    for notice in read.notices:
        if notice.kind == "warning":
            say(console, f"warning: {notice}", "yellow")
    for remark in plan.remarks:
        if remark.kind == "warning":
            say(console, f"warning: {remark.path}: {remark.text}", "yellow")


def _show_result(result: RunResult, plan: RunPlan, console: Console, *, as_json: bool) -> None:
    import json
    from dataclasses import asdict

    from expert.cli.display import write_line
    from expert.cli.run_view import say
    from expert.manifest.schema import CHAR_GPT

    if as_json:
        write_line(json.dumps(asdict(result), indent=2, default=str))
    elif result.final is not None:
        # A model that was made from scratch gives no answers to judge and has no base beside it.
        judge = f"expert validate --expert {result.folder} --baseline base"
        commands = [] if plan.model.name == CHAR_GPT else [judge]
        commands.append(f'expert sample {result.folder} --prompt "…"')
        commands.append(f"expert export {result.folder} --to FOLDER")
        for number, command in enumerate(commands):
            say(console, f"{'      ' if number else 'next: '}{command}")
    else:
        say(console, f"go on with: {command_to_go_on(sys.argv, result.folder)}")


def command_to_go_on(argv: list[str], folder: Path) -> str:
    """The command that was given, whole, with the run to resume; under make nobody saw it."""
    import shlex
    import shutil

    program, *words = argv
    known = shutil.which(Path(program).name)
    if Path(program).name == "__main__.py":
        program = "python -m expert"
    elif known is not None and Path(known).resolve() == Path(program).resolve():
        program = Path(program).name
    words = with_resume_value(words)
    if RESUME in words:
        place = words.index(RESUME)
        del words[place : place + 2]
    return f"{program} {shlex.join([*words, RESUME, str(folder)])}"


# --- a dry run -----------------------------------------------------------------------------------


def _show_dry_run(
    read: ReadManifest, plan: RunPlan, resume: str | None, console: Console, *, as_json: bool
) -> None:
    from expert.cli.manifest_commands import show_notices
    from expert.cli.plan_view import show_plan

    data = would_prepare(read, plan)
    run = _would_resume(plan, resume)
    if as_json:
        import json

        from expert.cli.display import write_line

        found = {"plan": plan.model_dump(mode="json"), "data": data, "resume": run}
        write_line(json.dumps(found, indent=2))
    else:
        from expert.cli.run_view import say

        show_notices(read, console, brief=True)
        show_plan(plan, console, everything=False)
        say(console, "\ndata that would be read", "bold")
        for entry in data["sources"]:
            say(console, f"  {entry['split']}: {entry['text']}")
        say(console, f"  prepared tokens: {data['cache']}")
        where = f"go on with {run}" if run else f"make a folder in {plan.watch.output_dir}"
        say(console, f"the run would {where}; nothing was written")
    if not plan.fits:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def would_prepare(read: ReadManifest, plan: RunPlan) -> dict[str, Any]:
    """Where the rows of a run would come from and where their tokens go; nothing is read."""
    from expert.cli.words import gib
    from expert.data.sources import Source, resolve_sources

    found = resolve_sources(read.manifest.training.dataset, read.folder)
    named: list[tuple[str, Source | None]] = [
        ("train", found.train),
        ("validation", found.validation),
        ("test", found.test),
    ]
    for task in found.tasks:
        named += [(f"{task.name} train", task.train), (f"{task.name} validation", task.validation)]
        named.append((f"{task.name} test", task.test))
    sources = []
    for split, source in named:
        if source is not None:
            sizes = [path.stat().st_size for path in source.files if path.is_file()]
            size = f", {gib(sum(sizes))}" if sizes else ""
            files = [str(path) for path in source.files]
            text = f"{source.name} ({source.kind}{size})"
            sources.append({"split": split, "text": text, "files": files})
    cache = plan.data.cache or str(read.folder / "datasets_optimized")
    made = len(list(Path(cache).glob("tokens-*"))) if Path(cache).is_dir() else 0
    state = f"{made} sets are there and used where their content fits" if made else "none yet"
    return {"sources": sources, "cache": f"{cache} ({state})"}


def _would_resume(plan: RunPlan, resume: str | None) -> str | None:
    from expert.core.rundir import latest_run

    if resume != "auto":
        return resume
    parent = Path(plan.watch.output_dir)
    run = latest_run(parent, plan.expert)
    if run is None:
        raise NotAsked(
            f"{RESUME}: there is no run of {plan.expert} under {parent}  (start one without "
            f"{RESUME}, or name its folder)"
        )
    return str(run.path)


# --- watching ------------------------------------------------------------------------------------


def watch(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="A run folder; of a folder of runs or an expert's folder, the newest. runs/"
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print how it stands, and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="How it stands as JSON, once.")] = False,
) -> None:
    """Follow a run from its events until it ends; Ctrl-C leaves, the run goes on."""
    from expert.cli.display import make_console, show_sheet, write_line
    from expert.cli.run_view import RunView, say, status_sheet
    from expert.jobs.run_places import find_trained, manifest_of
    from expert.jobs.watching import follow_run, run_status

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
        go_on = f"expert train --manifest {manifest_of(folder)} {RESUME} {folder.path}"
        text = f"{status.because}{last}  (to go on: {go_on})"
        say(console, text, "bold red")

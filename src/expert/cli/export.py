"""`expert export`: the adapter, merged weights or a GGUF file."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expert.cli.show import options
from expert.cli.show.display import Line, Waiting, make_console, show, show_lines, write_json
from expert.core.errors import EXIT_DAMAGED, EXIT_UNAVAILABLE
from expert.core.text import gib

if TYPE_CHECKING:
    from rich.console import Console

    from expert.jobs.export.exported import Exported
    from expert.jobs.export.push import Pushed

EXPORT_EPILOG = (
    "Exit codes: 0 exported, and pushed where asked; 2 refused, such as a failed quality gate or a "
    f"token that may not write; {EXIT_DAMAGED} a file is damaged; {EXIT_UNAVAILABLE} the hub "
    "cannot be reached or is at fault: the same command continues."
)


class Dtype(StrEnum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


Merged = Annotated[bool, typer.Option("--merged", help="Merge the adapter into the base weights.")]
Gguf = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE",
        help="Write a GGUF file for llama.cpp and Ollama: f16, bf16, q8_0, q4_k_m and others.",
    ),
]
GgufAdapter = Annotated[
    bool, typer.Option("--gguf-adapter", help="Write the LoRA adapter alone as GGUF.")
]
JudgedRows = Annotated[
    int, typer.Option(min=0, help="Held-out rows to check a GGUF file with; 0: none.")
]
OfWeights = Annotated[
    Dtype | None, typer.Option(help="Of merged or full weights; default: the run's.")
]
AllowFailed = Annotated[
    bool, typer.Option("--allow-failed", help="Export even if expert validate failed.")
]
PushTo = Annotated[
    str | None,
    typer.Option(
        metavar="USER/NAME",
        help="Upload the export to the Hugging Face Hub, private; without --to, RUN is an "
        "export made before.",
    ),
]


def export(
    run: options.RunFolder = None,
    expert: options.ExpertPlace = None,
    to: Annotated[Path | None, typer.Option(help="The folder to write; it must not exist.")] = None,
    merged: Merged = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the adapter alone.")] = False,
    gguf: Gguf = None,
    gguf_adapter: GgufAdapter = False,
    judged_rows: JudgedRows = 64,
    dtype: OfWeights = None,
    checkpoint: options.Checkpoint = None,
    device: options.ComputeDevice = options.Device.auto,
    allow_failed: AllowFailed = False,
    push: PushTo = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: make it public.")] = False,
    as_json: Annotated[bool, options.json_option("Print what was written as JSON.")] = False,
) -> None:
    """Write the adapter, merged weights or a GGUF file, and check it."""
    from expert.jobs.export.export import export as export_job
    from expert.jobs.export.push import check_push
    from expert.run.stored.locate import find_trained

    flags = {"--merged": merged, "--adapter": adapter, "--gguf": gguf is not None}
    asked = [flag for flag, on in {**flags, "--gguf-adapter": gguf_adapter}.items() if on]
    if len(asked) > 1:
        raise typer.BadParameter(f"{' and '.join(asked)}: choose one kind of export")
    if public and not push:
        raise typer.BadParameter("--public needs --push")
    if to is None and not push:
        raise typer.BadParameter("--to is missing: name the folder to write")
    if to is None and (asked or dtype or checkpoint):
        raise typer.BadParameter("--push without --to uploads an export as it is")
    console = make_console(error=as_json, needed=False)
    found: dict[str, Any] = {}
    if to is not None:
        if push:
            check_push(push)
        run = options.chosen_run(run, expert)
        with Waiting(console) as stage:
            done = export_job(
                find_trained(run, "validated").path,
                to,
                kind="merged" if merged else "adapter" if adapter else None,
                gguf=gguf.lower() if gguf is not None else None,
                gguf_adapter=gguf_adapter,
                judged_rows=judged_rows,
                dtype=dtype.value if dtype else None,
                checkpoint=checkpoint,
                device=device.value,
                allow_failed=allow_failed,
                tell=stage,
            )
        found = {**asdict(done), "warnings": done.warnings()}
        if not as_json:
            show_lines(console, exported_lines(done))
    if push:
        found["pushed"] = asdict(
            _push(console, to or run or expert or Path(), push, public, allow_failed, as_json)
        )
    if as_json:
        write_json(found, needed=False)


def _push(
    console: Console, folder: Path, push: str, public: bool, allow_failed: bool, as_json: bool
) -> Pushed:
    """List the files, upload them to the hub, and show the address."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    from expert.jobs.export.push import push as push_job

    if as_json or not console.is_terminal:  # bars would fill a log
        disable_progress_bars()
    done = push_job(
        folder,
        push,
        public=public,
        allow_failed=allow_failed,
        tell=lambda text: show(console, text),
    )
    if not as_json:
        show(console, f"✓ pushed: {done.url}")
        if done.others:
            others = ", ".join(done.others)
            warning = f"warning: the repository also has files of other exports: {others}"
            show(console, warning, "yellow")
    return done


def exported_lines(done: Exported) -> list[Line]:
    """What was written, how close it is to the trained model, and warnings."""
    what = {"adapter": "the adapter", "merged": "merged weights", "model": "the model"}[done.kind]
    what = f"{done.file}" if done.gguf else what
    dtype = "F32" if done.gguf == "lora" else done.gguf or done.dtype
    judged = f"validated: {done.judged}" if done.judged else "not validated: accuracy unknown"
    allowed = f" (tolerance {done.tolerance:.1%})" if done.tolerance is not None else ""
    compared = (
        f"logits on {done.texts} texts differ from the trained model's by {done.share:.2%} of "
        f"their spread{allowed}, by {done.largest_difference:.3g} at most"
    )
    return [
        (f"✓ wrote {what} ({done.checkpoint}, {dtype}, {gib(done.bytes)}): {done.folder}", ""),
        (f"  {compared}", "dim"),
        *_quality_lines(done),
        (f"  {judged}", "dim"),
        *((f"warning: {warning}", "yellow") for warning in done.warnings()),
    ]


def _quality_lines(done: Exported) -> list[Line]:
    """What quantising costs, as a small table."""
    if done.quality is None or done.quality.unknown:
        return []
    rows = [("", "expert", done.gguf, "change"), *done.quality.table()]
    widths = [max(len(row[place]) for row in rows) for place in range(4)]
    lines = [
        "  ".join(cell.rjust(width) if place else cell.ljust(width) for place, cell, width in cells)
        for cells in ([(place, row[place], widths[place]) for place in range(4)] for row in rows)
    ]
    return [(f"  on {done.quality.on()}:", ""), *((f"    {line.rstrip()}", "") for line in lines)]

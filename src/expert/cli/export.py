"""`expert export`: the adapter, or merged weights."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expert.cli.show.display import Line, make_console, show_lines, write_json
from expert.cli.show.options import (
    Device,
    RunFolder,
    WhereToCompute,
    checkpoint_option,
    json_option,
)
from expert.cli.show.progress import Stages
from expert.core.text import gib

if TYPE_CHECKING:
    from expert.jobs.export.exported import Exported


class Dtype(StrEnum):
    """Of exported weights."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def export(
    run: RunFolder,
    to: Annotated[Path, typer.Option("--to", help="The folder to write; it must not exist.")],
    merged: Annotated[
        bool, typer.Option("--merged", help="Merge the adapter into the base weights.")
    ] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the adapter alone.")] = False,
    gguf: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Write a GGUF file for llama.cpp and Ollama: f16, bf16, q8_0, q4_k_m and others.",
        ),
    ] = None,
    gguf_adapter: Annotated[
        bool, typer.Option("--gguf-adapter", help="Write the LoRA adapter alone as GGUF.")
    ] = False,
    judged_rows: Annotated[
        int, typer.Option(min=0, help="Held-out rows that a GGUF file is judged by; 0: none.")
    ] = 64,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of merged or full weights; default: that of the run.")
    ] = None,
    checkpoint: Annotated[str | None, checkpoint_option("training.packaging_checkpoint")] = None,
    device: WhereToCompute = Device.auto,
    allow_failed: Annotated[
        bool, typer.Option("--allow-failed", help="Export even if expert validate failed.")
    ] = False,
    as_json: Annotated[bool, json_option("Print what was written as JSON.")] = False,
) -> None:
    """Write the adapter, merged weights or a GGUF file with model card, and compare the logits."""
    from expert.jobs.export.export import export as export_job
    from expert.run.stored.locate import find_trained

    flags = {
        "--merged": merged,
        "--adapter": adapter,
        "--gguf": gguf is not None,
        "--gguf-adapter": gguf_adapter,
    }
    asked = [flag for flag, given in flags.items() if given]
    if len(asked) > 1:
        raise typer.BadParameter(f"{' and '.join(asked)}: one export at a time, choose one")
    console = make_console(error=as_json, needed=False)
    with Stages(console) as stage:
        done = export_job(
            find_trained(run).path,
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
    if as_json:
        write_json({**asdict(done), "warnings": done.warnings()}, needed=False)
    else:
        show_lines(console, exported_lines(done))


def exported_lines(done: Exported) -> list[Line]:
    """What was written, how close it is to what was trained, and warnings."""
    what = {"adapter": "the adapter", "merged": "merged weights", "model": "the model"}[done.kind]
    what = f"{done.file}" if done.gguf else what
    dtype = "F32" if done.gguf == "lora" else done.gguf or done.dtype
    judged = f"validated: {done.judged}" if done.judged else "not validated: accuracy unknown"
    compared = (
        f"logits on {done.texts} texts differ from the trained model's by at most "
        f"{done.largest_difference:.3g}, {done.share:.2%} of their spread"
    )
    compared += f" (tolerance {done.tolerance:.1%})" if done.tolerance is not None else ""
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

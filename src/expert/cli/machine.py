"""`expert machine` and `expert clear-cuda-cache`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expert.cli.show.display import Line, Sheet, make_console, show_lines, show_sheet, write_json
from expert.cli.show.options import json_option
from expert.core.text import gib

if TYPE_CHECKING:
    from expert.planning.machine.machine import Fact, Gpu, GpuProcess, Machine

FactRow = tuple[str, str, str]
_NOTHING_FREED = (
    "Nothing was freed. PyTorch's GPU memory cache belongs to the process that filled it, and this "
    "one holds none. The memory of another process is freed when that process ends or calls "
    "torch.cuda.empty_cache() itself; no command can do that from outside."
)


def machine(
    as_json: Annotated[bool, json_option("Print every fact as JSON.")] = False,
    cards: Annotated[bool, typer.Option("--cards", help="List the known cards.")] = False,
    models: Annotated[
        bool, typer.Option("--models", help="List the model types, and which are fast.")
    ] = False,
) -> None:
    """Show GPUs, CPU, memory, disk and versions, each with its source."""
    from expert.planning.machine.cards import CARDS
    from expert.planning.machine.machine import describe_machine, machine_as_dict
    from expert.planning.models.architectures import MODEL_COLUMNS, model_rows

    if models and as_json:
        write_json([dict(zip(MODEL_COLUMNS, row, strict=True)) for row in model_rows()])
    elif models:
        show_sheet(Sheet(MODEL_COLUMNS, [model_rows()]), make_console())
    elif cards and as_json:
        write_json([asdict(card) for card in CARDS])
    elif as_json:
        write_json(machine_as_dict(describe_machine(Path())))
    else:
        sheet = cards_sheet() if cards else machine_sheet(describe_machine(Path()))
        show_sheet(sheet, make_console())


def cards_sheet() -> Sheet:
    """The cards that plans can be made for; a dash for unknown numbers."""
    from expert.planning.machine.cards import CARDS

    numbers = ("bf16_tflops", "fp16_tflops", "tf32_tflops", "fp8_tflops", "bandwidth_gbs")
    rows = [
        (
            card.slug,
            f"{card.memory_gib:.1f}",
            f"{card.capability[0]}.{card.capability[1]}",
            *("–" if (n := getattr(card, key)) is None else f"{n:g}" for key in numbers),
        )
        for card in CARDS
    ]
    columns = ("card", "GiB", "capability", "bf16 TFLOP/s", "fp16", "tf32", "fp8", "GB/s")
    return Sheet(columns, [rows])


def machine_sheet(machine: Machine) -> Sheet:
    """Fact, value and source of everything known about the machine, GPUs first."""
    host = [
        _row("CPU", machine.cpu_model),
        _row("cores available", machine.cores_available),
        _row("cores in the machine", machine.cores_logical),
        _row("memory", machine.ram_total_bytes, gib),
        _row("memory available", machine.ram_available_bytes, gib),
        _row("disk free", machine.disk_free_bytes, gib),
        _row("system", machine.os),
        _row("Python", machine.python),
    ]
    versions = [_row(package, version) for package, version in machine.versions.items()]
    note: list[FactRow] = [("GPU note", machine.gpu_note, "")] if machine.gpu_note else []
    if not machine.gpus:
        note = [("GPU", "none", machine.gpu_note)]
    sections = [*(list(_gpu_rows(gpu)) for gpu in machine.gpus), note, host, versions]
    return Sheet(("fact", "value", "source"), list(filter(None, sections)), dim=("source",))


def _gpu_rows(gpu: Gpu) -> Iterator[FactRow]:
    from expert.planning.machine.nvml import NOT_SPLIT

    label = f"GPU {gpu.index.value}"
    yield _row(label, gpu.name)
    yield _row(f"{label} memory", gpu.memory_total_bytes, gib)
    yield _row(f"{label} memory free", gpu.memory_free_bytes, gib)
    yield _row(f"{label} memory held by", gpu.holders, _holders)
    yield _row(f"{label} busy", gpu.utilisation_percent, "{} %".format)
    yield _row(f"{label} capability", gpu.capability, lambda pair: f"{pair[0]}.{pair[1]}")
    yield _row(f"{label} driver", gpu.driver)
    yield _row(f"{label} CUDA up to", gpu.cuda_driver_version)
    if gpu.mig_slice.source != NOT_SPLIT:  # not worth a line on ordinary cards
        yield _row(f"{label} MIG slice", gpu.mig_slice)
    yield _row(f"{label} UUID", gpu.uuid)


def _row(label: str, fact: Fact[Any], write: Callable[[Any], str] = str) -> FactRow:
    if fact.value is not None:
        return label, write(fact.value), fact.source
    if fact.source.startswith("unknown: "):
        return label, "unknown", fact.source.removeprefix("unknown: ")
    return label, "–", fact.source


def _holders(processes: tuple[GpuProcess, ...]) -> str:
    found = [
        f"{each.name or 'unknown process'} (pid {each.pid}) {_size(each.used_bytes)}"
        for each in processes
    ]
    return "\n".join(found) or "no process"


def _size(amount: int | None) -> str:
    return "unknown amount" if amount is None else gib(amount)


def clear_cuda_cache(
    as_json: Annotated[bool, json_option("Print cards and processes as JSON.")] = False,
) -> None:
    """Show which processes hold GPU memory; only they can free it."""
    from expert.planning.machine.nvml import describe_gpus

    gpus, note = describe_gpus()
    if as_json:
        # A cache belongs to the process that filled it: this one frees nothing.
        write_json({"cards": [asdict(gpu) for gpu in gpus], "note": note, "freed_bytes": 0})
    elif not gpus:
        show_lines(make_console(), [(f"There is no GPU here, and no memory to free: {note}.", "")])
    else:
        lines = [line for gpu in gpus for line in _holder_lines(gpu)]
        lines += [(f"note: {note}", "dim")] if note else []
        held = any(gpu.holders.value for gpu in gpus)
        nothing = "Nothing was freed: no visible process holds GPU memory."
        show_lines(make_console(), [*lines, (_NOTHING_FREED if held else nothing, "")])


def _holder_lines(gpu: Gpu) -> Iterator[Line]:
    total, free = gpu.memory_total_bytes.value, gpu.memory_free_bytes.value
    known = total is not None and free is not None
    used = f": {gib((total or 0) - (free or 0))} of {gib(total or 0)} in use" if known else ""
    yield f"GPU {gpu.index.value} {gpu.name.value or 'unknown card'}{used}", "bold"
    if gpu.holders.value is None:
        yield f"  processes unknown: {gpu.holders.source}", "yellow"
        return
    for each in gpu.holders.value:
        freed = f"ending it would free {_size(each.used_bytes)}"
        own = "this command itself" if each.pid == os.getpid() else freed
        yield f"  pid {each.pid}  {each.name or 'unknown process'}: {own}", ""
    if gpu.unlisted_bytes:
        what = "the driver itself, or processes that are not visible from here"
        yield f"  {gib(gpu.unlisted_bytes)}: {what}", "dim"
    if not gpu.holders.value:
        yield "  no process uses its memory", ""

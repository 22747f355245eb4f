"""`expert machine` and `expert clear-cuda-cache`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expert.cli.show.display import Line, Sheet, make_console, show_lines, show_sheet, write_json
from expert.cli.show.options import json_option
from expert.core.text import gib

if TYPE_CHECKING:
    from expert.jobs.gpu_memory import CardMemory, GpuMemory
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
) -> None:
    """Show GPUs, CPU, memory, disk and versions, each with its source."""
    from expert.planning.machine.cards import CARDS
    from expert.planning.machine.machine import describe_machine, machine_as_dict

    if cards and as_json:
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
    from expert.jobs.gpu_memory import gpu_memory

    found = gpu_memory()
    if as_json:
        cards = [{**asdict(c), "could_be_freed_bytes": c.could_be_freed_bytes} for c in found.cards]
        write_json({**asdict(found), "cards": cards})
    else:
        show_lines(make_console(), memory_lines(found))


def memory_lines(found: GpuMemory) -> list[Line]:
    """Every card with its processes, then what could be done."""
    if not found.cards:
        return [(f"There is no GPU here, and no GPU memory to free: {found.note}.", "")]
    lines = [line for card in found.cards for line in _card_lines(card)]
    lines += [(f"note: {found.note}", "dim")] if found.note else []
    held = any(card.holders for card in found.cards)
    nothing = "Nothing was freed: no visible process holds GPU memory."
    return [*lines, (_NOTHING_FREED if held else nothing, "")]


def _card_lines(card: CardMemory) -> Iterator[Line]:
    total, free = card.total_bytes, card.free_bytes
    known = total is not None and free is not None
    used = f": {gib((total or 0) - (free or 0))} of {gib(total or 0)} in use" if known else ""
    yield f"GPU {card.index} {card.name or 'unknown card'}{used}", "bold"
    if card.holders is None:
        yield f"  processes unknown: {card.note}", "yellow"
        return
    for each in card.holders:
        by = f"  (user {each.user})" if each.user else ""
        yield f"  pid {each.pid}  {each.name or 'unknown process'}  {_size(each.bytes)}{by}", ""
        if each.command:
            shown = each.command if len(each.command) <= 100 else each.command[:99] + "…"
            yield f"    {shown}", "dim"
        freed = f"ending it would free {_size(each.bytes)}"
        yield f"    {'this command itself' if each.own else freed}", "dim"
    if card.elsewhere_bytes:
        what = "the driver itself, or processes that are not visible from here"
        yield f"  {gib(card.elsewhere_bytes)}: {what}", "dim"
    if not card.holders:
        yield "  no process uses its memory", ""

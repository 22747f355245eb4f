"""The table of `expert machine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from expert.cli.display import Sheet
from expert.cli.words import gib
from expert.planning.machine.machine import Fact, Gpu, GpuProcess, Machine
from expert.planning.machine.nvml import NOT_SPLIT

Row = tuple[str, str, str]


def machine_sheet(machine: Machine) -> Sheet:
    """Fact, value and source of everything known about the machine, the GPUs first."""
    sections = [*map(_gpu_rows, machine.gpus), _note_rows(machine), _host_rows(machine)]
    filled = [list(section) for section in [*sections, _version_rows(machine)]]
    return Sheet(("fact", "value", "source"), [rows for rows in filled if rows], dim=("source",))


def _gpu_rows(gpu: Gpu) -> Iterator[Row]:
    label = f"GPU {gpu.index.value}"
    yield _row(label, gpu.name)
    yield _row(f"{label} memory", gpu.memory_total_bytes, gib)
    yield _row(f"{label} memory free", gpu.memory_free_bytes, gib)
    yield _row(f"{label} memory held by", gpu.holders, _holders)
    yield _row(f"{label} busy", gpu.utilisation_percent, lambda percent: f"{percent} %")
    yield _row(f"{label} capability", gpu.capability, lambda pair: f"{pair[0]}.{pair[1]}")
    yield _row(f"{label} driver", gpu.driver)
    yield _row(f"{label} CUDA up to", gpu.cuda_driver_version)
    yield _row(f"{label} power limit", gpu.power_limit_watts, lambda watts: f"{watts:.0f} W")
    yield _row(f"{label} PCIe generation", gpu.pcie_generation)
    yield _row(f"{label} PCIe width", gpu.pcie_width, lambda lanes: f"x{lanes}")
    if gpu.mig_slice.source != NOT_SPLIT:  # not worth a line on every ordinary card
        yield _row(f"{label} MIG slice", gpu.mig_slice)
    yield _row(f"{label} UUID", gpu.uuid)


def _note_rows(machine: Machine) -> Iterator[Row]:
    if not machine.gpus:
        yield "GPU", "none", machine.gpu_note
    elif machine.gpu_note:
        yield "GPU note", machine.gpu_note, ""


def _host_rows(machine: Machine) -> Iterator[Row]:
    yield _row("CPU", machine.cpu_model)
    yield _row("cores available", machine.cores_available)
    yield _row("cores in the machine", machine.cores_logical)
    yield _row("memory", machine.ram_total_bytes, gib)
    yield _row("memory available", machine.ram_available_bytes, gib)
    yield _row("disk free", machine.disk_free_bytes, gib)
    yield _row("system", machine.os)
    yield _row("Python", machine.python)


def _version_rows(machine: Machine) -> Iterator[Row]:
    for package, version in machine.versions.items():
        yield _row(package, version)


def _row(label: str, fact: Fact[Any], show: Callable[[Any], str] = str) -> Row:
    if fact.value is not None:
        return label, show(fact.value), fact.source
    if fact.source.startswith("unknown: "):
        return label, "unknown", fact.source.removeprefix("unknown: ")
    return label, "–", fact.source


def _holders(processes: tuple[GpuProcess, ...]) -> str:
    return "\n".join(map(_holder, processes)) or "nobody"


def _holder(process: GpuProcess) -> str:
    used = "unknown amount" if process.used_bytes is None else gib(process.used_bytes)
    return f"{process.name or 'unknown process'} (pid {process.pid}) {used}"

"""The machine a plan is made for: every fact with its source, or the reason it is unknown.

Nothing here imports torch; cards are queried through NVML.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from expert.planning.machine import host
from expert.planning.machine.host import Fact, unknown
from expert.planning.machine.nvml import Gpu, GpuProcess, describe_gpus

__all__ = ["Fact", "Gpu", "GpuProcess", "Machine", "describe_machine", "machine_as_dict", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What this process may use, which may be less than the hardware has."""

    gpus: tuple[Gpu, ...]
    """The cards visible to CUDA, in its order."""
    gpu_note: str
    """Why there are no cards or fewer than expected; else ""."""
    cpu_model: Fact[str]
    cores_available: Fact[int]
    cores_logical: Fact[int]
    ram_total_bytes: Fact[int]
    ram_available_bytes: Fact[int]
    disk_free_bytes: Fact[int]
    os: Fact[str]
    python: Fact[str]
    versions: Mapping[str, Fact[str]]


def describe_machine(
    folder: Path = Path("."),
    *,
    nvml: ModuleType | None = None,
    environ: Mapping[str, str] | None = None,
) -> Machine:
    """The machine as seen from this process; `folder` is where disk space is needed.

    `nvml` and `environ` default to the real ones.
    """
    import platform

    roots = Path("/")
    gpus, gpu_note = visible_gpus(nvml, os.environ if environ is None else environ)
    ram_total, ram_available = host.ram(roots)
    return Machine(
        gpus=gpus,
        gpu_note=gpu_note,
        cpu_model=host.cpu_model(roots),
        cores_available=host.cores_available(roots),
        cores_logical=host.cores_logical(),
        ram_total_bytes=ram_total,
        ram_available_bytes=ram_available,
        disk_free_bytes=host.disk_free(folder),
        os=Fact(platform.platform(), "platform"),
        python=Fact(platform.python_version(), "platform"),
        versions={name: host.package_version(name) for name in host.PACKAGES},
    )


def visible_gpus(
    nvml: ModuleType | None, environ: Mapping[str, str]
) -> tuple[tuple[Gpu, ...], str]:
    """The cards CUDA shows this process, in its order, and notes about them."""
    found, note = describe_gpus(nvml)
    shown = _left_visible(found, environ.get("CUDA_VISIBLE_DEVICES"))
    asked, cards = environ.get("CUDA_VISIBLE_DEVICES"), len({gpu.index.value for gpu in found})
    notes = [note]
    if asked is not None and not shown and cards:
        notes.append(f"CUDA_VISIBLE_DEVICES={asked!r} hides every GPU ({cards} found): unset it")
    elif asked is not None and len(shown) != cards:
        notes.append(f"CUDA_VISIBLE_DEVICES={asked!r} shows {len(shown)} of {cards} GPUs")
    notes += [
        f"MIG splits GPU {gpu.index.value}: a program uses one slice of it"
        for gpu in shown
        if gpu.mig_slice.value
    ]
    # CUDA puts the fastest card first, NVML goes by slot: numbers may differ on mixed machines
    if len({gpu.name.value for gpu in shown}) > 1 and "CUDA_DEVICE_ORDER" not in environ:
        notes.append("the cards differ: CUDA_DEVICE_ORDER=PCI_BUS_ID makes CUDA number them alike")
    return shown, "; ".join(filter(None, notes))


def _left_visible(gpus: tuple[Gpu, ...], asked: str | None) -> tuple[Gpu, ...]:
    """The cards left by CUDA_VISIBLE_DEVICES: numbers, or prefixes of card or slice UUIDs."""
    if asked is not None and asked.strip().startswith("MIG-"):
        wanted = asked.split(",")[0].strip()  # CUDA uses one slice at most
        return tuple(g for g in gpus if (g.mig_slice.value or "").startswith(wanted))[:1]
    cards: dict[int | None, Gpu] = {}
    for gpu in gpus:
        cards.setdefault(gpu.index.value, gpu)  # CUDA takes the first slice of a split card
    if asked is None:
        return tuple(cards.values())
    shown: list[Gpu] = []
    for entry in map(str.strip, asked.split(",")):
        digits = re.match(r"[0-9]+", entry)  # which an entry begins with, as CUDA reads it
        index, uuid = int(digits[0]) if digits else -1, entry if entry[:4] == "GPU-" else "?"
        matches = [
            gpu
            for gpu in cards.values()
            if gpu.index.value == index or (gpu.uuid.value or "").startswith(uuid)
        ]
        # As in CUDA: an entry that matches no single card ends the list, a repeat empties it
        if len(matches) != 1:
            break
        if matches[0] in shown:
            return ()
        shown += matches
    return tuple(shown)


def machine_as_dict(machine: Machine) -> dict[str, Any]:
    """The machine as JSON-ready data: every fact is {"value": ..., "source": ...}."""
    data: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(machine)))
    return data

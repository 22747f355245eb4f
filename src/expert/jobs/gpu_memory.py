"""The job behind `expert clear-cuda-cache`: which processes use GPU memory and could free it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import ModuleType

from expert.planning.machine.nvml import Gpu, describe_gpus


@dataclass(frozen=True, kw_only=True)
class Holding:
    """A process that uses GPU memory; None where something is unknown."""

    pid: int
    name: str | None
    command: str | None
    user: str | None
    bytes: int | None
    own: bool
    """It is this process."""


@dataclass(frozen=True, kw_only=True)
class CardMemory:
    """The memory of one card, and its users."""

    index: int | None
    name: str | None
    total_bytes: int | None
    free_bytes: int | None
    holders: tuple[Holding, ...] | None
    """None if the driver does not report it, with the reason in `note`."""
    note: str
    elsewhere_bytes: int | None
    """In use, but by no listed process: the driver itself, or other containers."""

    @property
    def could_be_freed_bytes(self) -> int:
        """What is freed when every listed process ends."""
        return sum(holding.bytes or 0 for holding in self.holders or ())


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """All cards; `note` says why there are none, or fewer than expected."""

    cards: tuple[CardMemory, ...]
    note: str
    freed_bytes: int = 0
    """What this command freed: always nothing, as a cache belongs to the process that filled it."""


def gpu_memory(nvml: ModuleType | None = None) -> GpuMemory:
    """Which processes use memory of which card right now, as the driver reports it."""
    gpus, note = describe_gpus(nvml)
    return GpuMemory(cards=tuple(map(_card, gpus)), note=note)


def _card(gpu: Gpu) -> CardMemory:
    total, free = gpu.memory_total_bytes.value, gpu.memory_free_bytes.value
    found = gpu.holders.value
    holders = None
    if found is not None:
        holders = tuple(_holding(each.pid, each.name, each.used_bytes) for each in found)
    elsewhere = None
    if total is not None and free is not None and holders is not None:
        amounts = [holding.bytes for holding in holders]
        if None not in amounts:
            elsewhere = max(0, total - free - sum(amount or 0 for amount in amounts))
    return CardMemory(
        index=gpu.index.value,
        name=gpu.name.value,
        total_bytes=total,
        free_bytes=free,
        holders=holders,
        note="" if holders is not None else gpu.holders.source,
        elsewhere_bytes=elsewhere,
    )


def _holding(pid: int, name: str | None, used: int | None) -> Holding:
    import psutil

    command = user = None
    try:
        process = psutil.Process(pid)
        command, user = " ".join(process.cmdline()) or None, process.username()
    except (psutil.Error, KeyError):  # it ended, or belongs to another user or container
        pass
    own = pid == os.getpid()
    return Holding(pid=pid, name=name, command=command, user=user, bytes=used, own=own)

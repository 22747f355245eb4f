"""What NVML, the NVIDIA driver's library, reports about the cards, without torch.

NVML is passed in as a module, so that a test can substitute one. Any single call may fail on some
card (laptops, containers, WSL, unified memory, MIG): that fact is then unknown, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from expert.planning.machine.host import Fact, process_name, unknown

T = TypeVar("T")

# nvmlReturn_t values, part of NVML's stable binary interface.
NOT_SUPPORTED = 3
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
LIB_RM_VERSION_MISMATCH = 18

_WHY_NO_NVML = {
    LIBRARY_NOT_FOUND: (
        "the NVIDIA driver is not installed (libnvidia-ml.so.1 not found): install it, "
        "or start the container with its GPUs (docker run --gpus all)"
    ),
    DRIVER_NOT_LOADED: (
        "the NVIDIA driver is installed but not loaded: "
        "load it (sudo modprobe nvidia) or restart the machine"
    ),
    NO_PERMISSION: (
        "this user may not talk to the NVIDIA driver: "
        "grant read and write access to /dev/nvidia*, or ask the machine's administrator"
    ),
    LIB_RM_VERSION_MISMATCH: (
        "the NVIDIA driver was updated while the old one is still running: restart the machine"
    ),
    FUNCTION_NOT_FOUND: "the NVIDIA driver is too old: update it",
}
NOT_SPLIT = "not split by MIG"
_NO_SLICE = "MIG splits the card but it has no slice yet: make one (nvidia-smi mig)"


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds GPU memory; None for what the driver does not report."""

    pid: int
    name: str | None
    used_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One card, or one MIG slice of it: memory and holders are then the slice's."""

    index: Fact[int]
    """NVML's number, as in nvidia-smi; CUDA's may differ."""
    name: Fact[str]
    uuid: Fact[str]
    mig_slice: Fact[str]
    """UUID of the MIG slice; None on an ordinary card."""
    memory_total_bytes: Fact[int]
    memory_free_bytes: Fact[int]
    holders: Fact[tuple[GpuProcess, ...]]
    utilisation_percent: Fact[int]
    capability: Fact[tuple[int, int]]
    driver: Fact[str]
    cuda_driver_version: Fact[str]
    """The newest CUDA version the driver supports, such as "12.8"."""

    @property
    def unlisted_bytes(self) -> int | None:
        """Memory in use, but by no listed process: the driver's, or that of other containers."""
        total, free = self.memory_total_bytes.value, self.memory_free_bytes.value
        amounts = [each.used_bytes for each in self.holders.value or ()]
        if total is None or free is None or None in amounts:
            return None
        return max(0, total - free - sum(amount or 0 for amount in amounts))


def describe_gpus(nvml: ModuleType | None = None) -> tuple[tuple[Gpu, ...], str]:
    """Every card of the machine in NVML's order, and why some or all are missing."""
    if nvml is None:
        try:
            import pynvml
        except ImportError:
            return (), "the Python package nvidia-ml-py is missing: pip install nvidia-ml-py"
        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml_errors(nvml) as error:
        return (), _WHY_NO_NVML.get(_code(error), f"NVML did not start: {error}")
    try:
        count = _ask(nvml, lambda: int(nvml.nvmlDeviceGetCount()))
        if count.value is None:
            return (), f"the number of GPUs is {count.source}"
        if count.value == 0:
            return (), "the NVIDIA driver is loaded but finds no GPU"
        gpus: list[Gpu] = []
        notes = []
        for index in range(count.value):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
            except nvml_errors(nvml) as error:
                fix = "a card that the driver has lost needs a restart of the machine"
                notes.append(f"GPU {index} cannot be opened: NVML: {error}  ({fix})")
                continue
            parts = _mig_parts(nvml, handle)
            gpus += [_read_gpu(nvml, index, handle, part, name) for part, name in parts]
        return tuple(gpus), "; ".join(notes)
    finally:
        with suppress(*nvml_errors(nvml)):  # the facts are read; a failing shutdown is harmless
            nvml.nvmlShutdown()


# --- one card ------------------------------------------------------------------------------------


def _mig_parts(nvml: ModuleType, card: Any) -> list[tuple[Any, Fact[str]]]:
    """(handle, slice UUID) of the usable parts of a card: its MIG slices, or the whole card."""
    try:
        split = nvml.nvmlDeviceGetMigMode(card)[0]
    except nvml_errors(nvml) as error:
        if _code(error) in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
            return [(card, Fact(None, NOT_SPLIT))]
        return [(card, unknown(f"NVML: {error}"))]
    if not split:
        return [(card, Fact(None, NOT_SPLIT))]
    places = _ask(nvml, lambda: int(nvml.nvmlDeviceGetMaxMigDeviceCount(card))).value or 0
    parts: list[tuple[Any, Fact[str]]] = []
    for place in range(places):
        with suppress(*nvml_errors(nvml)):  # an empty place reports "not found"
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, place)
            parts.append((part, Fact(str(nvml.nvmlDeviceGetUUID(part)), "NVML")))
    return parts or [(None, unknown(_NO_SLICE))]


def _read_gpu(nvml: ModuleType, index: int, card: Any, part: Any, mig_slice: Fact[str]) -> Gpu:
    """The facts of one card; `part` is the handle for memory queries, None if there is none."""

    def ask(read: Callable[[], Any], source: str = "NVML") -> Fact[Any]:
        return _ask(nvml, read, source)

    total: Fact[int] = unknown(_NO_SLICE)
    free: Fact[int] = unknown(_NO_SLICE)
    holders: Fact[tuple[GpuProcess, ...]] = unknown(_NO_SLICE)
    if part is not None:
        source = "NVML, of one MIG slice" if mig_slice.value else "NVML"
        total = ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(part).total), source)
        free = ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(part).free), source)
        holders = _holders(nvml, part)
    return Gpu(
        index=Fact(index, "NVML"),
        name=ask(lambda: str(nvml.nvmlDeviceGetName(card))),
        uuid=ask(lambda: str(nvml.nvmlDeviceGetUUID(card))),
        mig_slice=mig_slice,
        memory_total_bytes=total,
        memory_free_bytes=free,
        holders=holders,
        utilisation_percent=ask(lambda: int(nvml.nvmlDeviceGetUtilizationRates(card).gpu)),
        capability=ask(lambda: tuple(map(int, nvml.nvmlDeviceGetCudaComputeCapability(card)))),
        driver=ask(lambda: str(nvml.nvmlSystemGetDriverVersion())),
        # 12080 means 12.8
        cuda_driver_version=ask(
            lambda: "{}.{}".format(*divmod(nvml.nvmlSystemGetCudaDriverVersion() // 10, 100))
        ),
    )


def _holders(nvml: ModuleType, handle: Any) -> Fact[tuple[GpuProcess, ...]]:
    """Compute and graphics processes that hold memory, largest first."""
    lists = {
        "compute": _ask(nvml, lambda: list(nvml.nvmlDeviceGetComputeRunningProcesses(handle))),
        "graphics": _ask(nvml, lambda: list(nvml.nvmlDeviceGetGraphicsRunningProcesses(handle))),
    }
    if all(fact.value is None for fact in lists.values()):
        return Fact(None, lists["compute"].source)
    used: dict[int, int | None] = {}
    for fact in lists.values():
        for process in fact.value or ():
            # a process in both lists is reported with the same memory twice, not with a part each
            known = [b for b in (used.get(process.pid), process.usedGpuMemory) if b is not None]
            used[process.pid] = max(known) if known else None
    missing = [f"{kind} processes {f.source}" for kind, f in lists.items() if f.value is None]
    holders = [
        GpuProcess(pid, process_name(pid), used_bytes)
        for pid, used_bytes in sorted(used.items(), key=lambda item: (-(item[1] or 0), item[0]))
        if used_bytes != 0
    ]
    return Fact(tuple(holders), "; ".join(["NVML", *missing]))


# --- asking --------------------------------------------------------------------------------------


def _ask(nvml: ModuleType, read: Callable[[], T], source: str = "NVML") -> Fact[T]:
    try:
        return Fact(read(), source)
    except nvml_errors(nvml) as error:
        return unknown(f"NVML: {error}")


def nvml_errors(nvml: ModuleType) -> tuple[type[Exception], ...]:
    """The exceptions of NVML; pynvml has a separate class for an outdated driver library."""
    mismatch = getattr(nvml, "NVMLLibraryMismatchError", None)
    return (nvml.NVMLError, mismatch) if mismatch else (nvml.NVMLError,)


def _code(error: Exception) -> int:
    return int(getattr(error, "value", FUNCTION_NOT_FOUND))

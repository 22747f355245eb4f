"""What this process may use of the computer besides GPUs: cores, memory, disk, packages.

Containers and batch schedulers often grant less than the computer has, and show that only in the
control groups; `roots` is the folder in which /proc and /sys are looked up.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Generic, Never, TypeVar

T_co = TypeVar("T_co", covariant=True)

PACKAGES = (
    *("torch", "transformers", "peft", "datasets", "pyarrow", "tokenizers", "bitsandbytes"),
    *("liger-kernel", "flash-attn", "flash-attn-4", "triton", "torchao", "accelerate"),
)
# (limit, usage, file cache it can drop) of memory in a control group, by cgroup version.
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""With which a user sets the number of CPU threads, which is respected."""


@dataclass(frozen=True)
class Fact(Generic[T_co]):
    """A value and its source; for None the source is the reason it is unknown."""

    value: T_co | None
    source: str


def unknown(reason: str) -> Fact[Never]:
    """A fact that is not available, and why."""
    return Fact(None, f"unknown: {reason}")


def cpu_model(roots: Path) -> Fact[str]:
    """The processor's name, or the architecture if no name is recorded."""
    import platform

    for line in _read(roots / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() == "model name" and value.strip():
            return Fact(value.strip(), "/proc/cpuinfo")
    processor = platform.processor() or platform.machine()
    return Fact(processor, "platform") if processor else unknown("the system does not name it")


def cores_logical() -> Fact[int]:
    """Hardware threads of the whole computer, including those this process may not use."""
    import psutil

    count = psutil.cpu_count(logical=True)
    return Fact(count, "psutil") if count else unknown("psutil cannot count the cores")


def cores_available(roots: Path) -> Fact[int]:
    """Hardware threads this process may use: the smaller of affinity and CPU quota."""
    allowed = len(os.sched_getaffinity(0))
    quotas = []
    for version, folder in _control_groups(roots, "cpu"):
        name, period = "cpu.max", ""
        if version == 2:
            quota, _, period = _read(folder / name).partition(" ")
        else:
            name = "cpu.cfs_quota_us"
            quota, period = _read(folder / name), _read(folder / "cpu.cfs_period_us")
        # "max" and -1 both mean no limit
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            where = f"cgroup v{version} {name} of {_shown(folder, roots)}"
            quotas.append((int(quota) / int(period), where))
    cores, source = min(quotas, default=(math.inf, ""))
    if allowed <= max(1, cores):
        return Fact(allowed, "sched_getaffinity")
    return Fact(max(1, math.floor(cores)), f"{source} ({cores:g} cores)")


def ram(roots: Path) -> tuple[Fact[int], Fact[int]]:
    """(total, available) memory in bytes, of the computer or the tightest control group."""
    import psutil

    try:
        memory = psutil.virtual_memory()
    except (OSError, RuntimeError) as error:
        return unknown(f"psutil: {error}"), unknown(f"psutil: {error}")
    total, available = Fact(memory.total, "psutil"), Fact(memory.available, "psutil")
    for version, folder in _control_groups(roots, "memory"):
        limit_name, usage_name, cache_name = _MEMORY_FILES[version]
        limit, usage = _read(folder / limit_name), _read(folder / usage_name)
        # a limit at or above the installed memory, such as v1's 2**63 - 4096, limits nothing
        if not limit.isdecimal() or int(limit) >= memory.total:
            continue
        group = f"cgroup v{version} {limit_name} of {_shown(folder, roots)}"
        if int(limit) < (total.value or 0):
            total = Fact(int(limit), group)
        if not usage.isdecimal():
            available = unknown(f"{group} is a limit, but its usage cannot be read")
            continue
        stats = (line.partition(" ") for line in _read(folder / "memory.stat").splitlines())
        dropped = next((int(n) for key, _, n in stats if key == cache_name and n.isdecimal()), 0)
        left = max(0, int(limit) - max(0, int(usage) - dropped))
        if available.value is not None and left < available.value:
            how = f"{group} less its usage (file cache it can drop not counted)"
            available = Fact(left, how)
    return total, available


def disk_free(folder: Path) -> Fact[int]:
    """Bytes free for this user where `folder` is, or would be created."""
    import shutil

    try:
        wanted = folder.absolute()
        for place in (wanted, *wanted.parents):
            if place.is_dir():
                return Fact(shutil.disk_usage(place).free, f"disk usage of {place}")
    except OSError as error:
        return unknown(f"{folder}: {error.strerror or error}")
    return unknown(f"neither {folder} nor a folder above it exists")


def _control_groups(roots: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """(cgroup version, folder) of each group around this process, innermost first.

    A container may see its host's path in /proc/self/cgroup while only its own part is mounted;
    missing folders are skipped, and the mount itself then has the limits.
    """
    mount = roots / "sys/fs/cgroup"
    for line in _read(roots / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version, top = 2, mount
        if number != "0" or controllers:
            if controller not in controllers.split(","):
                continue
            joined = mount / controllers  # "cpu,cpuacct", to which "cpu" is a link on some systems
            version, top = 1, joined if joined.is_dir() else mount / controller
        names = [name for name in path.strip().split("/") if name]
        if ".." in names:  # the process was moved in from outside; only the mount is visible
            names = []
        for count in range(len(names), -1, -1):
            folder = top.joinpath(*names[:count])
            if folder.is_dir():
                yield version, folder


def _shown(folder: Path, roots: Path) -> str:
    return "/" + folder.relative_to(roots).as_posix()


def _read(path: Path) -> str:
    """A small file's text, "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


@cache
def package_version(name: str) -> Fact[str]:
    """An installed package's version, without importing it; cached, as each takes 2 ms."""
    from importlib import metadata

    try:
        return Fact(metadata.version(name), "importlib.metadata")
    except (metadata.PackageNotFoundError, KeyError):  # KeyError: its files do not record it
        return Fact(None, "not installed")


def linear_kernels_lacking(capability: tuple[int, int] | None) -> str:
    """What is missing for the kernels of linear attention, or ""."""
    if not any(package_version(name).value for name in ("fla-core", "flash-linear-attention")):
        return "the package flash-linear-attention is used if it is installed"
    version = package_version("triton").value or "0"
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if capability == (9, 0) and (3, 4, 0) <= numbers < (3, 7, 1):
        return f"flash-linear-attention needs Triton 3.7.1 on Hopper cards, not {version}"
    return ""


def process_name(pid: int) -> str | None:
    """A running process's short name, None if it is gone or not accessible."""
    import psutil

    try:
        return psutil.Process(pid).name() or None
    except (psutil.Error, OSError, ValueError, OverflowError):
        return None

"""What this process may use of the computer besides GPUs: cores, memory, disk, packages.

Containers and batch schedulers often grant less than the computer has, and show that only in the
control groups; `roots` is the folder in which /proc and /sys are looked up.
"""

from __future__ import annotations

import math
import os
import sys
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
NOT_INSTALLED = "not installed"


@dataclass(frozen=True)
class Fact(Generic[T_co]):
    """A value and its source; for None the source is the reason it is unknown."""

    value: T_co | None
    source: str


def unknown(reason: str) -> Fact[Never]:
    """A fact that is not available, and why."""
    return Fact(None, f"unknown: {reason}")


# --- processor -----------------------------------------------------------------------------------


def cpu_model(roots: Path) -> Fact[str]:
    """The processor's name, or the architecture if no name is recorded."""
    for line in _lines(roots / "proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "model name" and value.strip():
            return Fact(value.strip(), "/proc/cpuinfo")
    named = _cpu_model_elsewhere()
    if named is not None:
        return named
    import platform

    processor = platform.processor() or platform.machine()
    return Fact(processor, "platform") if processor else unknown("the system does not name it")


def _cpu_model_elsewhere() -> Fact[str] | None:
    """The name recorded by macOS (sysctl) or Windows (the registry)."""
    if sys.platform == "darwin":
        import subprocess

        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return Fact(answer.stdout.strip(), "sysctl machdep.cpu.brand_string")
    if sys.platform == "win32":
        import winreg

        path = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
        try:
            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, path) as key:
                name = winreg.QueryValueEx(key, "ProcessorNameString")[0]
        except OSError:
            return None
        return Fact(str(name).strip(), "Windows registry")
    return None


def cores_logical() -> Fact[int]:
    """Hardware threads of the whole computer, including those this process may not use."""
    import psutil

    count = psutil.cpu_count(logical=True)
    return Fact(count, "psutil") if count else unknown("psutil cannot count the cores")


def cores_available(roots: Path) -> Fact[int]:
    """Hardware threads this process may use: the smaller of affinity and CPU quota."""
    allowed = _cores_by_affinity()
    quotas = list(_cpu_quotas(roots))
    if not quotas:
        return allowed
    cores, source = min(quotas)
    granted = max(1, math.floor(cores))
    if allowed.value is not None and allowed.value <= granted:
        return allowed
    return Fact(granted, f"{source} ({cores:g} cores)")


def _cores_by_affinity() -> Fact[int]:
    """Cores the scheduler may use for this process; Windows has another call, macOS none."""
    import psutil

    ask_linux = getattr(os, "sched_getaffinity", None)
    if ask_linux is not None:
        return Fact(len(ask_linux(0)), "sched_getaffinity")
    process = psutil.Process()
    ask_windows = getattr(process, "cpu_affinity", None)
    if ask_windows is not None:
        return Fact(len(ask_windows()), "psutil cpu_affinity")
    logical = cores_logical()
    if logical.value is None:
        return logical
    return Fact(logical.value, "psutil cpu_count (this system has no affinity)")


def _cpu_quotas(roots: Path) -> Iterator[tuple[float, str]]:
    """(cores, source) of every control group that limits this process."""
    for version, folder in control_groups(roots, "cpu"):
        where = _shown(folder, roots)
        if version == 2:
            quota, _, period = _read(folder / "cpu.max").partition(" ")
            source = f"cgroup v2 cpu.max of {where}"
        else:
            quota = _read(folder / "cpu.cfs_quota_us")
            period = _read(folder / "cpu.cfs_period_us")
            source = f"cgroup v1 cpu.cfs_quota_us of {where}"
        # "max" and -1 both mean no limit
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            yield int(quota) / int(period), source


# --- memory and disk -----------------------------------------------------------------------------


def ram(roots: Path) -> tuple[Fact[int], Fact[int]]:
    """(total, available) memory in bytes, of the computer or the tightest control group."""
    import psutil

    try:
        memory = psutil.virtual_memory()
    except (OSError, RuntimeError) as error:
        return unknown(f"psutil: {error}"), unknown(f"psutil: {error}")
    # a limit at or above the installed memory, such as v1's 2**63 - 4096, limits nothing
    limits = [limit for limit in _memory_limits(roots) if limit[0] < memory.total]
    if not limits:
        return Fact(memory.total, "psutil"), Fact(memory.available, "psutil")
    limit, _, group = min(limits, key=lambda entry: entry[0])
    total = Fact(limit, group)
    available, source = memory.available, "psutil"
    for _, headroom, group in limits:
        if headroom is None:
            return total, unknown(f"{group} is a limit, but its usage cannot be read")
        if headroom < available:
            available = headroom
            source = f"{group} less its usage (file cache it can drop not counted)"
    return total, Fact(available, source)


def _memory_limits(roots: Path) -> Iterator[tuple[int, int | None, str]]:
    """(limit, headroom, source) of every control group; no headroom if its usage is unreadable."""
    for version, folder in control_groups(roots, "memory"):
        limit_name, usage_name, cache_name = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        limit, usage = _read(folder / limit_name), _read(folder / usage_name)
        if not limit.isdecimal():  # "max", or the root group, which has no such file
            continue
        headroom = None
        if usage.isdecimal():
            # inactive file pages are dropped on demand, so they do not count as used
            held = max(0, int(usage) - _stat(folder / "memory.stat", cache_name))
            headroom = max(0, int(limit) - held)
        source = f"cgroup v{version} {limit_name} of {_shown(folder, roots)}"
        yield int(limit), headroom, source


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


# --- control groups ------------------------------------------------------------------------------


def control_groups(roots: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """(cgroup version, folder) of each group around this process, innermost first.

    A container may see its host's path in /proc/self/cgroup while only its own part is mounted;
    missing folders are skipped, and the mount itself then has the limits.
    """
    mount = roots / "sys/fs/cgroup"
    for line in _lines(roots / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            yield from ((2, folder) for folder in _upwards(mount, path))
        elif controller in names.split(","):
            joined = mount / names  # "cpu,cpuacct", to which "cpu" is a link on some systems
            top = joined if joined.is_dir() else mount / controller
            yield from ((1, folder) for folder in _upwards(top, path))


def _upwards(top: Path, path: str) -> Iterator[Path]:
    """The existing folders from top/path up to top."""
    names = [name for name in path.strip().split("/") if name]
    if ".." in names:  # the process was moved in from outside; only the mount is visible
        names = []
    for count in range(len(names), -1, -1):
        folder = top.joinpath(*names[:count])
        if folder.is_dir():
            yield folder


def _shown(folder: Path, roots: Path) -> str:
    return "/" + folder.relative_to(roots).as_posix()


def _stat(path: Path, name: str) -> int:
    """One number of a "name number" file, 0 if absent."""
    for line in _lines(path):
        key, _, value = line.partition(" ")
        if key == name and value.isdecimal():
            return int(value)
    return 0


def _read(path: Path) -> str:
    """A small file's text, "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _lines(path: Path) -> list[str]:
    return _read(path).splitlines()


# --- software ------------------------------------------------------------------------------------


@cache
def package_version(name: str) -> Fact[str]:
    """An installed package's version, without importing it; cached, as each takes 2 ms."""
    from importlib import metadata

    try:
        version: str | None = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Fact(None, NOT_INSTALLED)
    except KeyError:  # raised by newer Pythons where older ones return None
        version = None
    if not version:
        return unknown(f"the installed files of {name} do not record it: reinstall {name}")
    return Fact(version, "importlib.metadata")


def process_name(pid: int) -> str | None:
    """A running process's short name, None if it is gone or not accessible."""
    import psutil

    try:
        return psutil.Process(pid).name() or None
    except (psutil.Error, OSError, ValueError, OverflowError):
        return None

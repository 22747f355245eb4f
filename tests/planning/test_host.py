"""Cores, memory, disk and packages available to this process, from made-up /proc and /sys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil

from expert.planning.machine import host
from expert.planning.machine.machine import Fact
from tests.each import each
from tests.planning.fake_nvml import GIB

# --- cores ---------------------------------------------------------------------------------------


def write(root: Path, files: Mapping[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    return root


def v2(quota: str, path: str = "/") -> dict[str, str]:
    return {"proc/self/cgroup": f"0::{path}", "sys/fs/cgroup/cpu.max": quota}


def v1(folder: str) -> dict[str, str]:
    return {
        "proc/self/cgroup": "5:memory:/docker/ab\n4:cpu,cpuacct:/docker/ab\n0::/",
        f"sys/fs/cgroup/{folder}/docker/ab/cpu.cfs_quota_us": "300000",
        f"sys/fs/cgroup/{folder}/docker/ab/cpu.cfs_period_us": "100000",
        f"sys/fs/cgroup/{folder}/cpu.cfs_quota_us": "-1",
        f"sys/fs/cgroup/{folder}/cpu.cfs_period_us": "100000",
    }


TIGHTER_PARENT = {
    "proc/self/cgroup": "0::/batch/job/step",
    "sys/fs/cgroup/batch/cpu.max": "250000 100000",
    "sys/fs/cgroup/batch/job/cpu.max": "max 100000",
    "sys/fs/cgroup/batch/job/step/cpu.max": "800000 100000",
}
OUTSIDE = v2("200000 100000", "/../../other") | {"sys/other/cpu.max": "100000 100000"}
MOUNT, QUOTA = "cgroup v2 cpu.max of /sys/fs/cgroup", "cgroup v1 cpu.cfs_quota_us"


@each(
    ("files", "cores", "source"),
    [
        # A quota rounds down but leaves one core.
        (v2("400000 100000"), 4, f"{MOUNT} (4 cores)"),
        (v2("250000 100000"), 2, f"{MOUNT} (2.5 cores)"),
        (v2("50000 100000"), 1, f"{MOUNT} (0.5 cores)"),
        (TIGHTER_PARENT, 2, f"{MOUNT}/batch (2.5 cores)"),
        (v1("cpu"), 3, f"{QUOTA} of /sys/fs/cgroup/cpu/docker/ab (3 cores)"),
        (v1("cpu,cpuacct"), 3, f"{QUOTA} of /sys/fs/cgroup/cpu,cpuacct/docker/ab (3 cores)"),
        # A path that is not mounted here falls back to the mount.
        (v2("200000 100000", "/kubepods/pod1/box"), 2, f"{MOUNT} (2 cores)"),
        (OUTSIDE, 2, f"{MOUNT} (2 cores)"),
        # Affinity counts where the quota is no tighter.
        *((v2(quota), 16, "sched_getaffinity") for quota in ("max 100000", "3200000 100000", "")),
        (v2("1600000 100000"), 16, "sched_getaffinity"),
    ],
)
def test_the_tightest_of_affinity_and_quotas_gives_the_cores(
    tmp_path, monkeypatch, files, cores, source
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert host.cores_available(write(tmp_path, files)) == Fact(cores, source)


# --- memory --------------------------------------------------------------------------------------


ROOT = {"proc/self/cgroup": "0::/"}
V1 = "sys/fs/cgroup/memory/docker/ab"
NO_LIMIT = "9223372036854771712"
BATCH = {
    "proc/self/cgroup": "0::/batch/job",
    "sys/fs/cgroup/batch/memory.max": str(8 * GIB),
    "sys/fs/cgroup/batch/memory.current": str(7 * GIB),
    "sys/fs/cgroup/batch/memory.stat": f"anon {5 * GIB}\ninactive_file {GIB}",
    "sys/fs/cgroup/batch/job/memory.max": str(6 * GIB),
    "sys/fs/cgroup/batch/job/memory.current": str(GIB),
}
DOCKER = {
    "proc/self/cgroup": "5:memory:/docker/ab\n0::/",
    f"{V1}/memory.limit_in_bytes": str(4 * GIB),
    f"{V1}/memory.usage_in_bytes": str(3 * GIB),
    f"{V1}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT,
}
MAX, USED = "sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"
WITHOUT = "sys/fs/cgroup/memory/memory.limit_in_bytes"


@each(
    ("files", "total", "available", "source"),
    [
        # The tightest group gives the total, the fullest the free memory: 8 - (7 - 1 of cache).
        (BATCH, 6, 2, "cgroup v2 memory.max of /sys/fs/cgroup/batch/job"),
        (DOCKER, 4, 2, f"cgroup v1 memory.limit_in_bytes of /{V1}"),
        # No limit leaves the memory of the machine.
        ({}, 16, 12, "psutil"),
        (ROOT | {MAX: "max"}, 16, 12, "psutil"),
        (ROOT | {MAX: str(64 * GIB)}, 16, 12, "psutil"),
        ({"proc/self/cgroup": "4:memory:/", WITHOUT: NO_LIMIT}, 16, 12, "psutil"),
        # A full machine counts even where the group has room.
        (ROOT | {MAX: str(15 * GIB), USED: str(GIB)}, 15, 12, "memory.max of /sys/fs/cgroup"),
        # A limit whose use cannot be read.
        (ROOT | {MAX: str(8 * GIB)}, 8, None, "memory.max of /sys/fs/cgroup"),
    ],
)
def test_memory_is_that_of_the_machine_or_of_the_tightest_group(
    tmp_path, monkeypatch, files, total, available, source
):
    memory = SimpleNamespace(total=16 * GIB, available=12 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    found, free = host.ram(write(tmp_path, files))
    assert (found.value, free.value) == (total * GIB, available and available * GIB)
    assert found.source.endswith(source)


# --- disk and software ---------------------------------------------------------------------------


def test_a_folder_yet_to_be_made_has_the_space_of_its_nearest_parent(tmp_path, monkeypatch):
    fact = host.disk_free(tmp_path / "runs" / "first")
    assert fact.source == f"disk usage of {tmp_path}"
    assert (fact.value or 0) > 0

    def refuse(place: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shutil.disk_usage", refuse)
    assert host.disk_free(tmp_path) == Fact(None, f"unknown: {tmp_path}: Permission denied")


def test_versions_come_from_metadata_and_absent_packages_say_so():
    assert host.package_version("psutil") == Fact(psutil.__version__, "importlib.metadata")
    assert host.package_version("no-such-package-here") == Fact(None, "not installed")

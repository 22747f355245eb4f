"""Cores, memory, disk and software: as much as this process may use, through made-up trees."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from expert.planning.machine import host
from expert.planning.machine.machine import Fact
from tests.planning.fake_nvml import GIB
from tests.wording import wording

# --- cores ---------------------------------------------------------------------------------------


def write(root: Path, files: Mapping[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    return root


@pytest.fixture
def sixteen_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


@pytest.fixture
def sixteen_gib(monkeypatch):
    memory = SimpleNamespace(total=16 * GIB, available=12 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(
    ("quota", "cores"), [("400000 100000", 4), ("250000 100000", 2), ("50000 100000", 1)]
)
def test_a_cpu_quota_rounds_down_but_leaves_one_core(tmp_path, quota, cores):
    roots = write(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": quota})
    fact = host.cores_available(roots)
    assert fact.value == cores
    assert fact.source.startswith("cgroup v2 cpu.max of /sys/fs/cgroup (")


@pytest.mark.usefixtures("sixteen_cores")
def test_a_tighter_parent_group_limits_the_cores(tmp_path):
    roots = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/batch/job/step",
            "sys/fs/cgroup/batch/cpu.max": "250000 100000",
            "sys/fs/cgroup/batch/job/cpu.max": "max 100000",
            "sys/fs/cgroup/batch/job/step/cpu.max": "800000 100000",
        },
    )
    assert host.cores_available(roots) == Fact(
        2, "cgroup v2 cpu.max of /sys/fs/cgroup/batch (2.5 cores)"
    )


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpu"])
def test_the_quota_of_cgroup_v1_limits_the_cores(tmp_path, folder):
    roots = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/ab\n4:cpu,cpuacct:/docker/ab\n0::/",
            f"sys/fs/cgroup/{folder}/docker/ab/cpu.cfs_quota_us": "300000",
            f"sys/fs/cgroup/{folder}/docker/ab/cpu.cfs_period_us": "100000",
            f"sys/fs/cgroup/{folder}/cpu.cfs_quota_us": "-1",
            f"sys/fs/cgroup/{folder}/cpu.cfs_period_us": "100000",
        },
    )
    assert host.cores_available(roots) == Fact(
        3, f"cgroup v1 cpu.cfs_quota_us of /sys/fs/cgroup/{folder}/docker/ab (3 cores)"
    )


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize("path", ["/kubepods/pod1/box", "/../../other"])
def test_a_path_that_is_not_mounted_here_falls_back_to_the_mount(tmp_path, path):
    roots = write(
        tmp_path,
        {
            "proc/self/cgroup": f"0::{path}",
            "sys/fs/cgroup/cpu.max": "200000 100000",
            "sys/other/cpu.max": "100000 100000",
        },
    )
    assert host.cores_available(roots).value == 2


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize("quota", ["max 100000", "3200000 100000", "1600000 100000", ""])
def test_affinity_counts_where_the_quota_is_no_tighter(tmp_path, quota):
    roots = write(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": quota})
    assert host.cores_available(roots) == Fact(16, "sched_getaffinity")


def test_a_system_without_sched_getaffinity_is_asked_through_psutil(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self: [0, 2, 4], raising=False)
    assert host.cores_available(tmp_path) == Fact(3, "psutil cpu_affinity")


def test_a_system_without_affinity_counts_all_cores_and_says_so(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.delattr(psutil.Process, "cpu_affinity", raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 10)
    fact = host.cores_available(tmp_path)
    assert fact == Fact(10, wording("psutil-system-has-no"))


def test_cores_nobody_can_count_are_unknown(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)
    assert host.cores_logical() == Fact(None, wording("unknown-psutil-cannot-count"))


def test_the_processor_is_named_as_proc_names_it(tmp_path):
    text = "processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor"
    roots = write(tmp_path, {"proc/cpuinfo": text})
    assert host.cpu_model(roots) == Fact("AMD EPYC 9654 96-Core Processor", "/proc/cpuinfo")


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sixteen_gib")
def test_the_tightest_group_gives_the_memory_and_the_fullest_the_room(tmp_path):
    roots = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/batch/job",
            "sys/fs/cgroup/batch/memory.max": str(8 * GIB),
            "sys/fs/cgroup/batch/memory.current": str(7 * GIB),
            "sys/fs/cgroup/batch/memory.stat": f"anon {5 * GIB}\ninactive_file {GIB}",
            "sys/fs/cgroup/batch/job/memory.max": str(6 * GIB),
            "sys/fs/cgroup/batch/job/memory.current": str(GIB),
        },
    )
    total, available = host.ram(roots)
    assert total == Fact(6 * GIB, "cgroup v2 memory.max of /sys/fs/cgroup/batch/job")
    assert available.value == 2 * GIB  # of batch: 8 - (7 - 1 that can be dropped)
    assert available.source == wording("cgroup-less-usage-file")


@pytest.mark.usefixtures("sixteen_gib")
def test_the_memory_limit_of_cgroup_v1_is_kept(tmp_path):
    folder = "sys/fs/cgroup/memory/docker/ab"
    roots = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/ab\n0::/",
            f"{folder}/memory.limit_in_bytes": str(4 * GIB),
            f"{folder}/memory.usage_in_bytes": str(3 * GIB),
            f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    total, available = host.ram(roots)
    assert total == Fact(4 * GIB, "cgroup v1 memory.limit_in_bytes of /" + folder)
    assert available.value == 2 * GIB


@pytest.mark.usefixtures("sixteen_gib")
@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max"},
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": str(64 * GIB)},
        {
            "proc/self/cgroup": "4:memory:/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    ],
)
def test_no_limit_leaves_the_memory_of_the_machine(tmp_path, files):
    total, available = host.ram(write(tmp_path, files))
    assert total == Fact(16 * GIB, "psutil")
    assert available == Fact(12 * GIB, "psutil")


@pytest.mark.usefixtures("sixteen_gib")
def test_a_full_machine_counts_even_where_the_group_has_room(tmp_path):
    files = {
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/memory.max": str(15 * GIB),
        "sys/fs/cgroup/memory.current": str(GIB),
    }
    total, available = host.ram(write(tmp_path, files))
    assert total.value == 15 * GIB
    assert available == Fact(12 * GIB, "psutil")


@pytest.mark.usefixtures("sixteen_gib")
def test_a_limit_with_unreadable_usage_leaves_the_available_memory_unknown(tmp_path):
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": str(8 * GIB)}
    total, available = host.ram(write(tmp_path, files))
    assert total.value == 8 * GIB
    assert available.value is None
    assert available.source.endswith(wording("limit-but-usage-cannot"))


def test_memory_psutil_cannot_read_is_unknown_with_its_words(monkeypatch, tmp_path):
    def refuse() -> None:
        raise PermissionError("/proc is closed")

    monkeypatch.setattr(psutil, "virtual_memory", refuse)
    total, available = host.ram(tmp_path)
    assert total == available == Fact(None, "unknown: psutil: /proc is closed")


# --- disk and software ---------------------------------------------------------------------------


def test_a_folder_yet_to_be_made_has_the_space_of_its_nearest_parent(tmp_path):
    fact = host.disk_free(tmp_path / "runs" / "first")
    assert fact.source == wording("disk-usage-of", folder=tmp_path)
    assert fact.value is not None
    assert fact.value > 0


def test_a_disk_that_cannot_be_asked_is_unknown_with_the_systems_words(monkeypatch, tmp_path):
    def refuse(place: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shutil.disk_usage", refuse)
    assert host.disk_free(tmp_path) == Fact(None, f"unknown: {tmp_path}: Permission denied")


def test_versions_come_from_metadata_and_absent_packages_say_so():
    assert host.package_version("psutil") == Fact(psutil.__version__, "importlib.metadata")
    assert host.package_version("no-such-package-here") == Fact(None, "not installed")


def test_a_package_with_broken_metadata_has_an_unknown_version(monkeypatch, tmp_path):
    write(tmp_path, {"halfgone-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: halfgone"})
    monkeypatch.syspath_prepend(tmp_path)
    fact = host.package_version("halfgone")
    assert fact == Fact(None, wording("unknown-installed-files-halfgone"))

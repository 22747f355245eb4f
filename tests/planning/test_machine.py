"""The machine description: cards through a stand-in for NVML, limits through made-up trees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from expert.planning import host
from expert.planning.machine import (
    Fact,
    GpuProcess,
    Machine,
    describe_machine,
    machine_as_dict,
)

GIB = 2**30
NO_SUCH_PID = 2**22 + 7  # above Linux's largest pid
UUIDS = ("GPU-aaaa1111", "GPU-aabb2222", "GPU-cccc3333")


class FakeNVMLError(Exception):
    """An NVML failure with its code, as pynvml raises it."""

    def __init__(self, code: int, text: str = "some text") -> None:
        super().__init__(text)
        self.value = code


class FakeNvml(ModuleType):
    """NVML of a machine with `cards` equal cards; `broken` maps a function's name to an error."""

    NVMLError = FakeNVMLError

    def __init__(self, cards: int = 1, broken: Mapping[str, int] | None = None) -> None:
        super().__init__("fake_nvml")
        self.cards = cards
        self.broken = dict(broken or {})
        self.names: list[str | bytes] = ["NVIDIA H100 80GB HBM3"] * cards
        self.compute: list[SimpleNamespace] = []
        self.graphics: list[SimpleNamespace] = []
        self.slices: list[str] = []
        self.split = 0
        self.running = 0
        self.answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: self._count_running(1),
            "nvmlShutdown": lambda: self._count_running(-1),
            "nvmlDeviceGetCount": lambda: self.cards,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda handle: self.names[handle],
            "nvmlDeviceGetUUID": self._uuid,
            "nvmlDeviceGetMigMode": lambda handle: [self.split, self.split],
            "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 7,
            "nvmlDeviceGetMigDeviceHandleByIndex": self._slice,
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: self.compute,
            "nvmlDeviceGetGraphicsRunningProcesses": lambda handle: self.graphics,
            "nvmlSystemGetProcessName": lambda pid: b"/usr/lib/xorg/Xorg",
            "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=37, memory=12),
            "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
            "nvmlSystemGetDriverVersion": lambda: b"570.86.10",
            "nvmlSystemGetCudaDriverVersion": lambda: 12080,
            "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 5,
            "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 16,
        }

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            if name in self.broken:
                raise FakeNVMLError(self.broken[name])
            return self.answers[name](*arguments)

        return call

    def _count_running(self, change: int) -> None:
        self.running += change

    def _uuid(self, handle: int | str) -> str:
        return handle if isinstance(handle, str) else UUIDS[handle]

    def _slice(self, handle: int, place: int) -> str:
        if place >= len(self.slices):
            raise FakeNVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.slices[place]

    def _memory(self, handle: int | str) -> SimpleNamespace:
        total = 10 * GIB if isinstance(handle, str) else 80 * GIB
        return SimpleNamespace(total=total, free=total - 3 * GIB, used=3 * GIB)


def process(pid: int, used: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


def describe(nvml: FakeNvml, visible: str | None = None, **environ: str) -> Machine:
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    return describe_machine(nvml=nvml, environ=environ)


# --- cards ---------------------------------------------------------------------------------------


def test_a_card_is_described_with_every_fact_and_its_source():
    nvml = FakeNvml()
    machine = describe(nvml)
    (gpu,) = machine.gpus
    assert machine.gpu_note == ""
    assert gpu.index == Fact(0, "NVML")
    assert gpu.name == Fact("NVIDIA H100 80GB HBM3", "NVML")
    assert gpu.uuid == Fact("GPU-aaaa1111", "NVML")
    assert gpu.mig_slice == Fact(None, "not split by MIG")
    assert gpu.memory_total_bytes == Fact(80 * GIB, "NVML")
    assert gpu.memory_free_bytes == Fact(77 * GIB, "NVML")
    assert gpu.holders == Fact((), "NVML")
    assert gpu.utilisation_percent == Fact(37, "NVML")
    assert gpu.capability == Fact((9, 0), "NVML")
    assert gpu.driver == Fact("570.86.10", "NVML")
    assert gpu.cuda_driver_version == Fact("12.8", "NVML")
    assert gpu.power_limit_watts == Fact(700.0, "NVML enforced limit")
    assert gpu.pcie_generation == Fact(5, "NVML link maximum")
    assert gpu.pcie_width == Fact(16, "NVML at present")
    assert nvml.running == 0


def test_names_that_come_as_bytes_are_read_as_text():
    nvml = FakeNvml()
    nvml.names = [b"NVIDIA GeForce RTX 4090"]
    assert describe(nvml).gpus[0].name.value == "NVIDIA GeForce RTX 4090"


def test_holders_are_compute_and_graphics_processes_once_each_and_the_largest_first():
    nvml = FakeNvml()
    nvml.compute = [process(os.getpid(), 4 * GIB), process(NO_SUCH_PID + 1, 0)]
    nvml.graphics = [process(NO_SUCH_PID, 5 * GIB), process(os.getpid(), 4 * GIB)]
    holders = describe(nvml).gpus[0].holders
    assert holders.value == (
        GpuProcess(NO_SUCH_PID, "Xorg", 5 * GIB),  # psutil does not know it, NVML does
        GpuProcess(os.getpid(), psutil.Process().name(), 4 * GIB),
    )


def test_a_holder_whose_memory_and_name_nobody_tells_is_still_listed():
    nvml = FakeNvml(broken={"nvmlSystemGetProcessName": pynvml.NVML_ERROR_NO_PERMISSION})
    nvml.compute = [process(NO_SUCH_PID, None)]
    assert describe(nvml).gpus[0].holders.value == (GpuProcess(NO_SUCH_PID, None, None),)


def test_one_missing_list_of_processes_is_named_while_the_other_is_kept():
    nvml = FakeNvml(
        broken={"nvmlDeviceGetGraphicsRunningProcesses": pynvml.NVML_ERROR_NOT_SUPPORTED}
    )
    nvml.compute = [process(os.getpid(), GIB)]
    holders = describe(nvml).gpus[0].holders
    assert holders.value is not None
    assert len(holders.value) == 1
    assert holders.source == (
        "NVML; graphics processes unknown: "
        "this card or its driver does not report it (NVML: some text)"
    )


@pytest.mark.parametrize(
    ("function", "fields"),
    [
        ("nvmlDeviceGetName", {"name"}),
        ("nvmlDeviceGetUUID", {"uuid"}),
        ("nvmlDeviceGetMemoryInfo", {"memory_total_bytes", "memory_free_bytes"}),
        ("nvmlDeviceGetUtilizationRates", {"utilisation_percent"}),
        ("nvmlDeviceGetCudaComputeCapability", {"capability"}),
        ("nvmlSystemGetDriverVersion", {"driver"}),
        ("nvmlSystemGetCudaDriverVersion", {"cuda_driver_version"}),
        ("nvmlDeviceGetEnforcedPowerLimit", {"power_limit_watts"}),
        ("nvmlDeviceGetMaxPcieLinkGeneration", {"pcie_generation"}),
        ("nvmlDeviceGetCurrPcieLinkWidth", {"pcie_width"}),
    ],
)
def test_a_call_the_card_does_not_support_makes_only_its_own_facts_unknown(function, fields):
    machine = describe(FakeNvml(broken={function: pynvml.NVML_ERROR_NOT_SUPPORTED}))
    card = machine_as_dict(machine)["gpus"][0]
    lost = {name for name, fact in card.items() if fact["source"].startswith("unknown: ")}
    assert lost == fields
    for name in fields:
        reason = "unknown: this card or its driver does not report it (NVML: some text)"
        assert card[name] == {"value": None, "source": reason}


def test_both_process_lists_missing_leave_the_holders_unknown():
    broken = {
        "nvmlDeviceGetComputeRunningProcesses": pynvml.NVML_ERROR_NO_PERMISSION,
        "nvmlDeviceGetGraphicsRunningProcesses": pynvml.NVML_ERROR_NO_PERMISSION,
    }
    holders = describe(FakeNvml(broken=broken)).gpus[0].holders
    assert holders == Fact(None, "unknown: this user may not read it (NVML: some text)")


def test_pynvmls_own_complaint_about_an_older_driver_is_one_unknown_fact():
    class MismatchError(Exception):
        pass

    def complain(handle: int) -> None:
        raise MismatchError("versions differ")

    nvml = FakeNvml()
    vars(nvml)["NVMLLibraryMismatchError"] = MismatchError
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = complain
    holders = describe(nvml).gpus[0].holders
    assert holders.value == ()
    assert "compute processes unknown: the NVIDIA driver is too old to report it" in holders.source


def test_a_failing_goodbye_does_not_lose_the_facts():
    nvml = FakeNvml(broken={"nvmlShutdown": pynvml.NVML_ERROR_UNINITIALIZED})
    assert len(describe(nvml).gpus) == 1


def test_a_card_that_cannot_be_opened_is_named_and_the_others_are_kept():
    def lost(index: int) -> int:
        if index == 1:
            raise FakeNVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    nvml = FakeNvml(cards=3)
    nvml.answers["nvmlDeviceGetHandleByIndex"] = lost
    machine = describe(nvml)
    assert [gpu.index.value for gpu in machine.gpus] == [0, 2]
    assert machine.gpu_note == (
        "GPU 1 cannot be opened: "
        "the driver has lost the card: restart the machine (NVML: some text)"
    )


# --- no cards ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "the NVIDIA driver is not installed"),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, " not found): install it"),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "docker run --gpus all"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "installed but not loaded: load it (sudo modprobe"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "this user may not talk to the NVIDIA driver: grant"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "was updated while the old one is still"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "restart the machine"),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, "the NVIDIA driver is too old: update it"),
        (pynvml.NVML_ERROR_UNKNOWN, "NVML did not start: some text"),
    ],
)
def test_nvml_that_does_not_start_means_no_cards_and_a_reason_to_act_on(code, words):
    nvml = FakeNvml(broken={"nvmlInit": code})
    machine = describe(nvml)
    assert machine.gpus == ()
    assert words in machine.gpu_note
    assert nvml.running == 0


def test_a_driver_without_a_card_says_so():
    machine = describe(FakeNvml(cards=0))
    assert machine.gpus == ()
    assert machine.gpu_note == "the NVIDIA driver is loaded but finds no GPU"


def test_cards_that_cannot_be_counted_are_unknown_and_nvml_is_closed():
    nvml = FakeNvml(broken={"nvmlDeviceGetCount": pynvml.NVML_ERROR_UNKNOWN})
    machine = describe(nvml)
    assert machine.gpus == ()
    assert machine.gpu_note == "the number of GPUs is unknown: NVML: some text"
    assert nvml.running == 0


def test_nvml_is_closed_even_when_reading_a_card_breaks_down():
    def break_down(handle: int) -> str:
        raise ZeroDivisionError

    nvml = FakeNvml()
    nvml.answers["nvmlDeviceGetName"] = break_down
    with pytest.raises(ZeroDivisionError):
        describe(nvml)
    assert nvml.running == 0


# --- CUDA_VISIBLE_DEVICES ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("0,1,2", [0, 1, 2]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("1gpu", [1]),
        ("1,-1,2", [1]),
        ("0,7,1", [0]),
        ("1,1", []),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("GPU-cccc3333", [2]),
        ("GPU-cc,GPU-aaaa", [2, 0]),
        ("GPU-aa", []),  # two cards begin so
        ("GPU-aaaa,GPU-ffff,GPU-cccc", [0]),
        ("GPU-aaaa,", [0]),
        ("MIG-1111", []),
    ],
)
def test_cuda_visible_devices_chooses_the_cards_and_their_order(visible, indices):
    machine = describe(FakeNvml(cards=3), visible)
    assert [gpu.index.value for gpu in machine.gpus] == indices


@pytest.mark.parametrize(
    ("visible", "note"),
    [
        ("1", "CUDA_VISIBLE_DEVICES='1' shows 1 of 3 GPUs"),
        ("", "CUDA_VISIBLE_DEVICES='' hides every GPU (3 found): unset it"),
        ("-1", "CUDA_VISIBLE_DEVICES='-1' hides every GPU (3 found): unset it"),
        ("2,1,0", ""),
    ],
)
def test_the_note_says_what_cuda_visible_devices_hides(visible, note):
    assert describe(FakeNvml(cards=3), visible).gpu_note == note


def test_a_missing_driver_is_not_blamed_on_cuda_visible_devices():
    nvml = FakeNvml(broken={"nvmlInit": pynvml.NVML_ERROR_DRIVER_NOT_LOADED})
    assert "CUDA_VISIBLE_DEVICES" not in describe(nvml, "0").gpu_note


def test_the_process_environment_is_asked_when_none_is_given(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    machine = describe_machine(nvml=FakeNvml(cards=2))
    assert [gpu.index.value for gpu in machine.gpus] == [1]


def test_cards_that_differ_bring_a_word_about_cudas_order():
    nvml = FakeNvml(cards=2)
    nvml.names = ["NVIDIA T400", "NVIDIA A100"]
    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID" in describe(nvml).gpu_note
    assert describe(nvml, CUDA_DEVICE_ORDER="PCI_BUS_ID").gpu_note == ""


# --- MIG -----------------------------------------------------------------------------------------


def test_a_split_card_shows_the_memory_of_its_first_slice_and_says_so():
    nvml = FakeNvml()
    nvml.split, nvml.slices = 1, ["MIG-1111", "MIG-2222"]
    machine = describe(nvml)
    (gpu,) = machine.gpus
    assert gpu.mig_slice == Fact("MIG-1111", "NVML")
    assert gpu.uuid.value == "GPU-aaaa1111"
    assert gpu.memory_total_bytes == Fact(10 * GIB, "NVML, of one MIG slice")
    assert machine.gpu_note == "MIG splits GPU 0: a program uses one slice of it"


def test_a_slice_is_chosen_by_its_uuid():
    nvml = FakeNvml()
    nvml.split, nvml.slices = 1, ["MIG-1111", "MIG-2222"]
    (gpu,) = describe(nvml, "MIG-22,MIG-11").gpus
    assert gpu.mig_slice.value == "MIG-2222"


def test_a_split_card_without_slices_has_unknown_memory():
    nvml = FakeNvml()
    nvml.split = 1
    (gpu,) = describe(nvml).gpus
    assert gpu.memory_total_bytes.value is None
    assert "it has no slice yet" in gpu.memory_total_bytes.source
    assert gpu.holders.value is None


@pytest.mark.parametrize(
    ("code", "source"),
    [
        (pynvml.NVML_ERROR_NOT_SUPPORTED, "not split by MIG"),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, "not split by MIG"),
        (pynvml.NVML_ERROR_UNKNOWN, "unknown: NVML: some text"),
    ],
)
def test_a_card_that_does_not_know_mig_is_described_whole(code, source):
    (gpu,) = describe(FakeNvml(broken={"nvmlDeviceGetMigMode": code})).gpus
    assert gpu.mig_slice == Fact(None, source)
    assert gpu.memory_total_bytes.value == 80 * GIB


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
    assert fact == Fact(10, "psutil cpu_count (this system has no affinity to ask for)")


def test_cores_nobody_can_count_are_unknown(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)
    assert host.cores_logical() == Fact(None, "unknown: psutil cannot count the cores")


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
    assert available.source == (
        "cgroup v2 memory.max of /sys/fs/cgroup/batch less its usage "
        "(file cache it can drop not counted)"
    )


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
    assert available.source.endswith("is a limit, but its usage cannot be read")


def test_memory_psutil_cannot_read_is_unknown_with_its_words(monkeypatch, tmp_path):
    def refuse() -> None:
        raise PermissionError("/proc is closed")

    monkeypatch.setattr(psutil, "virtual_memory", refuse)
    total, available = host.ram(tmp_path)
    assert total == available == Fact(None, "unknown: psutil: /proc is closed")


# --- disk and software ---------------------------------------------------------------------------


def test_a_folder_yet_to_be_made_has_the_space_of_its_nearest_parent(tmp_path):
    fact = host.disk_free(tmp_path / "runs" / "first")
    assert fact.source == f"disk usage of {tmp_path}"
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
    assert fact == Fact(None, "unknown: the installed files of halfgone do not say: reinstall it")


# --- the whole -----------------------------------------------------------------------------------


def test_the_machine_this_test_runs_on_is_described():
    machine = describe_machine()
    assert machine.cores_available.value is not None
    assert machine.cores_available.value >= 1
    for fact in (machine.ram_total_bytes, machine.ram_available_bytes, machine.disk_free_bytes):
        assert fact.value is not None
        assert fact.value > 0
    assert machine.python.value == ".".join(map(str, sys.version_info[:3]))
    assert set(machine.versions) >= {"torch", "transformers", "liger-kernel", "flash-attn"}
    assert machine.gpus or machine.gpu_note


def test_the_dict_is_json_with_a_value_and_a_source_for_every_fact():
    nvml = FakeNvml()
    nvml.compute = [process(NO_SUCH_PID, GIB)]
    data = machine_as_dict(describe(nvml))
    assert json.loads(json.dumps(data)) == data
    card = data["gpus"][0]
    assert card["capability"] == {"value": [9, 0], "source": "NVML"}
    assert card["holders"] == {
        "value": [{"pid": NO_SUCH_PID, "name": "Xorg", "used_bytes": GIB}],
        "source": "NVML",
    }
    facts = [*card.values(), *data["versions"].values(), data["os"], data["cores_available"]]
    assert all(set(fact) == {"value", "source"} for fact in facts)


def test_importing_the_module_brings_in_nothing_heavy():
    code = (
        "import sys, expert.planning.machine;"
        "print(*{'torch', 'psutil', 'pynvml', 'importlib.metadata'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],  # -S: site's .pth files may import what they like
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.strip() == ""

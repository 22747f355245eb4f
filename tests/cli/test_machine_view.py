"""The table of `expert machine`, read back as text."""

from __future__ import annotations

from dataclasses import replace

from expert.cli.machine import machine_sheet
from expert.planning.machine.machine import Fact, Gpu, GpuProcess, Machine, unknown

GIB = 2**30

GPU = Gpu(
    index=Fact(0, "NVML"),
    name=Fact("NVIDIA H100 80GB HBM3", "NVML"),
    uuid=Fact("GPU-aaaa1111", "NVML"),
    mig_slice=Fact(None, "not split by MIG"),
    memory_total_bytes=Fact(80 * GIB, "NVML"),
    memory_free_bytes=Fact(int(75.75 * GIB), "NVML"),
    holders=Fact((GpuProcess(123, "python", int(4.2 * GIB)), GpuProcess(9, None, None)), "NVML"),
    utilisation_percent=unknown("this card does not report it"),
    capability=Fact((9, 0), "NVML"),
    driver=Fact("570.86.10", "NVML"),
    cuda_driver_version=Fact("12.8", "NVML"),
)

MACHINE = Machine(
    gpus=(GPU,),
    gpu_note="",
    cpu_model=Fact("Some [bold] CPU", "/proc/cpuinfo"),
    cores_available=Fact(2, "cgroup v2 cpu.max"),
    cores_logical=Fact(64, "psutil"),
    ram_total_bytes=Fact(16 * GIB, "psutil"),
    ram_available_bytes=Fact(12 * GIB, "psutil"),
    disk_free_bytes=Fact(100 * GIB, "disk usage of /"),
    os=Fact("Linux", "platform"),
    python=Fact("3.11.7", "platform"),
    versions={"torch": Fact("2.9.1", "importlib.metadata"), "peft": Fact(None, "not installed")},
)


def rows_of(machine: Machine) -> list[tuple[str, ...]]:
    return [tuple(row) for section in machine_sheet(machine).sections for row in section]


def test_the_table_has_a_row_for_every_fact_with_its_source_and_cards_come_first():
    second = replace(GPU, index=Fact(1, "NVML"), mig_slice=Fact("MIG-1111", "NVML"))
    rows = rows_of(replace(MACHINE, gpus=(GPU, second)))
    assert rows[0] == ("GPU 0", "NVIDIA H100 80GB HBM3", "NVML")
    held = "python (pid 123) 4.2 GiB\nunknown process (pid 9) unknown amount"
    assert {
        ("GPU 0 memory free", "75.8 GiB", "NVML"),
        ("GPU 0 memory held by", held, "NVML"),
        ("GPU 0 capability", "9.0", "NVML"),
        ("GPU 0 busy", "unknown", "this card does not report it"),
        ("GPU 1 MIG slice", "MIG-1111", "NVML"),
        ("CPU", "Some [bold] CPU", "/proc/cpuinfo"),
        ("memory available", "12.0 GiB", "psutil"),
        ("torch", "2.9.1", "importlib.metadata"),
        ("peft", "–", "not installed"),
    } <= set(rows)
    assert not any(row[0] in ("GPU 0 MIG slice", "GPU note") for row in rows)
    reason = "the NVIDIA driver is not installed"
    assert rows_of(replace(MACHINE, gpus=(), gpu_note=reason))[0] == ("GPU", "none", reason)

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
    utilisation_percent=Fact(37, "NVML"),
    capability=Fact((9, 0), "NVML"),
    driver=Fact("570.86.10", "NVML"),
    cuda_driver_version=Fact("12.8", "NVML"),
    power_limit_watts=unknown("this card does not report it"),
    pcie_generation=Fact(5, "NVML link maximum"),
    pcie_width=Fact(16, "NVML at present"),
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


def lines_of(machine: Machine) -> list[str]:
    """The table's lines with runs of blanks made one; the heading is left out."""
    rows = [row for section in machine_sheet(machine).sections for row in section]
    lines = [" ".join(" ".join(row).replace("\n", "; ").split()) for row in [("heading",), *rows]]
    return [line for line in lines if line][1:]


def test_the_table_has_a_line_for_every_fact_with_its_source():
    assert machine_sheet(MACHINE).columns == ("fact", "value", "source")
    lines = lines_of(MACHINE)
    assert {
        "GPU 0 memory 80.0 GiB NVML",
        "GPU 0 memory free 75.8 GiB NVML",
        (
            "GPU 0 memory held by python (pid 123) 4.2 GiB; unknown process (pid 9) "
            "unknown amount NVML"
        ),
        "GPU 0 busy 37 % NVML",
        "GPU 0 capability 9.0 NVML",
        "GPU 0 CUDA up to 12.8 NVML",
        "GPU 0 power limit unknown this card does not report it",
        "GPU 0 PCIe width x16 NVML at present",
        "CPU Some [bold] CPU /proc/cpuinfo",
        "cores available 2 cgroup v2 cpu.max",
        "memory available 12.0 GiB psutil",
        "disk free 100.0 GiB disk usage of /",
        "torch 2.9.1 importlib.metadata",
        "peft – not installed",
    } <= set(lines)
    assert not any("MIG" in line or line.startswith("GPU note") for line in lines)


def test_cards_come_first_and_what_is_special_about_them_has_a_row():
    second = replace(GPU, index=Fact(1, "NVML"), name=Fact("NVIDIA A100", "NVML"))
    lines = lines_of(replace(MACHINE, gpus=(GPU, second)))
    assert lines[0] == "GPU 0 NVIDIA H100 80GB HBM3 NVML"
    assert lines.index("GPU 1 NVIDIA A100 NVML") < lines.index("CPU Some [bold] CPU /proc/cpuinfo")
    reason = "the NVIDIA driver is not installed"
    assert lines_of(replace(MACHINE, gpus=(), gpu_note=reason))[0] == f"GPU none {reason}"
    noted = replace(MACHINE, gpu_note="CUDA_VISIBLE_DEVICES='0' shows 1 of 2 GPUs")
    assert "GPU note CUDA_VISIBLE_DEVICES='0' shows 1 of 2 GPUs" in lines_of(noted)
    idle = replace(GPU, holders=Fact((), "NVML"))
    assert "GPU 0 memory held by no process NVML" in lines_of(replace(MACHINE, gpus=(idle,)))
    split = replace(GPU, mig_slice=Fact("MIG-1111", "NVML"))
    assert "GPU 0 MIG slice MIG-1111 NVML" in lines_of(replace(MACHINE, gpus=(split,)))

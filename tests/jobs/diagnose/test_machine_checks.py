"""The machine before a run, through a stand-in for NVML: every fault and the healthy case."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from expert.jobs.diagnose.machine import built_for, check_gpus, check_torch
from expert.jobs.gpu_memory import gpu_memory
from expert.planning.machine.machine import Fact, describe_machine
from tests.each import each
from tests.planning.fake_nvml import GIB, NO_SUCH_PID, FakeNvml

FACTS: dict[str, Any] = {
    "version": "2.11.0",
    "cuda": "12.8",
    "available": True,
    "architectures": ["sm_80", "sm_90"],
    "capability": [9, 0],
}


def found_on(nvml: FakeNvml) -> dict[str, Any]:
    machine = describe_machine(nvml=nvml, environ={})
    return {each.name: each for each in check_gpus(machine, gpu_memory(nvml).cards)}


def quiet() -> FakeNvml:
    """An unused card."""
    nvml = FakeNvml()
    nvml.answers["nvmlDeviceGetMemoryInfo"] = lambda handle: SimpleNamespace(
        total=80 * GIB, free=79.6 * GIB
    )
    nvml.answers["nvmlDeviceGetUtilizationRates"] = lambda handle: SimpleNamespace(gpu=0)
    return nvml


def test_a_card_is_looked_at_with_who_uses_it_or_why_there_is_none():
    nvml = quiet()
    found = found_on(nvml)
    assert [(name, each.severity) for name, each in found.items()] == [("gpu", "good")]
    assert "79.6 of 80.0 GiB free" in found["gpu"].evidence
    nvml.compute = [SimpleNamespace(pid=NO_SUCH_PID, usedGpuMemory=5 * GIB)]
    shared = found_on(nvml)["other-process"]
    assert shared.severity == "warning"
    assert f"pid {NO_SUCH_PID}, 5.0 GiB" in shared.evidence
    assert found_on(FakeNvml(cards=2))["several-gpus"].severity == "note"
    none = found_on(FakeNvml(broken={"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}))["no-gpu"]
    assert none.severity == "warning"
    assert "driver is not installed" in none.evidence


@pytest.mark.parametrize(("free", "busy"), [(40, 0), (79.6, 90)])
def test_a_process_in_another_container_is_noticed_by_memory_or_utilization(free, busy):
    nvml = quiet()
    nvml.answers["nvmlDeviceGetMemoryInfo"] = lambda handle: SimpleNamespace(
        total=80 * GIB, free=free * GIB
    )
    nvml.answers["nvmlDeviceGetUtilizationRates"] = lambda handle: SimpleNamespace(gpu=busy)
    assert "unseen-process" in found_on(nvml)


# --- torch and the driver ------------------------------------------------------------------------


@each(
    ("facts", "name", "severity"),
    [
        ({}, "torch", "good"),
        ({"cuda": None, "version": "2.11.0+cpu", "available": False}, "torch-unfit", "error"),
        ({"cuda": "13.0"}, "torch-unfit", "error"),  # the driver runs up to 12.8
        ({"cuda": "12.9"}, "torch", "good"),
        ({"available": False}, "torch-unfit", "error"),
        ({"architectures": ["sm_70", "sm_80"]}, "torch-unfit", "error"),
        ({"architectures": ["sm_80", "compute_80"]}, "torch", "good"),
    ],
)
def test_torch_is_held_to_the_driver_and_the_card(facts, name, severity):
    machine = describe_machine(nvml=quiet(), environ={})
    [found] = check_torch(machine, needed=True, facts={**FACTS, **facts})
    assert (found.name, found.severity) == (name, severity)


def test_a_machine_without_torch_says_so():
    machine = describe_machine(nvml=quiet(), environ={})
    bare = replace(machine, versions={**machine.versions, "torch": Fact(None, "not installed")})
    for needed, severity in ((True, "error"), (False, "warning")):
        [found] = check_torch(bare, needed=needed)
        assert (found.name, found.severity) == ("no-torch", severity)


@each(
    ("capability", "architectures", "fits"),
    [
        ((8, 9), ["sm_86"], True),
        ((8, 6), ["sm_89"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((12, 0), ["sm_90"], False),
        ((9, 0), ["sm_90a"], True),
        ((7, 5), ["compute_80"], False),
    ],
)
def test_machine_code_is_for_its_major_version_and_ptx_for_all_later_ones(
    capability, architectures, fits
):
    assert built_for(capability, architectures) is fits

"""GPU samples from a fake NVML; no test waits for time to pass."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from expert.telemetry import gpu as gpu_module
from expert.telemetry.gpu import GpuSampler, allocator_stats
from tests.planning.fake_nvml import GIB, FakeNvml, process
from tests.telemetry.conftest import HandClock


class BusyNvml(FakeNvml):
    """A busy card; `use` is its utilisation."""

    NVML_CLOCK_SM = pynvml.NVML_CLOCK_SM

    def __init__(self, cards: int = 1, broken: dict[str, int] | None = None) -> None:
        super().__init__(cards, broken)
        self.use: Any = 98
        self.bits = 0
        self.compute = [process(os.getpid(), 2 * GIB), process(os.getpid() + 1, GIB)]
        self.answers |= {
            "nvmlDeviceGetUtilizationRates": lambda card: SimpleNamespace(gpu=self.use + card),
            "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
            "nvmlDeviceGetPowerUsage": lambda card: 612_500,
            "nvmlDeviceGetClockInfo": lambda card, which: {pynvml.NVML_CLOCK_SM: 1980}[which],
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda card: self.bits,
        }


@pytest.fixture(autouse=True)
def _all_cards_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def sampled(nvml: FakeNvml, clock: HandClock, *uses: int) -> GpuSampler:
    sampler = GpuSampler(0, clock=clock, nvml=nvml)
    for use in uses:
        clock.turn(1)
        vars(nvml)["use"] = use
        sampler.sample()
    return sampler


def test_step_fields_average_since_the_last_line_and_fall_back_to_the_newest(clock, monkeypatch):
    monkeypatch.setattr(gpu_module, "KEPT_SAMPLES", 4)
    nvml = BusyNvml()
    sampler = sampled(nvml, clock, 10, 90, 100)
    assert sampler.step_fields(since=clock.now - 1) == {
        "gpu_utilization": 95.0,
        "gpu_memory_bytes": 3 * GIB,
        "gpu_process_memory_bytes": 2 * GIB,
        "power_watts": 612.5,
        "sm_clock_mhz": 1980.0,
        "throttled_heat": 0.0,
    }
    assert sampler.step_fields(since=clock.now + 1)["gpu_utilization"] == 100.0
    nvml.bits = pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
    for _ in range(3):
        sampler.sample()
    fields = sampler.step_fields(0.0)  # the oldest were dropped
    assert (fields["gpu_utilization"], fields["throttled_heat"]) == (100.0, 0.75)


def test_a_value_the_card_does_not_report_is_none_and_the_rest_stays(clock):
    nvml = BusyNvml(broken={"nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_NOT_SUPPORTED})
    for listed in ([], [process(os.getpid(), None)]):  # this process is not listed, or hidden
        nvml.compute = listed
        fields = sampled(nvml, clock, 98).step_fields(0.0)
        assert (fields["power_watts"], fields["gpu_utilization"]) == (None, 98.0)
        assert fields["gpu_process_memory_bytes"] is None


@pytest.mark.parametrize(
    ("gpu", "nvml"),
    [
        (0, FakeNvml(broken={"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND})),
        (3, BusyNvml(cards=1)),
    ],
    ids=["no driver", "no such card"],
)
def test_without_nvml_every_value_is_none_and_no_thread_starts(gpu, nvml):
    threads = threading.active_count()
    with GpuSampler(gpu, nvml=nvml) as sampler:
        assert threading.active_count() == threads
        assert sampler.sample() is None
    assert set(sampler.step_fields(0.0).values()) == {None}


def test_of_a_split_card_the_memory_is_the_slices(clock):
    nvml = BusyNvml()
    nvml.split, nvml.slices = 1, ["MIG-1111"]
    nvml.answers["nvmlDeviceGetMemoryInfo"] = lambda part: SimpleNamespace(
        used=GIB if part == "MIG-1111" else 7 * GIB, total=8 * GIB, free=GIB
    )
    assert sampled(nvml, clock, 98).step_fields(0.0)["gpu_memory_bytes"] == GIB


def test_the_thread_samples_until_it_is_stopped_and_nvml_is_released():
    nvml = BusyNvml()
    twice = threading.Event()
    answers = iter(range(1000))

    def power(card: int) -> int:
        if next(answers) == 1:
            twice.set()
        return 500_000

    nvml.answers["nvmlDeviceGetPowerUsage"] = power
    with GpuSampler(0, interval=0.001, nvml=nvml) as sampler:
        assert nvml.running == 1
        assert twice.wait(30)  # two samples, however slow the machine
    assert nvml.running == 0
    assert not any(thread.name == "gpu-sampler" for thread in threading.enumerate())
    assert sampler.step_fields(0.0)["power_watts"] == 500.0


def test_the_allocators_counters_are_read_by_name(monkeypatch):
    stats = {
        "num_alloc_retries": 2,
        "num_ooms": 1,
        "reserved_bytes": {"all": {"peak": 30, "current": 20}},
        "allocated_bytes": {"all": {"peak": 10, "current": 5}},
    }
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.memory_stats_as_nested_dict", lambda device: stats)
    assert allocator_stats() == {
        "allocator_retries": 2,
        "out_of_memory": 1,
        "peak_reserved_bytes": 30,
        "peak_allocated_bytes": 10,
    }
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert set(allocator_stats().values()) == {None}


@pytest.mark.gpu
def test_a_real_card_reports_its_values_and_the_allocator_its_peaks():
    import torch

    held = torch.ones(2**28, device="cuda")
    with GpuSampler(0, interval=60.0) as sampler:
        sample = sampler.sample()
    assert sample is not None
    assert sample["memory"] >= held.nbytes
    assert sample["utilization"] is not None
    facts = allocator_stats()
    assert facts["peak_reserved_bytes"] >= facts["peak_allocated_bytes"] >= held.nbytes

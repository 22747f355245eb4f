"""Samples of a card through a stand-in for NVML; nothing here waits for time to pass."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from expert.telemetry import gpu as gpu_module
from expert.telemetry.gpu import NUMBERS, GpuSampler, allocator_facts, throttle_words
from tests.planning.fake_nvml import GIB, UUIDS, FakeNvml, FakeNVMLError, process
from tests.telemetry.clocks import HandClock
from tests.wording import wording


class BusyNvml(FakeNvml):
    """A card at work; `use` is its utilisation."""

    NVML_CLOCK_SM = pynvml.NVML_CLOCK_SM
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU

    def __init__(self, cards: int = 1, broken: dict[str, int] | None = None) -> None:
        super().__init__(cards, broken)
        self.use: Any = 98
        self.bits = 0
        self.compute = [process(os.getpid(), 2 * GIB), process(os.getpid() + 1, GIB)]
        self.answers |= {
            "nvmlDeviceGetUtilizationRates": lambda card: SimpleNamespace(gpu=self.use + card),
            "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
            "nvmlDeviceGetPowerUsage": lambda card: 612_500,
            "nvmlDeviceGetClockInfo": self._clock_info,
            "nvmlDeviceGetTemperature": self._temperature,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda card: self.bits,
        }

    def _clock_info(self, card: int, which: int) -> int:
        return {pynvml.NVML_CLOCK_SM: 1980}[which]

    def _temperature(self, card: int, which: int) -> int:
        return {pynvml.NVML_TEMPERATURE_GPU: 61}[which]


@pytest.fixture(autouse=True)
def _all_cards_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def sampled(nvml: FakeNvml, clock: HandClock, *uses: int, gpu: int | str = 0) -> GpuSampler:
    sampler = GpuSampler(gpu, clock=clock, nvml=nvml)
    for use in uses:
        clock.turn(1)
        vars(nvml)["use"] = use
        sampler.sample()
    return sampler


def test_a_sample_holds_every_value_in_its_unit(clock):
    [sample] = sampled(BusyNvml(), clock, 98).samples()
    assert sample.time == 101.0
    assert sample.utilization_percent == 98.0
    assert (sample.memory_bytes, sample.process_memory_bytes) == (3 * GIB, 2 * GIB)
    assert (sample.power_watts, sample.sm_clock_mhz) == (612.5, 1980.0)
    assert (sample.temperature_celsius, sample.throttle) == (61.0, ())


def test_a_summary_has_mean_maximum_and_fifth_percentile(clock):
    summary = sampled(BusyNvml(), clock, *range(1, 101)).summary()
    assert summary["samples"] == 100
    assert summary["utilization_percent"] == {"mean": 50.5, "max": 100.0, "p5": 5.0}
    assert set(summary["unknown"]) == {"shared_memory_spill_bytes"}


def test_a_summary_starts_where_it_is_asked_to(clock):
    sampler = sampled(BusyNvml(), clock, 10, 20, 40)
    assert sampler.summary(since=clock.now)["utilization_percent"]["mean"] == 40.0
    assert sampler.summary(since=clock.now - 1)["utilization_percent"]["mean"] == 30.0


def test_old_samples_leave_the_ring(clock, monkeypatch):
    monkeypatch.setattr(gpu_module, "KEPT_SAMPLES", 2)
    assert sampled(BusyNvml(), clock, 10, 20, 40).summary()["utilization_percent"]["p5"] == 20.0


def test_what_holds_the_clock_down_is_said_in_words_and_shares(clock):
    nvml = BusyNvml()
    sampler = sampled(nvml, clock, 98)
    nvml.bits = pynvml.nvmlClocksThrottleReasonSwPowerCap
    for _ in range(3):
        sampler.sample()
    assert sampler.summary()["throttle"] == {"power limit": 0.75}


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (pynvml.nvmlClocksThrottleReasonNone, ()),
        (pynvml.nvmlClocksThrottleReasonGpuIdle, ()),
        (pynvml.nvmlClocksThrottleReasonHwThermalSlowdown, ("heat (hardware)",)),
        (pynvml.nvmlClocksThrottleReasonSwThermalSlowdown, ("heat (driver)",)),
        (pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown, ("power brake",)),
        (
            pynvml.nvmlClocksThrottleReasonSwPowerCap | pynvml.nvmlClocksThrottleReasonHwSlowdown,
            ("power limit", "hardware slowdown"),
        ),
    ],
)
def test_nvmls_bits_are_read_as_the_driver_means_them(bits, words):
    assert throttle_words(bits) == words


def test_a_value_the_card_does_not_tell_is_none_with_the_reason_and_the_rest_stays(clock):
    nvml = BusyNvml(broken={"nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_NOT_SUPPORTED})
    summary = sampled(nvml, clock, 98).summary()
    assert summary["power_watts"] is None
    assert summary["unknown"]["power_watts"] == "NVML: some text"
    assert summary["utilization_percent"]["mean"] == 98.0


def test_a_process_that_nvml_does_not_list_has_unknown_memory(clock):
    nvml = BusyNvml()
    nvml.compute = []
    summary = sampled(nvml, clock, 98).summary()
    assert summary["process_memory_bytes"] is None
    assert wording("does-not-list-process") in summary["unknown"]["process_memory_bytes"]


def test_a_driver_that_does_not_tell_the_memory_of_processes_is_said(clock):
    nvml = BusyNvml()
    nvml.compute = [process(os.getpid(), None)]
    summary = sampled(nvml, clock, 98).summary()
    assert wording("does-not-tell") in summary["unknown"]["process_memory_bytes"]


def test_without_nvml_every_value_is_none_with_the_reason_and_no_thread_starts():
    threads = threading.active_count()
    nvml = FakeNvml(broken={"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND})
    with GpuSampler(0, nvml=nvml) as sampler:
        assert threading.active_count() == threads
        assert sampler.sample() is None
        summary = sampler.summary()
    assert not sampler.available
    for name in (*NUMBERS, "throttle"):
        assert summary[name] is None
        assert wording("driver-is-not-installed") in summary["unknown"][name]
    assert set(sampler.step_fields().values()) == {None}


def test_a_card_that_is_not_there_is_no_error():
    sampler = GpuSampler(3, nvml=BusyNvml(cards=1))
    assert not sampler.available
    assert sampler.reason == wording("nvml-finds-no-gpu")


def test_before_the_first_sample_nothing_is_known():
    sampler = GpuSampler(0, nvml=BusyNvml())
    assert sampler.summary()["unknown"]["power_watts"] == wording("no-sample-has-been")


@pytest.mark.parametrize("name", [UUIDS[1], UUIDS[1].removeprefix("GPU-")])
def test_a_card_is_found_by_its_uuid_as_nvml_or_torch_write_it(clock, name):
    [sample] = sampled(BusyNvml(cards=3), clock, 50, gpu=name).samples()
    assert sample.utilization_percent == 51.0  # the second card


def test_a_number_is_cudas_number(clock, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    [sample] = sampled(BusyNvml(cards=3), clock, 50, gpu=0).samples()
    assert sample.utilization_percent == 52.0


def test_of_a_split_card_the_memory_is_the_slices(clock):
    nvml = BusyNvml()
    nvml.split, nvml.slices = 1, ["MIG-1111"]
    nvml.answers["nvmlDeviceGetMemoryInfo"] = lambda part: SimpleNamespace(
        used=GIB if part == "MIG-1111" else 7 * GIB, total=8 * GIB, free=GIB
    )
    assert sampled(nvml, clock, 98, gpu="1111").samples()[0].memory_bytes == GIB


def test_step_fields_average_since_the_last_line_and_fall_back_to_the_newest(clock):
    sampler = sampled(BusyNvml(), clock, 10, 90, 100)
    assert sampler.step_fields(since=clock.now - 1) == {
        "gpu_utilization": 95.0,
        "gpu_memory_bytes": 3 * GIB,
        "gpu_process_memory_bytes": 2 * GIB,
        "power_watts": 612.5,
        "sm_clock_mhz": 1980.0,
        "throttled_power": 0.0,
        "throttled_heat": 0.0,
    }
    assert sampler.step_fields(since=clock.now + 1)["gpu_utilization"] == 100.0


def test_the_thread_samples_until_it_is_stopped_and_nvml_is_let_go():
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
        assert twice.wait(30)  # two samples, however long the machine takes
    assert nvml.running == 0
    assert not any(thread.name == "gpu-sampler" for thread in threading.enumerate())
    assert sampler.summary()["power_watts"]["mean"] == 500.0


def test_a_surprise_in_the_thread_ends_sampling_with_a_reason():
    nvml = BusyNvml()
    failed = threading.Event()

    def surprise(card: int) -> int:
        failed.set()
        raise OSError("the library is gone")

    nvml.answers["nvmlDeviceGetPowerUsage"] = surprise
    sampler = GpuSampler(0, interval=0.001, nvml=nvml)
    sampler.start()
    assert failed.wait(30)
    assert sampler._thread is not None
    sampler._thread.join(30)
    assert sampler.reason == "sampling ended: OSError: the library is gone"
    sampler.stop()


def test_nvml_that_fails_after_the_description_is_a_reason(clock):
    nvml = BusyNvml()
    calls = iter(range(10))

    def start() -> None:
        if next(calls):
            raise FakeNVMLError(pynvml.NVML_ERROR_UNKNOWN, "it went away")

    nvml.answers["nvmlInit"] = start
    sampler = GpuSampler(0, nvml=nvml)
    assert (sampler.available, sampler.reason) == (False, "NVML: it went away")


def test_without_cuda_the_allocator_has_nothing_to_say(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert allocator_facts() == {
        "allocator_retries": None,
        "out_of_memory": None,
        "peak_reserved_bytes": None,
        "peak_allocated_bytes": None,
        "because": wording("no-cuda-card-in"),
    }


def test_the_allocators_counters_are_read_by_name(monkeypatch):
    stats = {
        "num_alloc_retries": 2,
        "num_ooms": 1,
        "reserved_bytes": {"all": {"peak": 30, "current": 20}},
        "allocated_bytes": {"all": {"peak": 10, "current": 5}},
    }
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.memory_stats_as_nested_dict", lambda device: stats)
    facts = allocator_facts()
    assert (facts["allocator_retries"], facts["out_of_memory"]) == (2, 1)
    assert (facts["peak_reserved_bytes"], facts["peak_allocated_bytes"]) == (30, 10)


@pytest.mark.gpu
def test_a_real_card_tells_its_values_and_the_allocator_its_peaks():
    import torch

    held = torch.ones(2**28, device="cuda")
    sampler = GpuSampler(str(torch.cuda.get_device_properties(0).uuid))
    assert sampler.available, sampler.reason
    sample = sampler.sample()
    sampler.stop()
    assert sample is not None
    assert sample.memory_bytes is not None
    assert sample.memory_bytes >= held.nbytes
    assert sample.utilization_percent is not None
    facts = allocator_facts()
    assert facts["peak_reserved_bytes"] >= facts["peak_allocated_bytes"] >= held.nbytes
    assert facts["allocator_retries"] is not None

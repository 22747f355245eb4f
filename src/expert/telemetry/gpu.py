"""GPU utilization, memory, power and clock during training, from NVML.

A thread samples once a second; a sample takes 81 us (H200, driver 580), and NVML is called without
the GIL. Values that are not available are None.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

from expert.planning.machine.machine import visible_gpus
from expert.planning.machine.nvml import nvml_errors

if TYPE_CHECKING:
    import torch

KEPT_SAMPLES = 3600
"""One hour at one sample a second."""

AVERAGED_SECONDS = 1.0
"""NVML's utilization is that of up to the last second."""

PATIENCE_SECONDS = 5.0
"""How long to wait for the thread to end; a healthy call takes microseconds."""

# Bits of nvmlClocksEventReasons for reasons that lower the clock. A GPU at full load reaches its
# power limit, which is fine; heat and hardware errors need fixing.
THERMAL_THROTTLE_BITS = 0x008 | 0x020 | 0x040  # hardware slowdown, heat seen by either


GpuSample = dict[str, Any]
"""Values of the GPU at a time; None for those it does not report."""


class GpuSampler:
    """Samples of one GPU in a ring buffer; without NVML there is no thread and values are None."""

    def __init__(
        self,
        gpu: int,
        *,
        interval: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        nvml: ModuleType | None = None,
    ) -> None:
        """`gpu`: CUDA's index of the GPU or MIG slice."""
        self._interval = interval
        self._clock = clock
        self._samples: deque[GpuSample] = deque(maxlen=KEPT_SAMPLES)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._nvml, self._card, self._part = _open(gpu, nvml)

    def __enter__(self) -> GpuSampler:
        """Start sampling in the background; does nothing without NVML."""
        if self._nvml is not None:
            self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread and release NVML; the samples stay readable."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(PATIENCE_SECONDS)
            if self._thread.is_alive():  # a lost GPU can block a call forever: keep NVML open
                return
        if self._nvml is not None:
            with suppress(*nvml_errors(self._nvml)):  # a failure here loses nothing
                self._nvml.nvmlShutdown()
            self._nvml = None

    def _run(self) -> None:
        while True:
            try:
                self.sample()
            except Exception:  # noqa: BLE001 - an unexpected driver error must not end training
                return
            if self._stop.wait(self._interval):
                return

    def sample(self) -> GpuSample | None:
        """Take one sample and keep it; None without NVML."""
        nvml, card, part = self._nvml, self._card, self._part
        if nvml is None:
            return None

        def value(read: Callable[[], Any]) -> Any:
            try:
                return read()
            except nvml_errors(nvml):
                return None

        sample = {
            "time": self._clock(),
            "utilization": value(lambda: float(nvml.nvmlDeviceGetUtilizationRates(card).gpu)),
            "memory": value(lambda: int(nvml.nvmlDeviceGetMemoryInfo(part).used)),  # by any process
            "own_memory": value(lambda: _process_memory(nvml, part)),
            "power": value(lambda: nvml.nvmlDeviceGetPowerUsage(card) / 1000),
            "clock": value(lambda: float(nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM))),
            "throttled": value(lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card))),
        }
        self._samples.append(sample)
        return sample

    def step_fields(self, since: float, *, steady_since: float = 0.0) -> dict[str, Any]:
        """Fields of a "step" event: means, peak memory in use, the share of time throttled by heat.

        If steps are shorter than the interval, the newest sample is used. Before steps have run
        for as long as NVML averages (`steady_since`: since when), their utilization and power are
        unknown: it would be that of loading, compiling or saving.
        """
        kept = self._samples.copy()  # atomic: the thread may be adding
        taken = [sample for sample in kept if sample["time"] >= since] or list(kept)[-1:]
        steady = [each for each in taken if each["time"] >= steady_since + AVERAGED_SECONDS]

        def values(name: str, samples: list[GpuSample] = taken) -> list[Any]:
            return [sample[name] for sample in samples if sample[name] is not None]

        heat = [bool(bits & THERMAL_THROTTLE_BITS) for bits in values("throttled")]
        return {
            "gpu_utilization": _mean(values("utilization", steady)),
            "gpu_memory_bytes": max(values("memory"), default=None),
            "gpu_process_memory_bytes": max(values("own_memory"), default=None),
            "power_watts": _mean(values("power", steady)),
            "sm_clock_mhz": _mean(values("clock")),
            "throttled_heat": _mean(heat),
        }


def allocator_stats(device: torch.device | int | str | None = None) -> dict[str, Any]:
    """Retries and peaks of torch's CUDA allocator; without CUDA every value is None.

    For log steps: 34 us (H200, torch 2.11); torch.cuda.memory_stats alone takes 77.
    """
    import torch

    names = ("allocator_retries", "out_of_memory", "peak_reserved_bytes", "peak_allocated_bytes")
    # Empty, not an error, if CUDA was never used.
    stats = torch.cuda.memory_stats_as_nested_dict(device) if torch.cuda.is_available() else {}
    if not stats:
        return dict.fromkeys(names)
    values = (
        stats["num_alloc_retries"],
        stats["num_ooms"],
        stats["reserved_bytes"]["all"]["peak"],
        stats["allocated_bytes"]["all"]["peak"],
    )
    return dict(zip(names, values, strict=True))


def _process_memory(nvml: ModuleType, part: Any) -> int | None:
    """GPU memory of this process; unknown if a container renumbers processes or the driver does not
    report it."""
    for process in nvml.nvmlDeviceGetComputeRunningProcesses(part):
        if process.pid == os.getpid() and process.usedGpuMemory is not None:
            return int(process.usedGpuMemory)
    return None


def _open(gpu: int, nvml: ModuleType | None) -> tuple[ModuleType | None, Any, Any]:
    """NVML, and the handles of the GPU and of the part whose memory is read; Nones without one."""
    gpus, _ = visible_gpus(nvml, os.environ)
    chosen = gpus[gpu] if 0 <= gpu < len(gpus) else None
    if chosen is None or chosen.index.value is None:
        return None, None, None
    if nvml is None:
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
        card = nvml.nvmlDeviceGetHandleByIndex(chosen.index.value)
        part = card
        if chosen.mig_slice.value:
            part = nvml.nvmlDeviceGetHandleByUUID(chosen.mig_slice.value)
    except nvml_errors(nvml):
        return None, None, None
    return nvml, card, part


def _mean(values: Sequence[float]) -> float | None:
    return sum(sorted(values)) / len(values) if values else None

"""What the card does while it trains: use, memory, power, clock and heat, asked through NVML.

A thread of its own asks once a second; a sample takes 81 us (H200, driver 580), and NVML is called
without Python's lock. What cannot be asked is None, with the reason.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from expert.planning.machine.machine import Gpu, visible_gpus

if TYPE_CHECKING:
    import torch

KEPT_SAMPLES = 3600
"""One hour at one sample a second."""

PATIENCE_SECONDS = 5.0
"""Wait for the thread to end; a healthy call takes microseconds."""

# nvmlClocksEventReasons: bits of NVML's binary interface. Bit 1 is an idle card, which is no brake.
THROTTLE_REASONS = {
    0x002: "set clocks",
    0x004: "power limit",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "heat (driver)",
    0x040: "heat (hardware)",
    0x080: "power brake",
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "reliability",
}

# A card at full load meets its power limit and is fine; heat and faults are for somebody to mend.
POWER_BRAKES = frozenset({"power limit", "power brake", "board limit"})
HEAT_BRAKES = frozenset({"heat (driver)", "heat (hardware)", "hardware slowdown"})

_NOT_LISTED = "NVML does not list this process (a container may number its processes anew)"
_NO_SAMPLE = "no sample has been taken yet"
_SPILL = (
    "Windows moves memory into shared RAM without telling NVML"
    if sys.platform == "win32"
    else "only Windows moves memory of a card into shared RAM"
)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One look at the card; None is what it did not tell."""

    time: float
    utilization_percent: float | None
    memory_bytes: int | None
    """In use on the card, by anybody."""
    process_memory_bytes: int | None
    power_watts: float | None
    sm_clock_mhz: float | None
    temperature_celsius: float | None
    throttle: tuple[str, ...] | None
    """What holds the clock down at this moment."""


NUMBERS = tuple(field.name for field in fields(Sample) if field.name not in ("time", "throttle"))


class GpuSampler:
    """Samples of one card in a ring; without NVML there is no thread and every value is None."""

    def __init__(
        self,
        gpu: int | str,
        *,
        interval: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        nvml: ModuleType | None = None,
    ) -> None:
        """`gpu` is CUDA's number or the UUID of the card or MIG slice ("GPU-" may be left out).

        The UUID is surer: CUDA and NVML may count the cards of a mixed machine differently.
        """
        self._interval = interval
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)
        self._why: dict[str, str] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._nvml, self._card, self._part, self.reason = _open(gpu, nvml)

    @property
    def available(self) -> bool:
        """Whether there is a card to ask; `reason` says why not."""
        return self._nvml is not None

    # --- the thread ----------------------------------------------------------------------------

    def start(self) -> None:
        """Starts asking in the background; does nothing without NVML."""
        if self._nvml is None or self._thread is not None:
            return
        self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and lets NVML go; the samples stay readable."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(PATIENCE_SECONDS)
            if self._thread.is_alive():  # a lost card can hold a call for ever: leave NVML to it
                return
            self._thread = None
        if self._nvml is not None:
            with suppress(*_faults(self._nvml)):  # a failing goodbye loses nothing
                self._nvml.nvmlShutdown()
            self._nvml, self.reason = None, "the sampler was stopped"

    def __enter__(self) -> GpuSampler:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _run(self) -> None:
        while True:
            try:
                self.sample()
            except Exception as error:  # noqa: BLE001 - a driver's surprise must not end training
                self.reason = f"sampling ended: {type(error).__name__}: {error}"
                return
            if self._stop.wait(self._interval):
                return

    # --- asking --------------------------------------------------------------------------------

    def sample(self) -> Sample | None:
        """One look at the card, kept in the ring; None without NVML."""
        nvml, card = self._nvml, self._card
        if nvml is None:
            return None
        taken = Sample(
            time=self._clock(),
            utilization_percent=self._ask(
                "utilization_percent", lambda: float(nvml.nvmlDeviceGetUtilizationRates(card).gpu)
            ),
            memory_bytes=self._ask(
                "memory_bytes", lambda: int(nvml.nvmlDeviceGetMemoryInfo(self._part).used)
            ),
            process_memory_bytes=self._process_memory(nvml),
            power_watts=self._ask("power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(card) / 1000),
            sm_clock_mhz=self._ask(
                "sm_clock_mhz", lambda: float(nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM))
            ),
            temperature_celsius=self._ask(
                "temperature_celsius",
                lambda: float(nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU)),
            ),
            throttle=self._ask(
                "throttle",
                lambda: throttle_words(int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card))),
            ),
        )
        self._samples.append(taken)
        return taken

    def _process_memory(self, nvml: ModuleType) -> int | None:
        name = "process_memory_bytes"
        listed = self._ask(name, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(self._part))
        if listed is None:
            return None
        for process in listed:
            if process.pid == os.getpid():
                if process.usedGpuMemory is None:
                    self._why[name] = "the driver does not tell the memory of a process"
                    return None
                return int(process.usedGpuMemory)
        self._why[name] = _NOT_LISTED
        return None

    def _ask(self, name: str, read: Callable[[], Any]) -> Any:
        assert self._nvml is not None
        try:
            return read()
        except _faults(self._nvml) as error:
            self._why[name] = f"NVML: {error}"
            return None

    # --- reading -------------------------------------------------------------------------------

    def samples(self, since: float | None = None) -> list[Sample]:
        """The kept samples, oldest first; only those from `since` (the sampler's clock) on."""
        kept = self._samples.copy()  # in one step, while the thread may be adding
        return [sample for sample in kept if since is None or sample.time >= since]

    def summary(self, since: float | None = None) -> dict[str, Any]:
        """Mean, max and 5th percentile by value, shares of throttled samples, reasons for None."""
        taken = self.samples(since)
        facts: dict[str, Any] = {"samples": len(taken)}
        for name in NUMBERS:
            values = [value for s in taken if (value := getattr(s, name)) is not None]
            facts[name] = _spread(values)
        told = [sample.throttle for sample in taken if sample.throttle is not None]
        facts["throttle"] = {
            reason: share
            for reason in THROTTLE_REASONS.values()
            if (share := sum(reason in each for each in told) / max(1, len(told)))
        }
        facts["throttle"] = facts["throttle"] if told else None
        facts["shared_memory_spill_bytes"] = None
        facts["unknown"] = {
            name: self._reason(name) for name in (*NUMBERS, "throttle") if facts[name] is None
        } | {"shared_memory_spill_bytes": _SPILL}
        return facts

    def step_fields(self, since: float | None = None) -> dict[str, Any]:
        """Fields of a "step" event: means, most memory in use, shares of time with a brake on.

        Where steps are shorter than the interval, the newest sample stands for them.
        """
        taken = self.samples(since) or self.samples()[-1:]
        told = [set(sample.throttle) for sample in taken if sample.throttle is not None]

        def value_of(name: str, which: str) -> float | None:
            spread = _spread([value for s in taken if (value := getattr(s, name)) is not None])
            return spread[which] if spread else None

        def share_of(brakes: frozenset[str]) -> float | None:
            return sum(bool(brakes & each) for each in told) / len(told) if told else None

        return {
            "gpu_utilization": value_of("utilization_percent", "mean"),
            "gpu_memory_bytes": value_of("memory_bytes", "max"),
            "gpu_process_memory_bytes": value_of("process_memory_bytes", "max"),
            "power_watts": value_of("power_watts", "mean"),
            "sm_clock_mhz": value_of("sm_clock_mhz", "mean"),
            "throttled_power": share_of(POWER_BRAKES),
            "throttled_heat": share_of(HEAT_BRAKES),
        }

    def _reason(self, name: str) -> str:
        return self._why.get(name) or self.reason or _NO_SAMPLE


def allocator_facts(device: torch.device | int | str | None = None) -> dict[str, Any]:
    """Retries and peaks of torch's CUDA allocator; without CUDA every value is None.

    For log steps: 34 us (H200, torch 2.11), where torch.cuda.memory_stats alone takes 77.
    """
    import torch

    names = ("allocator_retries", "out_of_memory", "peak_reserved_bytes", "peak_allocated_bytes")
    # empty, rather than an error, where CUDA was never used
    stats = torch.cuda.memory_stats_as_nested_dict(device) if torch.cuda.is_available() else {}
    if not stats:
        return dict.fromkeys(names) | {"because": "no CUDA card is in use"}
    values = (
        stats["num_alloc_retries"],
        stats["num_ooms"],
        stats["reserved_bytes"]["all"]["peak"],
        stats["allocated_bytes"]["all"]["peak"],
    )
    return dict(zip(names, values, strict=True)) | {"because": "torch's allocator"}


def throttle_words(bits: int) -> tuple[str, ...]:
    """What NVML's bits say holds the clock down."""
    return tuple(words for bit, words in THROTTLE_REASONS.items() if bits & bit)


# --- opening -------------------------------------------------------------------------------------


def _open(gpu: int | str, nvml: ModuleType | None) -> tuple[ModuleType | None, Any, Any, str]:
    """NVML, the handles of the card and of the part memory is asked of, and why there are none."""
    found, note = visible_gpus(nvml, os.environ)
    chosen = _choose(gpu, found)
    if chosen is None or chosen.index.value is None:
        return None, None, None, note or f"NVML finds no GPU {gpu}"
    if nvml is None:
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
        card = nvml.nvmlDeviceGetHandleByIndex(chosen.index.value)
        part = card
        if chosen.mig_slice.value:
            part = nvml.nvmlDeviceGetHandleByUUID(chosen.mig_slice.value)
    except _faults(nvml) as error:
        return None, None, None, f"NVML: {error}"
    return nvml, card, part, ""


def _choose(gpu: int | str, found: tuple[Gpu, ...]) -> Gpu | None:
    if isinstance(gpu, int):
        return found[gpu] if 0 <= gpu < len(found) else None
    wanted = gpu.removeprefix("GPU-").removeprefix("MIG-")
    for each in found:
        names = [name for name in (each.uuid.value, each.mig_slice.value) if name]
        if wanted in [name.removeprefix("GPU-").removeprefix("MIG-") for name in names]:
            return each
    return None


def _faults(nvml: ModuleType) -> tuple[type[Exception], ...]:
    mismatch = getattr(nvml, "NVMLLibraryMismatchError", None)
    return (nvml.NVMLError, mismatch) if mismatch else (nvml.NVMLError,)


def _spread(values: list[float]) -> dict[str, float] | None:
    """Mean, max and the value that one in twenty does not exceed; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    low = ordered[max(0, math.ceil(0.05 * len(ordered)) - 1)]
    return {"mean": sum(ordered) / len(ordered), "max": ordered[-1], "p5": low}

"""A fake NVML with any number of cards and any failing calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml

from expert.planning.machine.machine import Machine, describe_machine

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
        self.names = ["NVIDIA H100 80GB HBM3"] * cards
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
            "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=37, memory=12),
            "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
            "nvmlSystemGetDriverVersion": lambda: "570.86.10",
            "nvmlSystemGetCudaDriverVersion": lambda: 12080,
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

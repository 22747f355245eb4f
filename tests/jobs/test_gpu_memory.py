"""Who holds memory of the cards, through a stand-in for NVML."""

from __future__ import annotations

from types import SimpleNamespace

from expert.jobs.gpu_memory import gpu_memory
from tests.planning.fake_nvml import GIB, NO_SUCH_PID, FakeNvml


def holder(pid: int, gibibytes: float | None) -> SimpleNamespace:
    used = None if gibibytes is None else int(gibibytes * GIB)
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


def test_memory_used_by_no_listed_process_is_shown_separately():
    nvml = FakeNvml()
    nvml.compute = [holder(NO_SUCH_PID, 2)]
    [card] = gpu_memory(nvml).cards
    assert card.total_bytes is not None
    assert card.free_bytes is not None
    used = card.total_bytes - card.free_bytes
    assert used > 2 * GIB
    assert card.elsewhere_bytes == used - 2 * GIB
    nvml.compute = [holder(NO_SUCH_PID, None)]
    [card] = gpu_memory(nvml).cards
    assert card.elsewhere_bytes is None
    assert card.could_be_freed_bytes == 0

"""Who holds memory of the cards, through a stand-in for NVML."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pynvml

from expert.jobs.gpu_memory import gpu_memory
from tests.planning.fake_nvml import GIB, NO_SUCH_PID, FakeNvml
from tests.wording import wording


def holder(pid: int, gibibytes: float | None) -> SimpleNamespace:
    used = None if gibibytes is None else int(gibibytes * GIB)
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


def test_a_machine_without_a_card_has_nothing_to_free():
    found = gpu_memory(FakeNvml(broken={"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}))
    assert found.cards == ()
    assert wording("driver-is-not-installed") in found.note
    assert found.freed_bytes == 0


def test_every_holder_is_named_with_what_ending_it_would_free():
    nvml = FakeNvml()
    nvml.compute = [holder(os.getpid(), 3), holder(NO_SUCH_PID, 5)]
    [card] = gpu_memory(nvml).cards
    assert card.holders is not None
    first, second = card.holders
    assert (first.pid, first.bytes, first.own, first.command) == (NO_SUCH_PID, 5 * GIB, False, None)
    assert (second.own, second.bytes) == (True, 3 * GIB)
    assert second.command is not None
    assert "python" in second.command
    assert card.could_be_freed_bytes == 8 * GIB


def test_memory_in_use_that_nobody_listed_holds_is_told_apart():
    nvml = FakeNvml()
    nvml.compute = [holder(NO_SUCH_PID, 2)]
    [card] = gpu_memory(nvml).cards
    assert card.total_bytes is not None
    assert card.free_bytes is not None
    used = card.total_bytes - card.free_bytes
    assert used > 2 * GIB
    assert card.elsewhere_bytes == used - 2 * GIB


def test_an_unknown_amount_leaves_the_rest_unknown():
    nvml = FakeNvml()
    nvml.compute = [holder(NO_SUCH_PID, None)]
    [card] = gpu_memory(nvml).cards
    assert card.elsewhere_bytes is None
    assert card.could_be_freed_bytes == 0


def test_a_driver_that_lists_no_processes_is_told_with_the_reason():
    code = pynvml.NVML_ERROR_NO_PERMISSION
    lists = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
    [card] = gpu_memory(FakeNvml(broken=dict.fromkeys(lists, code))).cards
    assert card.holders is None
    assert wording("user-may-not-read") in card.note

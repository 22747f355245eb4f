"""Cards as reported by NVML: every fact with its source, or unknown."""

from __future__ import annotations

import os

import psutil
import pynvml
import pytest

from expert.planning.machine.cards import card_by_nvml_name
from expert.planning.machine.machine import Fact, GpuProcess, describe_machine, machine_as_dict
from tests.each import each
from tests.planning.fake_nvml import GIB, NO_SUCH_PID, FakeNvml, FakeNVMLError, describe, process

# --- cards ---------------------------------------------------------------------------------------


def test_a_card_is_described_with_every_fact_and_its_source():
    nvml = FakeNvml()
    machine = describe(nvml)
    (gpu,) = machine.gpus
    assert machine.gpu_note == ""
    told = {
        **{"index": 0, "name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-aaaa1111", "holders": ()},
        **{"memory_total_bytes": 80 * GIB, "memory_free_bytes": 77 * GIB},
        **{"utilisation_percent": 37, "capability": (9, 0)},
        **{"driver": "570.86.10", "cuda_driver_version": "12.8"},
    }
    assert vars(gpu) == {name: Fact(value, "NVML") for name, value in told.items()} | {
        "mig_slice": Fact(None, "not split by MIG"),
    }
    assert nvml.running == 0
    nvml.broken = {"nvmlShutdown": pynvml.NVML_ERROR_UNINITIALIZED}  # a failing shutdown
    assert describe(nvml).gpus[0] == gpu


def test_holders_are_compute_and_graphics_processes_once_each_and_the_largest_first():
    nvml = FakeNvml()
    nvml.compute = [process(os.getpid(), 4 * GIB), process(NO_SUCH_PID + 1, 0)]
    nvml.graphics = [process(NO_SUCH_PID, 5 * GIB), process(os.getpid(), 4 * GIB)]
    holders = describe(nvml).gpus[0].holders
    assert holders.value == (
        GpuProcess(NO_SUCH_PID, None, 5 * GIB),
        GpuProcess(os.getpid(), psutil.Process().name(), 4 * GIB),
    )


@each(
    ("function", "fields"),
    [
        ("nvmlDeviceGetName", {"name"}),
        ("nvmlDeviceGetMemoryInfo", {"memory_total_bytes", "memory_free_bytes"}),
        ("nvmlDeviceGetCudaComputeCapability", {"capability"}),
        ("nvmlSystemGetCudaDriverVersion", {"cuda_driver_version"}),
    ],
)
def test_a_call_the_card_does_not_support_makes_only_its_own_facts_unknown(function, fields):
    machine = describe(FakeNvml(broken={function: pynvml.NVML_ERROR_NOT_SUPPORTED}))
    card = machine_as_dict(machine)["gpus"][0]
    lost = {name for name, fact in card.items() if fact["source"].startswith("unknown: ")}
    assert lost == fields
    for name in fields:
        assert card[name] == {"value": None, "source": "unknown: NVML: some text"}


def test_a_card_that_cannot_be_opened_is_named_and_the_others_are_kept():
    def lost(index: int) -> int:
        if index == 1:
            raise FakeNVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    nvml = FakeNvml(cards=3)
    nvml.answers["nvmlDeviceGetHandleByIndex"] = lost
    machine = describe(nvml)
    assert [gpu.index.value for gpu in machine.gpus] == [0, 2]
    assert machine.gpu_note.startswith("GPU 1 cannot be opened: NVML: some text  (a card that")


# --- no cards ------------------------------------------------------------------------------------


@each(
    ("code", "words"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "the NVIDIA driver is not installed"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "installed but not loaded: load it (sudo modprobe"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "this user may not talk to the NVIDIA driver: grant"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "was updated while the old one is still"),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, "the NVIDIA driver is too old: update it"),
        (pynvml.NVML_ERROR_UNKNOWN, "NVML did not start: some text"),
        (None, "the NVIDIA driver is loaded but finds no GPU"),  # and finds no card
    ],
)
def test_nvml_that_does_not_start_means_no_cards_and_a_reason_to_act_on(code, words):
    nvml = FakeNvml(cards=0) if code is None else FakeNvml(broken={"nvmlInit": code})
    check_without_cards(nvml, words)
    uncounted = FakeNvml(broken={"nvmlDeviceGetCount": pynvml.NVML_ERROR_UNKNOWN})
    check_without_cards(uncounted, "the number of GPUs is unknown: NVML: some text")


def check_without_cards(nvml: FakeNvml, words: str) -> None:
    machine = describe(nvml)
    assert (machine.gpus, nvml.running) == ((), 0)
    assert words in machine.gpu_note
    assert "CUDA_VISIBLE_DEVICES" not in describe(nvml, "0").gpu_note


# --- CUDA_VISIBLE_DEVICES ------------------------------------------------------------------------


@each(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("1gpu", [1]),
        ("0,7,1", [0]),
        ("1,1", []),
        ("", []),
        ("GPU-cccc3333", [2]),
        ("GPU-cc,GPU-aaaa", [2, 0]),
        ("GPU-aa", []),  # two cards match
        ("GPU-aaaa,GPU-ffff,GPU-cccc", [0]),
        ("MIG-1111", []),
    ],
)
def test_cuda_visible_devices_chooses_the_cards_and_their_order(visible, indices):
    machine = describe(FakeNvml(cards=3), visible)
    assert [gpu.index.value for gpu in machine.gpus] == indices
    for hides, note in (
        ("1", "CUDA_VISIBLE_DEVICES='1' shows 1 of 3 GPUs"),
        ("", "CUDA_VISIBLE_DEVICES='' hides every GPU (3 found): unset it"),
        ("-1", "CUDA_VISIBLE_DEVICES='-1' hides every GPU (3 found): unset it"),
        ("2,1,0", ""),
    ):
        assert describe(FakeNvml(cards=3), hides).gpu_note == note


# --- MIG -----------------------------------------------------------------------------------------


def test_a_split_card_shows_the_memory_of_its_first_slice_and_says_so():
    nvml = FakeNvml()
    nvml.split, nvml.slices = 1, ["MIG-1111", "MIG-2222"]
    machine = describe(nvml)
    (gpu,) = machine.gpus
    assert gpu.mig_slice == Fact("MIG-1111", "NVML")
    assert gpu.uuid.value == "GPU-aaaa1111"
    assert gpu.memory_total_bytes == Fact(10 * GIB, "NVML, of one MIG slice")
    assert machine.gpu_note == "MIG splits GPU 0: a program uses one slice of it"
    (chosen,) = describe(nvml, "MIG-22,MIG-11").gpus
    assert chosen.mig_slice.value == "MIG-2222"
    nvml.slices = []
    (gpu,) = describe(nvml).gpus
    assert gpu.memory_total_bytes.value is None
    assert "it has no slice yet" in gpu.memory_total_bytes.source
    assert gpu.holders.value is None


@pytest.mark.gpu
def test_a_real_card_is_described_and_agrees_with_the_table():
    machine = describe_machine()
    if not machine.gpus:
        pytest.skip(f"no GPU: {machine.gpu_note}")
    gpu = machine.gpus[0]
    assert gpu.name.value
    assert gpu.memory_total_bytes.value > gpu.memory_free_bytes.value > 0
    assert gpu.driver.value
    card = card_by_nvml_name(gpu.name.value, gpu.memory_total_bytes.value)
    if card is None:
        pytest.skip(f"{gpu.name.value} is not in the table")
    assert card.capability == gpu.capability.value
    assert card.memory_gib * GIB == pytest.approx(gpu.memory_total_bytes.value, rel=0.02)

"""The machine and the memory model on a real card (make gpu-test)."""

from __future__ import annotations

from pathlib import Path

import pytest

from expert.planning.machine.cards import card_by_nvml_name
from expert.planning.machine.machine import Machine, describe_machine

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def machine() -> Machine:
    found = describe_machine(ROOT)
    if not found.gpus:
        pytest.skip(f"no GPU: {found.gpu_note}")
    return found


def test_the_card_is_described_and_agrees_with_the_table(machine):
    gpu = machine.gpus[0]
    assert gpu.name.value
    assert gpu.memory_total_bytes.value > gpu.memory_free_bytes.value > 0
    assert gpu.driver.value
    card = card_by_nvml_name(gpu.name.value, gpu.memory_total_bytes.value)
    if card is None:
        pytest.skip(f"{gpu.name.value} is not in the table")
    assert card.capability == gpu.capability.value
    assert card.memory_gib * 2**30 == pytest.approx(gpu.memory_total_bytes.value, rel=0.02)

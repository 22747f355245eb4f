"""The machine and the memory model on a real card (make gpu-test)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from expert.planning.machine.cards import card_by_nvml_name
from expert.planning.machine.machine import Machine, describe_machine
from expert.planning.memory.memory import estimate
from tests.planning.test_memory import workload_of

ROOT = Path(__file__).parents[2]
NEEDED = ("torch", "transformers", "peft", "liger_kernel")
CASES = ("/lora/bf16/eager/varlen/ckpt-none/fused", "/lora/bf16/eager/varlen/ckpt-full/fused")

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


def test_the_estimate_is_within_15_percent_of_what_this_card_measures(machine, tmp_path):
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    out = tmp_path / "peaks.json"
    script = ROOT / "benchmarks" / "memory_peaks.py"
    command = [sys.executable, script, "--out", out, "--shapes", "smollm2-135m", "qwen3-0.6b"]
    subprocess.run([*command, "--only", *CASES], check=True, capture_output=True)
    records = json.loads(out.read_text(encoding="utf-8"))["records"]
    measured = [record for record in records if record["status"] == "ok"]
    assert measured
    for record in measured:
        guess = estimate(workload_of(record)).allocated
        assert guess == pytest.approx(record["peak"], rel=0.15), record["name"]

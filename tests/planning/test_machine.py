"""The description of a machine: every fact with its value and source."""

from __future__ import annotations

import sys

from expert.planning.machine.machine import describe_machine


def test_the_machine_this_test_runs_on_is_described():
    machine = describe_machine()
    assert machine.cores_available.value is not None
    assert machine.cores_available.value >= 1
    for fact in (machine.ram_total_bytes, machine.ram_available_bytes, machine.disk_free_bytes):
        assert fact.value is not None
        assert fact.value > 0
    assert machine.python.value == ".".join(map(str, sys.version_info[:3]))
    assert set(machine.versions) >= {"torch", "transformers", "liger-kernel", "flash-attn"}
    assert machine.gpus or machine.gpu_note

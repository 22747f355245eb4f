"""The description of a machine: every fact with its value and source."""

from __future__ import annotations

import os
import subprocess
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


def test_importing_the_module_brings_in_nothing_heavy():
    code = (
        "import sys, expert.planning.machine.machine;"
        "print(*{'torch', 'psutil', 'pynvml', 'importlib.metadata'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],  # -S: site's .pth files may import what they like
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.strip() == ""

"""CPU use of other processes, with a fake clock and with a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from expert.telemetry.cpu import CpuSampler, available_cores, peak_memory_bytes
from tests.each import each


@each(
    ("busy", "own", "share"),
    [(20.0, 10.0, 0.5), (10.0, 10.0, 0.0), (5.0, 6.0, 0.0), (99.0, 0.0, 1.0)],
)
def test_cpu_use_of_others_excludes_the_run(busy, own, share):
    now = [0.0, 0.0, 0.0]
    sampler = CpuSampler(clock=lambda: now[0], busy=lambda: now[1], own=lambda: now[2], cores=2)
    now[:] = [10.0, busy, own]
    assert sampler.step_fields() == {"cpu_others": share}
    assert sampler.step_fields() == {}  # no time has passed


def test_the_peak_of_memory_stays_and_is_not_that_of_a_process_that_was_started():
    block = bytearray(200_000_000)
    block[::4096] = b"x" * len(block[::4096])  # touched, so that it is resident
    size = len(block)
    asked = "from expert.telemetry.cpu import peak_memory_bytes as peak; print(peak())"
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, check=True, text=True)
    assert int(told.stdout) < size
    del block
    assert (peak_memory_bytes() or 0) > size


def test_a_real_neighbour_is_seen():
    """The other process is not a child of this one."""
    code = "import os; os.fork() and os._exit(0); print(os.getpid(), flush=True)\nwhile True: pass"
    done = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert done.stdout is not None
    neighbour = int(done.stdout.readline())
    try:
        done.wait()
        sampler = CpuSampler()
        time.sleep(0.6)
        share = sampler.step_fields()["cpu_others"]
    finally:
        os.kill(neighbour, signal.SIGKILL)
        done.stdout.close()
    assert share * len(available_cores()) > 0.2  # a fifth of a core, even on a busy machine

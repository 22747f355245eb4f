"""CPU use of other processes, with a fake clock and with a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from expert.telemetry.cpu import (
    NAMED_AGAIN_SECONDS,
    CpuSampler,
    OtherProcesses,
    available_cores,
    peak_memory_bytes,
    process_seconds,
)
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


def test_busy_neighbours_are_named_once_a_minute_and_quiet_ones_never():
    now, used = [100.0], {7: ("python3", 5.0), 8: ("sleeper", 1.0), 9: ("rustc", 0.0)}
    looks = []

    def look():
        looks.append(now[0])
        return dict(used)

    neighbours = OtherProcesses(clock=lambda: now[0], look=look)
    assert neighbours.named(0.1) == []
    assert looks == []  # nothing is sampled while the cores are free
    assert neighbours.named(0.8) == []  # the first sample
    now[0] += 2
    used.update({7: ("python3", 8.0), 9: ("rustc", 0.5), 10: ("new", 9.0)})
    expected = [
        {"name": "python3", "pid": 7, "cores": 1.5},
        {"name": "rustc", "pid": 9, "cores": 0.25},
    ]
    assert neighbours.named(0.8) == expected
    now[0] += 2
    assert neighbours.named(0.8) == []
    assert len(looks) == 2
    now[0] += NAMED_AGAIN_SECONDS
    assert neighbours.named(0.8) == []
    assert len(looks) == 3


def test_a_real_neighbour_is_seen_and_this_process_is_not():
    """The other process is not a child of this one."""
    code = "import os; os.fork() and os._exit(0); print(os.getpid(), flush=True)\nwhile True: pass"
    done = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert done.stdout is not None
    neighbour = int(done.stdout.readline())
    try:
        done.wait()
        sampler, before = CpuSampler(), process_seconds()
        time.sleep(0.6)
        share, seen = sampler.step_fields()["cpu_others"], process_seconds()
    finally:
        os.kill(neighbour, signal.SIGKILL)
        done.stdout.close()
    assert seen[neighbour][1] > before[neighbour][1]
    assert share * len(available_cores()) > 0.2  # a fifth of a core, even on a busy machine
    assert os.getpid() not in seen

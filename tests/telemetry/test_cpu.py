"""Who uses the cores: by a clock turned by hand, and by a real neighbour."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from expert.telemetry.cpu import (
    CpuSampler,
    busy_seconds,
    cores_seen,
    own_seconds,
    peak_memory_bytes,
)


@pytest.mark.parametrize(
    ("busy", "own", "share"),
    [(20.0, 10.0, 0.5), (10.0, 10.0, 0.0), (5.0, 6.0, 0.0), (99.0, 0.0, 1.0)],
)
def test_what_is_not_the_run_s_own_is_others(busy, own, share):
    now = [0.0, 0.0, 0.0]
    sampler = CpuSampler(clock=lambda: now[0], busy=lambda: now[1], own=lambda: now[2], cores=2)
    now[:] = [10.0, busy, own]
    assert sampler.step_fields() == {"cpu_others": share}
    assert sampler.step_fields() == {}  # no time has passed


def test_a_busy_neighbour_is_seen():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        try:
            sampler = CpuSampler()
            time.sleep(0.5)
            seen = sampler.step_fields()["cpu_others"] * len(cores_seen())
        finally:
            neighbour.kill()
    assert seen > 0.2  # at least a fifth of a core, however many others want it


def test_own_work_counts_as_busy_and_as_own():
    busy, own = busy_seconds(), own_seconds()
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    assert own_seconds() - own >= 0.15  # ticks are hundredths of a second
    assert busy_seconds() - busy >= 0.1


def test_the_peak_of_memory_stays_when_the_memory_is_given_back():
    block = bytearray(300_000_000)
    block[::4096] = b"x" * len(block[::4096])  # touched, so that it is really there
    del block
    assert (peak_memory_bytes() or 0) > 300_000_000


def test_the_peak_of_a_process_is_not_that_of_whoever_started_it():
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    block = bytearray(300_000_000)
    block[::4096] = b"x" * len(block[::4096])
    asked = "from expert.telemetry.cpu import peak_memory_bytes as peak; print(peak())"
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, check=True, text=True)
    assert int(told.stdout) < len(block)

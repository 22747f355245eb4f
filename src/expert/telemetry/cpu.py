"""How much this run and other processes use the CPU cores."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def busy_seconds() -> float:
    """Seconds since boot that the cores available to this process were busy."""
    import psutil

    times = psutil.cpu_times(percpu=True)
    allowed = available_cores()
    mine = [core for number, core in enumerate(times) if number in allowed] or times
    # Not work: waiting for a disk or other virtual machines; guests are already in `user`.
    idle = ("idle", "iowait", "steal", "guest", "guest_nice")
    return sum(sum(core) - sum(getattr(core, name, 0.0) for name in idle) for core in mine)


def available_cores() -> set[int]:
    """The cores that this process may run on."""
    return os.sched_getaffinity(0)


def own_seconds() -> float:
    """CPU seconds of this process and its finished children."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def peak_memory_bytes() -> int | None:
    """Peak memory of this process without its children; None if the system does not report it.

    getrusage would include the parent's memory at the time of the fork.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    match = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


class CpuSampler:
    """What other processes use of the cores between two samples: 0.1 ms each, once per log line."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        busy: Callable[[], float] = busy_seconds,
        own: Callable[[], float] = own_seconds,
        cores: int | None = None,
    ) -> None:
        self._clock, self._busy, self._own = clock, busy, own
        self._cores = cores or len(available_cores())
        self._before = self._look()

    def step_fields(self) -> dict[str, Any]:
        """`cpu_others`: the share of the cores that others used since the last call."""
        now, before = self._look(), self._before
        seconds, busy, own = (a - b for a, b in zip(now, before, strict=True))
        self._before = now
        if seconds <= 0:
            return {}
        return {"cpu_others": min(1.0, max(0.0, (busy - own) / (seconds * self._cores)))}

    def _look(self) -> tuple[float, float, float]:
        return self._clock(), self._busy(), self._own()

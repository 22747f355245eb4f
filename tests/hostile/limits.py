"""The real command line, started as a person would, under limits of time and memory."""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

MOST_MEMORY = 500_000_000
CPU_SECONDS = 30
"""A limit against hangs, not a measurement: what is refused takes 1 to 3 s of a core."""
_SPACE = 16 * 2**30


@dataclass(frozen=True)
class Ended:
    code: int
    text: str
    """Standard output and error."""
    memory: int
    """Largest resident size, in bytes."""
    seconds: float
    """Of a core."""

    @property
    def is_fault(self) -> bool:
        """Whether a person was shown that Expert itself failed."""
        return self.code == 1 or "Traceback" in self.text or "Internal error" in self.text


def limited(
    *words: str, folder: Path, limits: dict[int, int] | None = None, wait: float = 240
) -> Ended:
    """`expert WORDS` in a folder; `limits` are rlimits beyond those of CPU time and memory."""
    limits = {resource.RLIMIT_CPU: CPU_SECONDS, resource.RLIMIT_AS: _SPACE, **(limits or {})}

    def apply() -> None:
        for kind, most in limits.items():
            resource.setrlimit(kind, (most, most))

    log = folder / "output.txt"
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "200",
    }
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "expert", *words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            preexec_fn=apply,
        )
        descriptor = os.pidfd_open(process.pid)
        if not select.select([descriptor], [], [], wait)[0]:
            os.kill(process.pid, signal.SIGKILL)
        os.close(descriptor)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return Ended(
        process.returncode,
        log.read_text(encoding="utf-8", errors="replace"),
        used.ru_maxrss * 1024,
        used.ru_utime + used.ru_stime,
    )

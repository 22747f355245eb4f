"""The real command line, started as a person would, under limits of time and memory."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

MOST_MEMORY = 500_000_000
CPU_SECONDS = 30
"""A limit against hangs, not a measurement: what is refused takes 1 to 3 s of a core."""
_SPACE = 16 * 2**30
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
# A process counts the memory of the one that started it as its own; this one is small.
_LAUNCHER = """
import json, os, resource, select, signal, sys
request = json.loads(sys.argv[1])
pid = os.fork()
if not pid:
    for kind, most in request["limits"]:
        resource.setrlimit(kind, (most, most))
    os.execv(request["words"][0], request["words"])
if not select.select([os.pidfd_open(pid)], [], [], request["wait"])[0]:
    os.kill(pid, signal.SIGKILL)
_, status, used = os.wait4(pid, 0)
ended = os.waitstatus_to_exitcode(status), used.ru_maxrss * 1024, used.ru_utime + used.ru_stime
with open(sys.argv[2], "w") as stream:
    json.dump(ended, stream)
"""


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


def limited(*words: str, folder: Path, limits: dict[int, int] | None = None) -> Ended:
    """`expert WORDS` in a folder; `limits` are rlimits beyond those of CPU time and memory."""
    limits = {resource.RLIMIT_CPU: CPU_SECONDS, resource.RLIMIT_AS: _SPACE, **(limits or {})}

    log, told = folder / "output.txt", folder / "ended.json"
    environment = {**os.environ, **_ENVIRONMENT}
    words = (sys.executable, "-m", "expert", *words)
    request = json.dumps({"limits": list(limits.items()), "words": words, "wait": 240})
    with log.open("wb") as stream:
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", _LAUNCHER, request, str(told)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            check=True,
        )
    code, memory, seconds = json.loads(told.read_text())
    return Ended(code, log.read_text(encoding="utf-8", errors="replace"), memory, seconds)

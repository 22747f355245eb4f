"""Which process of a distributed run this one is, and the messages of processes that fail."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from expert.core.files import write_text_atomically
from expert.core.secrets import redacted

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where torch elastic expects the message of a failing process; it shows the earliest."""

SECONDS_LATER = 2.0


@dataclass(frozen=True)
class World:
    """Rank and size, read from the environment once by `parallel/launch.py` and nowhere else."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """The rank among the processes on this machine."""
    local_size: int = 1
    """The number of processes on this machine."""

    @property
    def is_first(self) -> bool:
        """Whether this process writes the shared files: events, checkpoints, the result."""
        return self.rank == 0

    @property
    def nodes(self) -> int:
        """The number of machines, which all run the same number of processes."""
        return max(1, self.size // self.local_size)


SINGLE_PROCESS = World()


def record_failure(
    message: str,
    *,
    exit_code: int,
    of_another: bool = False,
    env: Mapping[str, str] = os.environ,
) -> None:
    """Leave the message of a failing process for its launcher: torchrun, `expert train --gpus` or a
    batch script. Does nothing without a launcher; the first message is kept."""
    name = env.get(ERROR_FILE)
    if not name or Path(name).exists():
        return
    # torchrun reports the earliest as the cause, so consequences are dated later.
    when = time.time() + (SECONDS_LATER if of_another else 0.0)
    more = {"py_callstack": "", "timestamp": str(int(when)), "of_another": of_another}
    more |= {"exit_code": exit_code}
    failure = {"message": redacted(message), "extraInfo": more}
    with contextlib.suppress(OSError):  # the failure itself matters more
        write_text_atomically(Path(name), json.dumps({"message": failure}))

"""The processes that train together, and which of them this one is."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from expert.core.files import read_json, write_text_atomically
from expert.core.secrets import redacted

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where torch elastic wants the message of a process that fails; it shows the first of them."""

SECONDS_LATER = 2.0


@dataclass(frozen=True)
class World:
    """A value made once, from the environment, by `parallel/launch.py`; nobody else asks the
    environment for a rank."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Which of the processes on this machine."""
    local_size: int = 1
    """Processes on this machine."""

    @property
    def is_first(self) -> bool:
        """Whether this process writes what all of them share: events, checkpoints, the result."""
        return self.rank == 0

    @property
    def nodes(self) -> int:
        """Machines, each with as many processes."""
        return max(1, self.size // self.local_size)


ALONE = World()


@dataclass(frozen=True)
class Failure:
    """What a process wrote about its own end."""

    message: str
    time: float
    of_another: bool = False
    """It failed because another one has."""
    blamed: int | None = None
    """The rank that does not answer, where that is why."""


def record_failure(
    message: str,
    *,
    exit_code: int,
    of_another: bool = False,
    blamed: int | None = None,
    env: Mapping[str, str] = os.environ,
) -> None:
    """Leave the message of a process that is about to fail for whoever started it, torchrun,
    `expert train --gpus` or a batch script; nothing where nobody asks. The first message stays."""
    name = env.get(ERROR_FILE)
    if not name or Path(name).exists():
        return
    # torchrun takes the earliest for the cause of all.
    when = time.time() + (SECONDS_LATER if of_another else 0.0)
    more = {"py_callstack": "", "timestamp": str(when), "of_another": of_another}
    more |= {"exit_code": exit_code, "blamed": blamed}
    told = {"message": redacted(message), "extraInfo": more}
    with contextlib.suppress(OSError):  # the failure itself matters more
        write_text_atomically(Path(name), json.dumps({"message": told}))


def recorded_failure(file: Path) -> Failure | None:
    """What a process has left there; None where it ended without a message."""
    try:
        told = read_json(file)["message"]
        if isinstance(told, str):
            return Failure(told, file.stat().st_mtime)
        more = told["extraInfo"]
        of_another = more.get("of_another") is True
        blamed, when = more.get("blamed"), float(more["timestamp"])
        return Failure(str(told["message"]), when, of_another, blamed)
    except (OSError, ValueError, KeyError, TypeError):
        return None

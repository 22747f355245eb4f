"""What a rank does that is stopped in the middle of a save: put into the path of its Python as
`sitecustomize`, it sends SIGSTOP to itself when the first file of a checkpoint is opened.

`STOP_WHILE_SAVING` is the rank and the name of the checkpoint: `0 step-000020`.
"""

from __future__ import annotations

import os
import signal
import sys

RANK, _, NAME = os.environ.get("STOP_WHILE_SAVING", "").partition(" ")


def stop(event: str, given: tuple[object, ...]) -> None:
    if event == "open" and f".tmp-{NAME}" in str(given[0]):
        os.kill(os.getpid(), signal.SIGSTOP)


if NAME and os.environ.get("RANK") == RANK:
    sys.addaudithook(stop)

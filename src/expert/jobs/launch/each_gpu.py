"""`expert train --each-gpu`: one run per GPU; the next manifest starts when a GPU is free."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expert.core.errors import EXIT_MEANINGS, EXIT_OK, EXIT_RUN_FAILED
from expert.core.interrupts import WARNING, forwarding_signals
from expert.core.process import describe_exit, last_line
from expert.jobs.launch.ranks import PROGRAM
from expert.parallel.launch import FOLLOWED


@dataclass
class QueuedRun:
    """The run of one manifest and how it ended."""

    manifest: Path
    log: Path
    code: int | None = None
    """None: not started, because of a signal."""
    text: str = "stopped before it was started"
    result: dict[str, Any] = field(default_factory=dict)
    """The output of `expert train --json`."""


def train_each(
    manifests: Sequence[Path],
    words: Sequence[str],
    places: Sequence[Mapping[str, str]],
    *,
    tell: Callable[[str], None],
) -> tuple[list[QueuedRun], int]:
    """Train every manifest in its own process with the options `words`; returns the runs and the
    exit code of the first that failed. `places`: the environment of each GPU.

    A failed run does not stop the others. The first Ctrl-C or SIGTERM is passed on to all running
    ones, and no other is started; a second one kills them.
    """
    folder = Path(tempfile.mkdtemp(prefix="expert-each-gpu-"))
    runs = [QueuedRun(file, folder / f"{n}-{file.stem}.log") for n, file in enumerate(manifests)]
    waiting: queue.SimpleQueue[QueuedRun] = queue.SimpleQueue()
    for run in runs:
        waiting.put(run)
    running: dict[int, subprocess.Popen[bytes]] = {}
    stopped: list[int] = []

    def work(place: int) -> None:
        while not stopped:
            try:
                run = waiting.get_nowait()
            except queue.Empty:
                return
            tell(f"{run.manifest}: started on {place}; its log: {run.log}")
            env = {**os.environ, **places[place], FOLLOWED: str(os.getpid())}
            command = [*PROGRAM, "train", str(run.manifest), "--json", *words]
            # Its own session: Ctrl-C in the terminal reaches only this process.
            with run.log.open("wb") as log:
                process = running[place] = subprocess.Popen(
                    command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
            out, _ = process.communicate()
            code = process.returncode
            run.code = code if code in EXIT_MEANINGS else EXIT_RUN_FAILED
            run.text = "finished" if not code else f"{describe_exit(code)}: {last_line(run.log)}"
            with contextlib.suppress(ValueError):
                run.result = json.loads(out)
            tell(f"{run.manifest}: {run.text}")

    def forward(number: int) -> None:
        if number != WARNING:
            stopped.append(128 + number)
        for process in list(running.values()):
            if process.poll() is None:
                process.send_signal(number)

    def kill() -> None:
        for process in list(running.values()):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(places))]
    with forwarding_signals(forward, kill):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return runs, next((code for code in (*stopped, *(r.code for r in runs)) if code), EXIT_OK)

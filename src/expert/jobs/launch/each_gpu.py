"""`expert train --each-gpu`: one run per GPU; the next manifest starts when a GPU is free."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from expert.core.errors import (
    EXIT_DOES_NOT_FIT,
    EXIT_GATE_FAILED,
    EXIT_HANGUP,
    EXIT_HUNG,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_MEANINGS,
    EXIT_NO_SPACE,
    EXIT_OK,
    EXIT_RUN_FAILED,
    EXIT_SIGUSR1,
    EXIT_TERMINATED,
    EXIT_USAGE,
)
from expert.core.files import read_json
from expert.core.interrupts import WARNING, forwarding_signals
from expert.core.process import describe_exit, last_line
from expert.core.world import ERROR_FILE, recorded_failure
from expert.jobs.launch.local_ranks import PROGRAM
from expert.parallel.launch import PARENT_PIPE

SECONDS_BETWEEN_LOOKS = 0.2
WORST_FIRST = (
    *(EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_HANGUP, EXIT_SIGUSR1),
    *(EXIT_HUNG, EXIT_RUN_FAILED, EXIT_NO_SPACE),
    *(EXIT_DOES_NOT_FIT, EXIT_USAGE, EXIT_GATE_FAILED, EXIT_OK),
)

State = Literal["waiting", "running", "ended", "not started"]


@dataclass(kw_only=True)
class QueuedRun:
    """The run of one manifest and its progress."""

    manifest: Path
    name: str
    log: Path
    state: State = "waiting"
    place: int | None = None
    """Index of its GPU."""
    text: str = ""
    """The last line of its log, or how it ended."""
    code: int | None = None
    result: dict[str, Any] | None = None
    """The output of `expert train --json`."""
    began: float = 0.0
    seconds: float = 0.0


Show = Callable[[Sequence[QueuedRun]], None]


def train_each(
    manifests: Sequence[Path],
    words: Sequence[str],
    places: Sequence[Mapping[str, str]],
    *,
    show: Show,
) -> tuple[list[QueuedRun], int]:
    """Train every manifest in its own process with the options `words`; returns the runs and the
    most important exit code. `places`: the environment of each GPU. `show` gets all runs whenever
    something may have changed.

    A failed run does not stop the others. The first Ctrl-C or SIGTERM is passed on to all running
    ones, and no other is started; a second one kills them.
    """
    folder = Path(tempfile.mkdtemp(prefix="expert-each-gpu-"))
    names = _names(manifests)
    runs = [
        QueuedRun(manifest=file, name=name, log=folder / f"{place}-{name}.log")
        for place, (file, name) in enumerate(zip(manifests, names, strict=True))
    ]
    queue = _Queue(runs, words, places, folder)
    with contextlib.closing(queue), forwarding_signals(queue.stop, queue.kill):
        while queue.is_busy():
            queue.refresh()
            show(runs)
            time.sleep(SECONDS_BETWEEN_LOOKS)
    show(runs)
    code = queue.signal_exit_code or worst_exit_code(
        run.code for run in runs if run.code is not None
    )
    if code == EXIT_OK:
        shutil.rmtree(folder, ignore_errors=True)
    return runs, code


def worst_exit_code(codes: Iterable[int]) -> int:
    """The most important exit code."""
    present = set(codes)
    return next((code for code in WORST_FIRST if code in present), EXIT_OK)


class _Queue:
    """The running processes, by place."""

    def __init__(
        self,
        runs: Sequence[QueuedRun],
        words: Sequence[str],
        places: Sequence[Mapping[str, str]],
        folder: Path,
    ) -> None:
        self._runs, self._words, self._places, self._folder = runs, words, places, folder
        self._busy: dict[int, tuple[QueuedRun, subprocess.Popen[bytes]]] = {}
        self._pipe = os.pipe()
        self.signal_exit_code: int | None = None

    def is_busy(self) -> bool:
        return bool(self._busy) or any(run.state == "waiting" for run in self._runs)

    def refresh(self) -> None:
        """Update ended runs, and start waiting ones where a place is free."""
        for place, (run, process) in list(self._busy.items()):
            code = process.poll()
            if code is None:
                run.seconds = time.monotonic() - run.began
                run.text = last_line(run.log) or run.text
            else:
                del self._busy[place]
                self._ended(run, code)
        for run in self._runs:
            free = [place for place in range(len(self._places)) if place not in self._busy]
            if run.state == "waiting" and self.signal_exit_code is not None:
                run.state, run.text = "not started", "stopped before it was started"
            elif run.state == "waiting" and free:
                self._start(run, free[0])

    def _start(self, run: QueuedRun, place: int) -> None:
        run.state, run.place, run.began = "running", place, time.monotonic()
        env = {
            **os.environ,
            **self._places[place],
            ERROR_FILE: str(run.log.with_suffix(".error")),
            PARENT_PIPE: str(self._pipe[0]),
        }
        words = [*PROGRAM, "train", str(run.manifest), "--json", *self._words]
        with run.log.open("wb") as log, run.log.with_suffix(".json").open("wb") as result:
            process = subprocess.Popen(
                words,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=result,
                stderr=log,
                pass_fds=(self._pipe[0],),
                start_new_session=True,  # Ctrl-C only reaches this process
            )
        self._busy[place] = (run, process)

    def _ended(self, run: QueuedRun, code: int) -> None:
        run.state, run.seconds = "ended", time.monotonic() - run.began
        run.code = code if code in EXIT_MEANINGS else EXIT_RUN_FAILED
        with contextlib.suppress(OSError, ValueError):
            run.result = read_json(run.log.with_suffix(".json"))
        if code == EXIT_OK:
            run.text = "finished"
            return
        failure = recorded_failure(run.log.with_suffix(".error"))
        why = failure.message if failure is not None else last_line(run.log)
        run.text = f"{describe_exit(code)}: {why}".rstrip(": ")

    def stop(self, number: int) -> None:
        """Ask runs to save and stop, and start no others. SIGUSR1: as each manifest says."""
        if number != WARNING:
            self.signal_exit_code = 128 + number
        for _, process in self._busy.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def kill(self) -> None:
        for _, process in self._busy.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        for end in self._pipe:
            os.close(end)


def _names(manifests: Sequence[Path]) -> list[str]:
    """A short name for each: the file's if these are unique, else its folder's."""
    own = [path.stem for path in manifests]
    if len(set(own)) == len(own):
        return own
    folders = [path.absolute().parent.name for path in manifests]
    if len(set(folders)) == len(folders):
        return folders
    return [f"{name}-{place}" for place, name in enumerate(own)]

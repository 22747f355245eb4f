"""Ends a process that hangs, with its stack traces.

A thread rather than `faulthandler.dump_traceback_later`: that would also end a run which is
continued after Ctrl-Z, leave an empty file in every run folder, and exit with 1.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from expert.core.errors import EXIT_HUNG
from expert.core.files import write_text_atomically
from expert.core.interrupts import show_cursor
from expert.core.text import span
from expert.core.world import record_failure

SAVED_BYTES_PER_SECOND = 10e6
"""A slow network folder, to estimate how long reading or writing weights may take."""
NO_LIMIT = 30 * 86400.0
STARTING_PUSHES = 6
"""The first steps load and compile kernels: they may take FIRST_TIMES the limit."""
FIRST_TIMES, FIRST_SECONDS = 10, 1800.0
LONGEST_TIMES = 2
"""Later ones may take the limit plus this many times the longest step so far."""
BUSY_SHARE = 0.1
"""Of one core: a process computing on the CPU that uses more than this is working."""
PULSE_SECONDS = 0.25
PAUSE_SECONDS = 2.0
"""A thread that wakes up this much late was stopped, as by Ctrl-Z."""
REPORT_SECONDS = 2.0


class HangTimer:
    """Ends this process with EXIT_HUNG unless it is pushed forward in time."""

    def __init__(
        self, stacks: Path, report: Callable[[str], None], *, limit: float, computes: bool
    ) -> None:
        """`stacks`: the file for stack traces; `report`: gets the message before the process ends;
        `limit`: in seconds; `computes`: on the CPU, so that using it counts as progress."""
        self._stacks, self._report, self._limit = stacks, report, limit
        self._computes, self._pushes, self._longest = computes, 0, 0.0
        self._extra, self._since, self._used = 0.0, time.monotonic(), time.process_time()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-timer", daemon=True)
        self._thread.start()

    def push(self, extra: float | None = 0.0) -> None:
        """Start counting again; what comes next may take `extra` seconds beyond the limit. None: as
        what was going on."""
        now = time.monotonic()
        if self._pushes >= STARTING_PUSHES and not self._extra:
            self._longest = max(self._longest, now - self._since)
        self._pushes += 1
        self._extra = self._extra if extra is None else extra
        self._since, self._used = now, time.process_time()

    def close(self) -> None:
        self._over.set()
        self._thread.join(REPORT_SECONDS)

    def _patience(self) -> float:
        patience = self._limit + LONGEST_TIMES * self._longest
        if self._pushes < STARTING_PUSHES:
            patience = max(self._limit, min(FIRST_TIMES * self._limit, FIRST_SECONDS))
        return patience + self._extra

    def _watch(self) -> None:
        pulse = min(PULSE_SECONDS, self._limit / 10)
        looked = time.monotonic()
        while not self._over.wait(pulse):
            now = time.monotonic()
            if now - looked > pulse + PAUSE_SECONDS:
                self._since += now - looked
            looked, waited = now, now - self._since
            if waited <= self._patience():
                continue
            if self._computes and time.process_time() - self._used > BUSY_SHARE * waited:
                self._since, self._used = now, time.process_time()
                continue
            self._end(waited)

    def _end(self, waited: float) -> None:
        """End this process, whatever its main thread is doing."""
        fix = "--resume continues after the last checkpoint; hang_timeout sets the limit"
        text = f"the run hangs: it has made no progress for {span(waited)}  ({fix})"
        with tempfile.TemporaryFile("w+", encoding="utf-8") as stream:
            faulthandler.dump_traceback(stream, all_threads=True)
            stream.seek(0)
            stacks = stream.read()
        # The disk of the run folder may be what hangs.
        written: list[bool] = []

        def write() -> None:
            with contextlib.suppress(OSError):
                self._stacks.parent.mkdir(exist_ok=True)
                write_text_atomically(self._stacks, f"{text}\n\n{stacks}")
                written.append(True)

        _run_briefly(write)
        where = f"stack traces are in {self._stacks}" if written else stacks
        message = f"{text}\n  {where}"
        record_failure(message, exit_code=EXIT_HUNG)
        _run_briefly(lambda: self._report(text))
        for process in multiprocessing.active_children():  # a stopped one would stay
            process.kill()
        show_cursor()
        with contextlib.suppress(OSError):
            os.write(2, f"{message}\n".encode())
        os._exit(EXIT_HUNG)


def _run_briefly(run: Callable[[], None]) -> None:
    """Run something that may hang itself."""
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(REPORT_SECONDS)

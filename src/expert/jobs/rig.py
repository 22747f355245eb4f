"""The process that measures rungs, from outside: asked, listened to, and ended when it hangs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expert.insight.ladder import Measured
    from expert.jobs.rungs import Work

START_SECONDS = 180.0
"""For importing torch from a slow disk."""
SHOWN_LINES = 1
COUNTS = ("training_rows", "held_out_rows", "held_out_tokens")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What came of a rung: what was measured, or why nothing was."""

    measured: Measured | None = None
    because: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    """Rows and tokens that are the same for all rungs."""


class Rig:
    """Starts the process when it is needed, and again when it had to be ended."""

    def __init__(self, *, log: Path, command: Sequence[str] = ()) -> None:
        self._log = log
        self._command = list(command) or [sys.executable, "-m", "expert.jobs.rung_server"]
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.environment: dict[str, Any] = {}

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def measure(self, work: Work, tell: Callable[[str, int, int], None]) -> Seen:
        """Have one rung measured; whatever happens in there, this returns."""
        limit = float(work.pace["limit_seconds"])
        if self._process is not None and self._process.poll() is not None:
            self.stop()  # it ended between two rungs
        if self._process is None:
            tell("starting", 0, 0)
            if not self._start():
                return Seen(because=f"its process did not start: {self._last_words()}")
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asdict(work)) + "\n")
            self._process.stdin.flush()
        except OSError:
            self.stop()
            return Seen(because=f"its process ended: {self._last_words()}")
        found, ends_at = Seen(), time.monotonic() + limit
        while True:
            answer = self._next(ends_at)
            if answer is None:
                late = time.monotonic() >= ends_at
                self.stop()
                words = f"not done after {limit:.0f} s" if late else "its process ended"
                return found if found.measured else Seen(because=words)
            if "doing" in answer:
                tell(answer["doing"], answer["done"], answer["of"])
            elif "seen" in answer:
                found = _understood(answer["seen"])
            elif "failed" in answer:
                found = Seen(because=str(answer["failed"]))
            elif "ended" in answer:
                if found.measured is None and not found.because:
                    found = Seen(because=self._how_it_ended(int(answer["ended"])))
                return found

    def stop(self) -> None:
        """End the process with all that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        if os.name == "posix":
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                process.kill()
        else:
            process.kill()
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):  # what was never read is lost with its reader
                process.stdin.close()

    def _start(self) -> bool:
        # cuInit before a fork would spoil CUDA in it; this way torch asks NVML instead.
        environ = {
            **os.environ,
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                env=environ,
                start_new_session=os.name == "posix",
            )
        self._answers = queue.Queue()
        reader = threading.Thread(
            target=_read, args=(self._process.stdout, self._answers), daemon=True
        )
        reader.start()
        ready = self._next(time.monotonic() + START_SECONDS)
        if ready is None or "ready" not in ready:
            self.stop()
            return False
        self.environment = ready["environment"]
        return True

    def _next(self, ends_at: float) -> dict[str, Any] | None:
        """The next answer; None where none came in time or the process has ended."""
        try:
            return self._answers.get(timeout=max(0.0, ends_at - time.monotonic()))
        except queue.Empty:
            return None

    def _how_it_ended(self, code: int) -> str:
        if code < 0:
            name = signal.Signals(-code).name if -code in list(signal.Signals) else str(-code)
            return f"its process was ended by {name}"
        return f"its process left with {code}: {self._last_words()}"

    def _last_words(self) -> str:
        """The end of what was written to standard error."""
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return "it said nothing"
        told = [line.strip() for line in lines if line.strip()][-SHOWN_LINES:]
        return " ".join(told) or "it said nothing"


def _read(stream: IO[str], answers: queue.Queue[dict[str, Any] | None]) -> None:
    """In a thread: hand on every answer, and None at the end."""
    with stream, contextlib.suppress(ValueError):  # a line that was cut off
        for line in stream:
            answers.put(json.loads(line))
    answers.put(None)


def _understood(seen: dict[str, Any]) -> Seen:
    from expert.insight.ladder import Measured, spread_of

    counts = {key: int(seen.pop(key)) for key in COUNTS}
    if seen["loss"] is not None and not math.isfinite(seen["loss"]):
        seen["loss"] = None  # which JSON has no word for, and which agrees with nothing
    return Seen(measured=Measured(**seen, spread=spread_of(seen["windows"])), counts=counts)

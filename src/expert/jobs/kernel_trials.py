"""Every kernel tried on this machine, in a process that may die of it without harm."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Literal

State = Literal["works", "wrong", "failed", "crashed", "too slow", "absent", "not tried"]

SECONDS_A_TRIAL = 120.0
"""One trial may take this long: compiling for the first time takes 20 s, on a busy machine more."""
SECONDS_TO_START = 180.0
"""Importing torch from a cold network disk has been seen to take minutes."""
KEPT_ERROR_LINES = 3


@dataclass(frozen=True, kw_only=True)
class Tried:
    """How a kernel did."""

    name: str
    state: State
    because: str = ""
    off_by: float | None = None
    """Largest relative difference of outputs and gradients from float32."""
    tolerance: float | None = None
    first_seconds: float | None = None
    """The first time, with whatever had to be loaded or compiled."""
    seconds: float | None = None
    """Once more, forward, backward and the comparison."""

    @property
    def bad(self) -> bool:
        return self.state in ("wrong", "failed", "crashed", "too slow")


@dataclass(frozen=True, kw_only=True)
class Trials:
    """All trials, and what torch said about itself."""

    device: str
    tried: tuple[Tried, ...]
    torch: dict[str, Any] = field(default_factory=dict)
    """version, cuda (that torch was built for), available, architectures, capability."""
    note: str = ""
    """Why nothing was tried; empty where something was."""

    def of(self, name: str) -> Tried | None:
        return next((each for each in self.tried if each.name == name), None)


def not_tried(device: str, because: str) -> Trials:
    """No trials, and why not."""
    return Trials(device=device, tried=(), note=because)


def try_kernels(
    device: Literal["cuda", "cpu"],
    names: Sequence[str] | None = None,
    *,
    command: Sequence[str] = (sys.executable, "-m", "expert.jobs.kernel_runs"),
    seconds: float = SECONDS_A_TRIAL,
    tell: Callable[[str], None] = lambda name: None,
) -> Trials:
    """Run the trials named, or all; after one that ends its process the rest go on in a new one."""
    from expert.jobs.kernel_runs import TRIALS

    left = list(TRIALS if names is None else names)
    done: list[Tried] = []
    facts: dict[str, Any] = {}
    note = ""
    while left:
        child = _Child([*command, device, *left], seconds)
        reached, found = child.watch(tell)
        facts = child.facts or facts
        done += reached
        if found is not None:
            done.append(found)
        if not reached and found is None:
            note = child.trouble() or "the trials did not start"
            break
        left = [name for name in left if name not in {each.name for each in done}]
    done += [Tried(name=name, state="not tried", because=note) for name in left]
    return Trials(device=device, tried=tuple(done), torch=facts, note=note if not facts else "")


class _Child:
    """The process of the trials, read line by line with a time limit."""

    def __init__(self, command: list[str], seconds: float) -> None:
        self.facts: dict[str, Any] = {}
        self._seconds = seconds
        self._errors: list[str] = []
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # compilers start processes of their own, which hold the pipes
            # A kernel that fails without a synchronous launch is blamed on a later one.
            env={**os.environ, "CUDA_LAUNCH_BLOCKING": "1", "PYTHONFAULTHANDLER": "1"},
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._threads = []
        for stream, take in ((self._process.stdout, self._take), (self._process.stderr, self._err)):
            assert stream is not None
            self._threads.append(threading.Thread(target=take, args=(stream,), daemon=True))
        for thread in self._threads:
            thread.start()

    def watch(self, tell: Callable[[str], None]) -> tuple[list[Tried], Tried | None]:
        """The finished trials, and the one that ended the process, if one did."""
        reached: list[Tried] = []
        begun: str | None = None
        limit = time.monotonic() + SECONDS_TO_START
        try:
            while True:
                try:
                    line = self._lines.get(timeout=max(0.0, limit - time.monotonic()))
                except queue.Empty:
                    return reached, self._too_slow(begun)
                if line is None:
                    return reached, self._ended(begun)
                said = _read(line)
                if "facts" in said:
                    self.facts = said["facts"]
                elif "begin" in said:
                    begun = str(said["begin"])
                    tell(begun)
                    limit = time.monotonic() + self._seconds
                elif "result" in said:
                    reached.append(Tried(**said["result"]))
                    begun = None
        finally:
            self._kill()
            self._gone()

    def trouble(self) -> str:
        """The last words of the process."""
        return " / ".join(self._errors[-KEPT_ERROR_LINES:])

    def _too_slow(self, begun: str | None) -> Tried | None:
        if begun is None:
            self._errors.append(f"no answer for {SECONDS_TO_START:.0f} s")
            return None
        because = f"not done after {self._seconds:.0f} s"
        return Tried(name=begun, state="too slow", because=because)

    def _ended(self, begun: str | None) -> Tried | None:
        if begun is None:
            return None
        code = self._process.wait()
        self._kill()
        self._gone()
        if code < 0:
            how = f"the process was ended by {_signal_name(-code)}"
        else:
            how = f"the process ended with code {code}"
        last = self._errors[-1] if self._errors and code >= 0 else ""
        return Tried(name=begun, state="crashed", because=": ".join(filter(None, [how, last])))

    def _kill(self) -> None:
        """End the process and what it has started."""
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()

    def _gone(self) -> None:
        """Wait until the process has ended and its last words are read."""
        self._process.wait()
        for thread in self._threads:
            thread.join()

    def _take(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._lines.put(line)
        self._lines.put(None)

    def _err(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                if line.strip():
                    self._errors.append(line.strip())


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read(line: str) -> dict[str, Any]:
    """A line of ours; a library may write others."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}

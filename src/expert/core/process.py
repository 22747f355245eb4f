"""A child process that answers in lines of JSON, and is ended with everything it started; and the
standard error of this process.

Children are for work that may hang, crash or break a device: trying kernels, measuring benchmark
settings, running answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import site
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from expert.core.files import open_regular
from expert.core.links import open_plain

KEPT_LINES = 20
TAIL_BYTES = 4000
"""Bytes read from the end of a log to find its last line."""
LONGEST_LINE = 2**20
"""Longest line read from a process, in characters: its output is held in memory."""
_REQUIRED_VARIABLES = frozenset({"PATH", "PYTHONHOME", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH"})


class Child:
    """A running process; `next` waits for its output, with a deadline."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        clean: bool = False,
    ) -> None:
        """`log`: file to which its stderr is appended; without one only the last lines are kept.
        `env` is added to the environment; a `clean` environment has only what programs need to
        start."""
        self._log = _opened(log)
        self._last_lines: list[str] = []
        self._stop_lock = threading.RLock()  # a thread may stop it while another does
        whole = {**(clean_environment() if clean else os.environ), **(env or {})}
        self._process = _started(command, self._log, whole, cwd)
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        reader = (self._process.stdout, self._answers)
        threading.Thread(target=_read, args=reader, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, request: Mapping[str, Any]) -> bool:
        """Send a line; False if the process can no longer read it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            return False
        return True

    def next(self, ends_at: float) -> dict[str, Any] | None:
        """Its next message; None if it has ended, or is silent until `ends_at` on
        time.monotonic()."""
        try:
            return self._answers.get(timeout=max(0.0, ends_at - time.monotonic()))
        except queue.Empty:
            return None

    def stop(self) -> int:
        """Kill it and everything it started; returns its exit code, negative for a signal."""
        with self._stop_lock:
            if not self._log.closed:
                _kill(self._process)
                self._process.wait()
                assert self._process.stdin is not None
                with contextlib.suppress(OSError):  # input it never read is lost
                    self._process.stdin.close()
                self._last_lines = self._stderr_lines()
                self._log.close()
        return self._process.wait()

    def wait(self) -> int:
        """Wait until it ends by itself; returns its exit code."""
        return self._process.wait()

    def stderr_tail(self, lines: int = 1) -> str:
        """The end of what it wrote to standard error."""
        return " / ".join(self._stderr_lines()[-lines:])

    def _stderr_lines(self) -> list[str]:
        with self._stop_lock:
            if self._log.closed:
                return self._last_lines
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").splitlines()
        return [line.strip() for line in lines if line.strip()][-KEPT_LINES:]


def _started(
    command: Sequence[str], stderr: IO[bytes] | int, env: Mapping[str, str] | None, cwd: Path | None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=env,
        cwd=cwd,
        start_new_session=True,  # compilers start child processes
    )


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and everything it started, which may outlive it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


_running: set[subprocess.Popen[str]] = set()


def run_program(
    command: Sequence[str],
    given: str = "",
    *,
    seconds: float,
    env: Mapping[str, str] | None = None,
) -> tuple[str, str, int | None]:
    """Run a program on the input `given`: its stdout, stderr and exit code, which is None if it was
    killed at the time limit with everything it started. OSError if it cannot start."""
    process = _started(command, subprocess.PIPE, env, None)
    _running.add(process)
    try:
        return *process.communicate(given, timeout=seconds), process.returncode
    except subprocess.TimeoutExpired:
        _kill(process)
        return *process.communicate(), None
    finally:
        _running.discard(process)
        if process.poll() is None:
            _kill(process)
        process.wait()


def stop_programs() -> None:
    """Kill what `run_program` runs in other threads: Ctrl-C does not reach programs in sessions of
    their own, and their time limit may be long."""
    for process in list(_running):
        _kill(process)


def describe_exit(code: int) -> str:
    """An exit code, or the signal behind it, in words."""
    if code >= 0:
        return f"ended with code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"was killed by {known.get(-code, f'signal {-code}')}"


def last_line(log: Path) -> str:
    """The last line of a log that is not blank."""
    try:
        with open_regular(log) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def clean_environment() -> dict[str, str]:
    """The environment a program needs to start: no tokens, no addresses, no home."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.upper() in _REQUIRED_VARIABLES or name.startswith("LC_")
    }
    # Python's search path, made absolute: the program may start in another folder.
    named = [name for name in os.environ.get("PYTHONPATH", "").split(os.pathsep) if name]
    if named:
        kept["PYTHONPATH"] = os.pathsep.join(os.path.abspath(name) for name in named)
    # Packages installed with --user lie below a home folder that the program does not get.
    base = {"PYTHONUSERBASE": site.getuserbase()} if site.ENABLE_USER_SITE else {}
    return {**kept, **base, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"}


@contextlib.contextmanager
def filtered_stderr(start: bytes) -> Iterator[None]:
    """Delay stderr, including writes from C code, and drop the lines that begin with `start`. Keep
    the block short."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        before = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            held.seek(0)
            for line in held:
                if not line.startswith(start):
                    os.write(2, line)


def _opened(log: Path | None) -> IO[bytes]:
    if log is None:
        return tempfile.TemporaryFile()
    return open(open_plain(log, os.O_RDWR | os.O_APPEND | os.O_CREAT), "ab+")


def _read(stream: IO[str], answers: queue.Queue[dict[str, Any] | None]) -> None:
    """In a thread: queue every JSON line, then None. Other lines come from libraries."""
    with stream, contextlib.suppress(ValueError):
        while line := stream.readline(LONGEST_LINE):
            with contextlib.suppress(ValueError, RecursionError):
                fact = json.loads(line)
                if isinstance(fact, dict):
                    answers.put(fact)
    answers.put(None)

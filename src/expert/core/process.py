"""A process that answers in lines of JSON: asked, listened to, and ended with all that it started.

For what may hang, crash or take a whole device with it: kernels that are tried, rungs that are
measured, answers that are run.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import site
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from expert.core.files import open_regular
from expert.core.links import open_plain

KEPT_LINES = 20
TAIL_BYTES = 4000
"""Of a log that are read for its last line."""
LONGEST_LINE = 2**20
"""Characters of one line that is listened to: what a process says goes into memory here."""
_NEEDED_TO_START = frozenset(
    {"PATH", "PYTHONHOME", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"}
    | {"SYSTEMROOT", "SYSTEMDRIVE", "PATHEXT", "COMSPEC", "WINDIR", "NUMBER_OF_PROCESSORS"}
)


class Child:
    """A running process; `next` waits for what it says, and no longer than it is let."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        clean: bool = False,
    ) -> None:
        """`log`: where its errors are added; without one only the last of them are kept. `env` is
        added to the environment; a `clean` one has what programs need to start, and no more."""
        self._log = _opened(log)
        self._words: list[str] = []
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
            errors="replace",
            env={**(clean_environment() if clean else os.environ), **(env or {})},
            cwd=cwd,
            start_new_session=os.name == "posix",  # compilers start processes of their own
        )
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=_read, args=(self._process.stdout, self._said), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, request: Mapping[str, Any]) -> bool:
        """Send a line; False where nobody is there to read it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            return False
        return True

    def next(self, ends_at: float) -> dict[str, Any] | None:
        """The next thing it says; None where it has ended, or says nothing until that moment of
        time.monotonic()."""
        try:
            return self._said.get(timeout=max(0.0, ends_at - time.monotonic()))
        except queue.Empty:
            return None

    def stop(self) -> int:
        """End it and what it has started; its exit code, below zero for a signal."""
        _kill(self._process)
        code = self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # what was never read is lost with its reader
            self._process.stdin.close()
        self._words = self._told()
        self._log.close()
        return code

    def wait(self) -> int:
        """Its exit code, once it has ended by itself."""
        return self._process.wait()

    def last_words(self, lines: int = 1) -> str:
        """The end of what it wrote to standard error."""
        return " / ".join(self._told()[-lines:])

    def _told(self) -> list[str]:
        if self._log.closed:
            return self._words
        self._log.seek(0)
        told = self._log.read().decode(errors="replace").splitlines()
        return [line.strip() for line in told if line.strip()][-KEPT_LINES:]


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process and what it has started, which may still be there where it has ended itself."""
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def run_program(
    command: Sequence[str],
    given: str = "",
    *,
    seconds: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    leaves_nothing: bool = False,
) -> tuple[str, str, int | None]:
    """What a program says to what it is given, what it complains of, and its exit code; None where
    it takes longer, and is ended with all that it has started. OSError where it cannot start.
    `leaves_nothing`: what it has started is ended in any case."""
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=env,
        cwd=cwd,
        start_new_session=os.name == "posix",
    )
    try:
        return *process.communicate(given, timeout=seconds), process.returncode
    except subprocess.TimeoutExpired:
        _kill(process)
        return *process.communicate(), None
    finally:
        if leaves_nothing or process.poll() is None:
            _kill(process)
        process.wait()


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with code {code}"
    known = {each.value: each.name for each in signal.Signals}
    return f"was ended by {known.get(-code, f'signal {-code}')}"


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    try:
        with open_regular(log) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def clean_environment() -> dict[str, str]:
    """What a program needs to start: no token, no address, no home."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.upper() in _NEEDED_TO_START or name.startswith("LC_")
    }
    # Python's own search path, from wherever it is started.
    named = [name for name in os.environ.get("PYTHONPATH", "").split(os.pathsep) if name]
    if named:
        kept["PYTHONPATH"] = os.pathsep.join(os.path.abspath(name) for name in named)
    # Packages that were installed for one user lie below a home that it does not have.
    own = {"PYTHONUSERBASE": site.getuserbase()} if site.ENABLE_USER_SITE else {}
    return {**kept, **own, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"}


def _opened(log: Path | None) -> IO[bytes]:
    if log is None:
        return tempfile.TemporaryFile()
    return open(open_plain(log, os.O_RDWR | os.O_APPEND | os.O_CREAT), "ab+")


def _read(stream: IO[str], said: queue.Queue[dict[str, Any] | None]) -> None:
    """In a thread: hand on every line, and None at the end. A library may write other lines."""
    with stream, contextlib.suppress(ValueError):
        while line := stream.readline(LONGEST_LINE):
            with contextlib.suppress(ValueError, RecursionError):
                fact = json.loads(line)
                if isinstance(fact, dict):
                    said.put(fact)
    said.put(None)

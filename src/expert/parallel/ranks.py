"""Starts the ranks on one machine, and watches them until all have ended.

They meet at a store of this process, by the variables that torchrun sets: its own agent answers the
first failure with a SIGTERM to the other ranks, which interrupts a checkpoint being saved, waits 30
seconds for ranks that can never end, and drops exit codes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from expert.core.errors import (
    EXIT_HANGUP,
    EXIT_HUNG,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_MEANINGS,
    EXIT_OK,
    EXIT_RUN_FAILED,
    EXIT_SIGUSR1,
    EXIT_TERMINATED,
)
from expert.core.files import read_bytes, read_text
from expert.core.interrupts import WARNING, forwarding_signals, show_cursor
from expert.core.process import describe_exit
from expert.core.world import ERROR_FILE, recorded_failure
from expert.parallel.launch import (
    FAILURE_FILE,
    LAST_FAILURE,
    LAUNCH_FOLDER,
    PARENT_PIPE,
    RUN_FILE,
    early_log,
    rank_log,
)

POLL_SECONDS = 0.05
FAILURE_GRACE_SECONDS = 8.0
"""After a rank has died, the others notice, record what they must, and end. Then they are killed:
a rank waiting on a GPU for the dead one would wait forever."""
CAUSE_WAIT_SECONDS = 1.5
"""A rank that failed because of another one may end before that one."""
EXIT_GRACE_SECONDS = 60.0
"""Once rank 0 has ended, or any rank that was asked to stop, the others have nothing left to
save."""
STOPPED = (EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_HANGUP, EXIT_SIGUSR1)
RESTARTABLE_CODES = (EXIT_INTERNAL, EXIT_RUN_FAILED, EXIT_HUNG)
"""Failures that may not happen again, unlike a wrong command line or a full disk."""
_LAST_LINES = 200
_IS_ERROR = re.compile(r"error|exception|fatal|killed", re.IGNORECASE)

Command = Callable[[Path | None], list[str]]
"""The command of a rank; after a restart, with the run folder to resume."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    exit_code: int
    run: Path | None
    """The run folder, if rank 0 has created one."""
    failed: bool = False
    """A rank failed; otherwise all ended normally or were asked to stop."""


def start_ranks(
    command: Command,
    ranks: int,
    *,
    env: Mapping[str, str],
    max_restarts: int = 0,
    tell: Callable[[str], None],
) -> Ended:
    """Start the ranks on this machine and wait until all have ended.

    Rank 0 has this terminal; the others write to files. `env`: added to their environment. `tell`
    gets messages for the user immediately, above all which rank failed, before other ranks report
    that they lost it.
    """
    folder = Path(tempfile.mkdtemp(prefix="expert-ranks-"))
    started = None
    try:
        started = _Ranks(command, ranks, env, folder, tell)
        with contextlib.closing(started), forwarding_signals(started.stop, started.kill):
            started.run(max_restarts)
        return Ended(exit_code=started.exit_code, run=started.run_folder(), failed=started.failed)
    finally:
        if started is None or started.exit_code == EXIT_OK or started.run_folder() is not None:
            shutil.rmtree(folder, ignore_errors=True)  # otherwise the only logs are in it


@dataclass
class _Attempt:
    """The processes of one start by rank, and their exit codes."""

    folder: Path
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    failed: int | None = None
    """The rank that failed first."""
    ends_at: float | None = None
    """When the remaining ones are killed."""
    killed: set[int] = field(default_factory=set)

    def error_file(self, rank: int) -> Path:
        return self.folder / f"error-{rank}.json"

    def run_folder(self) -> Path | None:
        """The run folder that rank 0 has created, if it has."""
        try:
            return Path(read_text(self.folder / RUN_FILE))
        except OSError:
            return None

    def log_of(self, rank: int) -> Path:
        """The log of a rank: in the run folder, or from before that was created."""
        run = self.run_folder()
        later = rank_log(run, rank) if run is not None else None
        return later if later is not None and later.is_file() else early_log(self.folder, rank)

    @property
    def left(self) -> list[int]:
        return [rank for rank in self.processes if rank not in self.codes]

    def kill(self) -> None:
        """Kill the remaining ranks and their child processes."""
        for rank in self.left:
            self.killed.add(rank)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.processes[rank].pid, signal.SIGKILL)
        for rank in self.left:
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the driver
                self.codes[rank] = self.processes[rank].wait(FAILURE_GRACE_SECONDS)


class _Ranks:
    """All ranks, over all their starts."""

    def __init__(
        self,
        command: Command,
        ranks: int,
        env: Mapping[str, str],
        folder: Path,
        tell: Callable[[str], None],
    ) -> None:
        self._command, self._ranks, self._env = command, ranks, env
        self._folder, self._tell = folder, tell
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._attempts: list[_Attempt] = []
        self._stop_signal: int | None = None
        self._pipe = os.pipe()
        """Its write end closes when this process dies, however that happens."""
        self.exit_code = EXIT_RUN_FAILED

    def run(self, max_restarts: int) -> None:
        """Start all ranks, and again after a failure, until they have ended for good."""
        again = True
        try:
            while again:
                attempt = self._start()
                while not self._has_ended(attempt):
                    time.sleep(POLL_SECONDS)
                self._settle(attempt)
                again = self._should_restart(attempt, max_restarts)
        finally:
            self.kill()

    def _start(self) -> _Attempt:
        run, number = self.run_folder(), len(self._attempts)
        attempt = _Attempt(self._folder / f"start-{number}")
        attempt.folder.mkdir()
        self._attempts.append(attempt)
        words = self._command(run if number else None)
        for rank in range(self._ranks):
            env = {
                **os.environ,
                **self._env,
                "RANK": str(rank),
                "WORLD_SIZE": str(self._ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(self._ranks),
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_RUN_ID": self._folder.name,
                "TORCHELASTIC_RESTART_COUNT": str(number),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                ERROR_FILE: str(attempt.error_file(rank)),
                LAUNCH_FOLDER: str(attempt.folder),
                PARENT_PIPE: str(self._pipe[0]),
                **({LAST_FAILURE: str(run / FAILURE_FILE)} if run is not None else {}),
            }
            attempt.processes[rank] = self._started(words, env, early_log(attempt.folder, rank))
            if self._stop_signal is not None:  # while previous ranks were being started
                self._send(attempt, [rank], self._stop_signal)
        return attempt

    def _has_ended(self, attempt: _Attempt) -> bool:
        for rank in attempt.left:
            code = attempt.processes[rank].poll()
            if code is not None:
                attempt.codes[rank] = code
        self._report_first_failure(attempt)
        if attempt.left and attempt.ends_at is None and self._nothing_left_to_do(attempt):
            attempt.ends_at = time.monotonic() + EXIT_GRACE_SECONDS
        if attempt.left and attempt.ends_at is not None and time.monotonic() >= attempt.ends_at:
            attempt.kill()
            return True
        return not attempt.left

    # --- processes

    def _started(self, words: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a rank in its own session: a Ctrl-C in the terminal reaches only this process,
        which forwards it once."""
        options: dict[str, Any] = {"pass_fds": (self._pipe[0],), "start_new_session": True}
        if env["RANK"] == "0":
            return subprocess.Popen(words, env=env, **options)
        env |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}  # keeps its last output
        with log.open("ab") as stream:
            return subprocess.Popen(
                words,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                **options,
            )

    def stop(self, number: int) -> None:
        """Forward a signal to every rank: to save and stop, or only to save (SIGUSR1)."""
        if number != WARNING:
            self._stop_signal = number
        if self._attempts:
            self._send(self._attempts[-1], self._attempts[-1].left, number)

    def kill(self) -> None:
        if self._attempts:
            self._attempts[-1].kill()

    def close(self) -> None:
        for end in self._pipe:
            os.close(end)

    @staticmethod
    def _send(attempt: _Attempt, ranks: list[int], number: int) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                attempt.processes[rank].send_signal(number)

    # --- how they end

    def _report_first_failure(self, attempt: _Attempt) -> None:
        """Report the rank that failed first as soon as one has: others will soon report that they
        lost it."""
        failed = {r: c for r, c in attempt.codes.items() if c != EXIT_OK and not _was_stopped(c)}
        if attempt.failed is not None or not failed:
            return
        now = time.monotonic()
        attempt.ends_at = attempt.ends_at or now + FAILURE_GRACE_SECONDS
        notes = {rank: recorded_failure(attempt.error_file(rank)) for rank in failed}

        def order(rank: int) -> tuple[bool, bool, float, int]:
            note = notes[rank]
            # A rank that hangs leaves no message of its own.
            of_another = note is not None and note.of_another and note.blamed is None
            return failed[rank] >= 0, of_another, note.time if note else 0.0, rank

        first = min(failed, key=order)
        waited = now - (attempt.ends_at - FAILURE_GRACE_SECONDS) >= CAUSE_WAIT_SECONDS
        if order(first)[1] and attempt.left and not waited:
            return
        attempt.failed = first
        self._tell(self._failure_in_words(attempt, first))

    def _nothing_left_to_do(self, attempt: _Attempt) -> bool:
        if self._stop_signal is not None:
            return 0 in attempt.codes  # saving may take long
        return 0 in attempt.codes or any(map(_was_stopped, attempt.codes.values()))

    def _settle(self, attempt: _Attempt) -> None:
        """The exit code of all, and who did not exit."""
        own = {r: code for r, code in sorted(attempt.codes.items()) if r not in attempt.killed}
        if attempt.failed is not None:
            self.exit_code = documented_exit_code(own[attempt.failed])
        else:  # the first that is not zero
            self.exit_code = documented_exit_code(next(filter(None, own.values()), EXIT_OK))
        for rank in sorted(attempt.killed) if attempt.failed is None else ():
            self._tell(f"rank {rank} did not exit and was killed")

    def _should_restart(self, attempt: _Attempt, max_restarts: int) -> bool:
        code = attempt.codes[attempt.failed] if attempt.failed is not None else self.exit_code
        if self._stop_signal is not None or (code >= 0 and self.exit_code not in RESTARTABLE_CODES):
            return False
        this = len(self._attempts)
        if this > max_restarts:
            return False
        show_cursor()
        self._tell(f"starting all ranks again ({this} of {max_restarts})")
        return True

    def _failure_in_words(self, attempt: _Attempt, rank: int) -> str:
        code, log = attempt.codes[rank], attempt.log_of(rank)
        note = recorded_failure(attempt.error_file(rank))
        blamed = note.blamed if note is not None else None
        if note is not None and blamed is not None and blamed in attempt.left:
            return f"{note.message}{_where(attempt.log_of(blamed))}"
        message = note.message if note is not None else _last_error(log)
        head = f"rank {rank} {describe_exit(code)}"
        if code == -signal.SIGKILL and not message:
            message = "the system ends processes like this when its memory is full: see dmesg"
        shown = note is not None and not note.of_another
        if rank == 0 and (shown or (note is None and code >= 0)):
            return head  # its message is already in this terminal
        return f"{f'{head}: {message}'.rstrip(': ')}{_where(log)}"

    @property
    def failed(self) -> bool:
        return bool(self._attempts) and self._attempts[-1].failed is not None

    def run_folder(self) -> Path | None:
        """The newest run folder created by a rank 0."""
        named = (attempt.run_folder() for attempt in reversed(self._attempts))
        return next((run for run in named if run is not None), None)


def documented_exit_code(code: int) -> int:
    """The documented exit code for that of a rank; negative ones are signals."""
    if code < 0:
        return 128 - code if 128 - code in STOPPED else EXIT_RUN_FAILED
    return code if code in EXIT_MEANINGS else EXIT_RUN_FAILED


def _was_stopped(code: int) -> bool:
    return documented_exit_code(code) in STOPPED


def _where(log: Path) -> str:
    return f"\n  its log: {log}" if log.is_file() and log.stat().st_size else ""


def _last_error(log: Path) -> str:
    """The last line of a log that mentions an error, else its last line."""
    try:
        lines = read_bytes(log).decode("utf-8", "replace").splitlines()[-_LAST_LINES:]
    except OSError:
        return ""
    lines = [line.strip() for line in lines if line.strip()]
    return next((line for line in reversed(lines) if _IS_ERROR.search(line)), (lines or [""])[-1])

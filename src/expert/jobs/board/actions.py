"""Actions of the pages: start `expert` commands as processes that outlive the board, and interrupt
them."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import psutil

from expert.core.errors import ExpertError
from expert.core.links import open_plain, refuse_links
from expert.core.publish import is_alive
from expert.core.rundir import Holder, RunFolder, holder_of, process_of
from expert.jobs.board.folders import BoardItem
from expert.parallel.launch import LAUNCH_FOLDER
from expert.run.stored.resume_command import NO_FILE, resume_command_of

TOKEN = "EXPERT_BOARD_TOKEN"
FOLDER = ".expert-board"
"""Folder below a root of the board, with logs of its jobs."""
MAX_RUNNING = 6
TAIL_BYTES = 60_000


class ActionRefused(ExpertError):
    """A refused action; the message is shown on the page."""


@dataclass(frozen=True, kw_only=True)
class StartedCommand:
    """A command started by a page: train, validate or export."""

    id: str
    what: str
    about: str
    """The name of its run or manifest."""
    subject: str
    """The id of that run or manifest on the board."""
    command: tuple[str, ...]
    holder: Holder
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def words(self) -> str:
        return shlex.join(["expert", *self.command])

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.process.poll()

    @property
    def state(self) -> str:
        return {0: "finished", None: "running"}.get(self.exit_code, "failed")

    def output(self) -> str:
        """The end of its log."""
        try:
            with open(open_plain(self.log, os.O_RDONLY), "rb") as stream:
                stream.seek(max(0, os.fstat(stream.fileno()).st_size - TAIL_BYTES))
                return stream.read(TAIL_BYTES).decode("utf-8", "replace")
        except (OSError, ExpertError):
            return ""


def state_folder(root: Path) -> Path:
    """The board's folder below a root, made if missing. Rows and commands are nobody else's."""
    folder = root / FOLDER
    refuse_links(folder, below=root)
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)  # an earlier board made it readable by others
    return folder


class Jobs:
    """All commands that this board started."""

    def __init__(self) -> None:
        self._known: dict[str, StartedCommand] = {}
        self._lock = threading.Lock()

    def all(self) -> list[StartedCommand]:
        """The newest first."""
        return list(reversed(self._known.values()))

    def get(self, name: str) -> StartedCommand | None:
        return self._known.get(name)

    def start(self, what: str, command: Sequence[str], found: BoardItem) -> StartedCommand:
        """Start `expert COMMAND`, about a run or a manifest, as a process independent of the
        board."""
        with self._lock:
            running = [job for job in self._known.values() if job.exit_code is None]
            if len(running) >= MAX_RUNNING:
                raise ActionRefused(f"{MAX_RUNNING} commands are running already  (stop one)")
            if any(job.subject == found.id and job.what == what for job in running):
                raise ActionRefused(f"expert {what} of {found.name} is running already")
            folder = state_folder(found.root)
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
            log = folder / f"{name}.log"
            with open(open_plain(log, flags, 0o600), "wb") as stream:
                process = spawn(command, stream)
            holder = Holder(pid=process.pid, host=socket.gethostname(),
                            since=time.strftime("%Y-%m-%d %H:%M:%S"),
                            process=process_of(process.pid))  # fmt: skip
            job = self._known[name] = StartedCommand(
                id=name, what=what, about=found.name, subject=found.id, command=tuple(command),
                holder=holder, process=process, log=log)  # fmt: skip
            return job


def resume_command(run: Path) -> list[str]:
    """The resume command that `expert watch` shows."""
    folder = RunFolder.open(run)
    if trainer_of(folder) is not None:
        raise ActionRefused(f"{run.name} is running")
    words = shlex.split(resume_command_of(folder))
    words = words[words.index("train") :]
    if NO_FILE in words:
        fix = "put it back, or resume it with expert train --manifest FILE --resume"
        raise ActionRefused(f"{run.name}: its manifest is not where it was  ({fix})")
    return words


def export_command(found: BoardItem, *, merged: bool) -> list[str]:
    """Export to an unused name in exports/ below the root."""
    parent = found.root / "exports"
    refuse_links(parent, below=found.root)
    name = f"{found.name}-{'merged' if merged else 'adapter'}"
    names = (name, *(f"{name}-{number}" for number in range(2, 1000)))
    to = next(path for one in names if not (path := parent / one).exists())
    return ["export", str(found.path), "--to", str(to), *(["--merged"] if merged else [])]


def trainer_of(folder: RunFolder) -> Holder | None:
    """The process that is training in a run folder, if it is on this machine."""
    holder = holder_of(folder.lock_file)
    return holder if holder is not None and is_running_process(holder) else None


def is_running_process(holder: Holder) -> bool:
    """Whether a process is still running; another process with the same pid does not count."""
    if holder.host != socket.gethostname() or not is_alive(holder.pid):
        return False
    return bool(holder.process) and process_of(holder.pid) == holder.process


def interrupt(holder: Holder) -> None:
    """Send Ctrl-C: the first lets training finish its step and save, the second ends it
    immediately. Another process with the same pid gets no signal."""
    if holder.host != socket.gethostname():
        raise ActionRefused(f"it is running on {holder.host}: stop it there")
    try:
        # The descriptor stays that process, whatever gets its number.
        with open(os.pidfd_open(holder.pid), "rb", buffering=0) as opened:
            if not is_running_process(holder) or holder.pid == os.getpid():
                raise ActionRefused("it is no longer running")
            signal.pidfd_send_signal(opened.fileno(), signal.SIGINT)
    except ProcessLookupError:
        raise ActionRefused("it is no longer running") from None
    except PermissionError:
        raise ActionRefused(f"{holder.name} belongs to another user") from None


def stop_run(run: Path) -> None:
    """Send Ctrl-C to the trainer of a run, which holds its lock."""
    folder = RunFolder(run)
    holder = holder_of(folder.lock_file)
    if holder is None:
        raise ActionRefused(f"{run.name} is not running")
    interrupt(launcher_of(holder) if is_running_process(holder) else holder)


def launcher_of(rank: Holder) -> Holder:
    """The process that a Ctrl-C in the terminal would reach: the launcher of `expert train --gpus`,
    which passes it on to all ranks, or the trainer itself."""
    with suppress(psutil.Error):
        process = psutil.Process(rank.pid)
        parent = process.parent() if LAUNCH_FOLDER in process.environ() else None
        if parent is not None and "train" in parent.cmdline():
            return replace(rank, pid=parent.pid, process=process_of(parent.pid))
    return rank


def spawn(words: Sequence[str], log: IO[bytes], **env: str) -> subprocess.Popen[bytes]:
    """`expert WORDS` as a process that the board's terminal does not affect."""
    return subprocess.Popen(
        [sys.executable, "-m", "expert", *words], stdin=subprocess.DEVNULL, stdout=log,
        stderr=subprocess.STDOUT, env={**environment(), **env}, start_new_session=True,
    )  # fmt: skip


def environment() -> dict[str, str]:
    """The environment of a command: the board's without its token, with output for a page."""
    kept = {name: value for name, value in os.environ.items() if name != TOKEN}
    return {**kept, "NO_COLOR": "1", "COLUMNS": "110", "PYTHONUNBUFFERED": "1"}

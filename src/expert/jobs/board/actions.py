"""Actions of the pages: start `expert` commands as processes that outlive the board, and interrupt
them."""

from __future__ import annotations

import json
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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import psutil

from expert.core.errors import ExpertError
from expert.core.files import write_text_atomically
from expert.core.links import open_plain, refuse_links
from expert.core.publish import is_alive
from expert.core.rundir import Holder, RunFolder, holder_of, process_of
from expert.core.stored_json import read_object_or_empty
from expert.core.text import json_text
from expert.jobs.board.folders import BoardItem
from expert.parallel.launch import LAUNCH_FOLDER
from expert.run.stored.resume_command import NO_FILE, resume_command_of

TOKEN = "EXPERT_BOARD_TOKEN"
FOLDER = ".expert-board"
"""Folder below a root of the board, with records and logs of its jobs."""
MAX_RUNNING = 6
TAIL_BYTES = 60_000
KEPT_JOBS = 100


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
    """Its process, recognised again after a restart of the board."""
    folder: Path = field(compare=False)

    @property
    def words(self) -> str:
        return shlex.join(["expert", *self.command])

    @property
    def exit_code(self) -> int | None:
        """None while it runs, or if it ended while no board was running."""
        code = read_object_or_empty(self.folder / f"{self.id}.end.json").get("code")
        return code if isinstance(code, int) else None

    @property
    def is_running(self) -> bool:
        return is_running_process(self.holder)

    @property
    def state(self) -> str:
        if self.exit_code is None and self.is_running:
            return "running"
        return {0: "finished", None: "ended"}.get(self.exit_code, "failed")

    def output(self) -> str:
        """The end of its log."""
        try:
            with open(open_plain(self.folder / f"{self.id}.log", os.O_RDONLY), "rb") as stream:
                stream.seek(max(0, os.fstat(stream.fileno()).st_size - TAIL_BYTES))
                return stream.read(TAIL_BYTES).decode("utf-8", "replace")
        except (OSError, ExpertError):
            return ""

    def keep_exit_code(self, process: subprocess.Popen[bytes]) -> None:
        """Run in a thread: wait for the process and record how it ended."""
        code = process.wait()
        with suppress(OSError):
            _write_private(self.folder / f"{self.id}.end.json", json.dumps({"code": code}))


def state_folder(root: Path) -> Path:
    """The board's folder below a root, made if missing. Rows and commands are nobody else's."""
    folder = root / FOLDER
    refuse_links(folder, below=root)
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)  # an earlier board made it readable by others
    return folder


def _write_private(path: Path, text: str) -> None:
    """Write a new file that only its owner may read: its mode is kept when it is replaced."""
    os.close(open_plain(path, os.O_WRONLY | os.O_CREAT, 0o600))
    write_text_atomically(path, text)


class Jobs:
    """All commands started in these folders, including those of earlier boards."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._known: dict[str, StartedCommand] = {}
        self._lock = threading.Lock()
        for folder in (root / FOLDER for root in roots):
            if folder.is_symlink():
                continue
            records = [path for path in folder.glob("*.json") if not path.stem.endswith(".end")]
            for path in sorted(records)[-KEPT_JOBS:]:
                record: dict[str, Any] = read_object_or_empty(path)
                with suppress(KeyError, TypeError, ValueError):  # not a record
                    words = {key: str(record[key]) for key in ("what", "about", "subject")}
                    command = tuple(str(word) for word in record["command"])
                    self._known[path.stem] = StartedCommand(
                        id=path.stem, command=command, holder=Holder(**record["holder"]),
                        folder=folder, **words,
                    )  # fmt: skip

    def all(self) -> list[StartedCommand]:
        """The newest first."""
        return sorted(self._known.values(), key=lambda job: job.holder.since, reverse=True)

    def get(self, name: str) -> StartedCommand | None:
        return self._known.get(name)

    def start(self, what: str, command: Sequence[str], found: BoardItem) -> StartedCommand:
        """Start `expert COMMAND`, about a run or a manifest, as a process independent of the
        board."""
        with self._lock:
            running = [job for job in self._known.values() if job.is_running]
            if len(running) >= MAX_RUNNING:
                raise ActionRefused(f"{MAX_RUNNING} commands are running already  (stop one)")
            if any(job.subject == found.id and job.what == what for job in running):
                raise ActionRefused(f"expert {what} of {found.name} is running already")
            folder = state_folder(found.root)
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
            with open(open_plain(folder / f"{name}.log", flags, 0o600), "wb") as log:
                process = spawn(command, log)
            holder = Holder(pid=process.pid, host=socket.gethostname(),
                            since=time.strftime("%Y-%m-%d %H:%M:%S"),
                            process=process_of(process.pid))  # fmt: skip
            job = StartedCommand(id=name, what=what, about=found.name, subject=found.id,
                      command=tuple(command), holder=holder, folder=folder)  # fmt: skip
            record = {**asdict(job), "folder": None}
            _write_private(folder / f"{name}.json", json_text(record) + "\n")
            self._known[name] = job
        threading.Thread(target=job.keep_exit_code, args=(process,), daemon=True).start()
        return job


def resume_command(run: Path) -> list[str]:
    """The resume command that `expert watch` shows."""
    folder = RunFolder.open(run)
    if trainer_of(folder) is not None:
        raise ActionRefused(f"{run.name} is running")
    words = shlex.split(resume_command_of(folder))
    words = words[words.index("train") :]
    if NO_FILE in words:
        raise ActionRefused(
            f"{run.name}: its manifest is not where it was  (put it back, or resume it with expert "
            "train --manifest FILE --resume)"
        )
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

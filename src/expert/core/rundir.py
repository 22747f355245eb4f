"""The folder of one run: its name, files and lock, how runs and checkpoints are found, and whether
its validation is about the current weights."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from expert.core.errors import EXIT_RUN_FAILED, ExpertError
from expert.core.events import check_event_file_size, plain
from expert.core.files import sync_folder
from expert.core.hashed import hash_file, refuse_damaged, write_hashed
from expert.core.links import LinkRefused, open_plain, refuse_links, refuse_links_inside
from expert.core.publish import weights_hash
from expert.core.resources import disk_full_error, disk_full_message
from expert.core.secrets import known_secrets
from expert.core.stored_json import read_object
from expert.core.text import json_text

_RUN = re.compile(r"(.+)-(\d{8}-\d{6})(?:-(\d+))?")
_CHECKPOINT = re.compile(r"step-(\d{6,})")


class RunFolderError(ExpertError):
    """A run folder that cannot be created, opened or written, with the reason."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The holder of a run's lock; `process` distinguishes processes that share a number."""

    pid: int
    host: str
    since: str
    process: str

    @property
    def name(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class _Place:
    name: str

    def __get__(self, run: RunFolder, _: type) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """One run: runs/<expert>-<time>/."""

    path: Path
    manifest = _Place("manifest.json")
    plan = _Place("plan.json")
    environment = _Place("environment.json")
    events = _Place("events.jsonl")
    checkpoints = _Place("checkpoints")
    final = _Place("final")
    validation = _Place("validation.json")
    lock_file = _Place(".lock")

    @classmethod
    def create(
        cls, parent: Path, expert: str, *, clock: Callable[[], float] = time.time
    ) -> RunFolder:
        """Create a folder named after the expert and the time; a taken name gets -2, -3, …"""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(clock()))
        name = f"{_folder_name(expert)}-{stamp}"
        number = 1
        try:
            parent.mkdir(parents=True, exist_ok=True)
            while True:
                path = parent / (name if number == 1 else f"{name}-{number}")
                try:
                    path.mkdir()
                except FileExistsError:
                    number += 1
                else:
                    sync_folder(parent)
                    return cls(path)
        except OSError as error:
            raise unwritable(parent, error) from error

    @classmethod
    def open(cls, path: Path) -> Self:
        """The run folder at `path`; anything else is an error."""
        folder = cls(path)
        if not path.is_dir():
            raise RunFolderError(f"{path}: there is no such folder  (name a folder under runs/)")
        if not folder.was_started:
            raise RunFolderError(
                f"{path}: is not a run folder: it has no {folder.plan.name}  (name a folder under "
                "runs/)"
            )
        folder.refuse_unsafe_files()
        return folder

    def refuse_unsafe_files(self) -> None:
        """Raise if the folder holds what no run writes, as one from someone else may. Links, pipes
        and devices would redirect writes and deletions; endless events would never be read."""
        refuse_links_inside(self.path)
        with suppress(OSError):  # reported when they are read
            check_event_file_size(self.events)

    def refuse_damaged(self) -> None:
        """Raise if a file that answers and later steps depend on does not match its hash."""
        for file in (self.plan, self.manifest, self.path / "vocabulary.json"):
            advice = f"remove {hash_file(file).name} if you changed it yourself, else train again"
            refuse_damaged(file, advice)

    @property
    def was_started(self) -> bool:
        """Whether the plan exists, without which nothing can be resumed or shown."""
        return self.plan.is_file()

    def remove_if_unused(self) -> None:
        """Remove the folder if no run started in it: only the lock is created before the plan."""
        with suppress(OSError):
            if {path.name for path in self.path.iterdir()} <= {self.lock_file.name}:
                self.lock_file.unlink(missing_ok=True)
                self.path.rmdir()

    def write_json(self, name: str, data: Any) -> Path:
        """Write a file of the folder atomically; secrets become "***"."""
        assert Path(name).name == name, f"{name} is not a plain file name"
        text = json_text(plain(data, known_secrets()))
        write_hashed(self.path / name, text + "\n")
        return self.path / name

    def refuse_missing(self) -> None:
        """Raise if the folder was moved or removed during training: a checkpoint written now would
        be a second, useless run folder."""
        if not self.was_started:
            gone = RunFolderError(
                f"{self.path}: was moved or removed while training  (put it back, then --resume)"
            )
            gone.exit_code = EXIT_RUN_FAILED
            raise gone

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other trainers out."""
        if not self.path.is_dir():
            raise RunFolderError(f"{self.path}: there is no such folder  (name a folder of runs)")
        self.refuse_unsafe_files()
        with suppress(OSError):  # missing or not writable: training continues
            os.close(open_plain(self.events, os.O_RDWR))
        with _held(self.lock_file):
            yield


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def checkpoint_step(name: str) -> int | None:
    """The step in a checkpoint's folder name; None for any other name."""
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) if match and name == checkpoint_name(int(match[1])) else None


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """All folders named like checkpoints, complete or not, sorted by step."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(
        (step, path) for path in paths if (step := checkpoint_step(path.name)) is not None
    )


def runs_in(parent: Path, expert: str | None = None) -> list[RunFolder]:
    """The runs in a folder that have a plan, of all experts or one, newest first by the time in
    their names."""
    wanted = None if expert is None else _folder_name(expert)
    runs = []
    for path in parent.iterdir() if parent.is_dir() else ():
        match = _RUN.fullmatch(path.name)
        if match and wanted in (None, match[1]) and RunFolder(path).was_started:
            runs.append((match[2], int(match[3] or 1), path.name))
    return [RunFolder(parent / name) for _, _, name in sorted(runs, reverse=True)]


def latest_run(parent: Path, expert: str | None = None) -> RunFolder | None:
    """The newest run in a folder of runs, or None. The user did not name it, so it must not be a
    link."""
    run = next(iter(runs_in(parent, expert)), None)
    if run is not None:
        refuse_links(run.path, below=parent)
        run.refuse_unsafe_files()
    return run


def named_manifest(started: Mapping[str, Any]) -> str:
    """The manifest named by a start event, relative to here; FILE if it no longer exists."""
    recorded = started.get("manifest")
    if not isinstance(recorded, str) or not Path(recorded).is_file():
        return "FILE"
    path, here = Path(recorded), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else recorded


def _folder_name(expert: str) -> str:
    """The expert's name as a safe folder name."""
    return re.sub(r"[^\w.-]+", "-", expert).strip("-.")[:100] or "expert"


def relocated_path(recorded: str, *, runs_then: str, runs_now: Path) -> Path:
    """Where a recorded path is now; if it no longer exists, where it would be.

    Data, tokens and runs of an expert are moved together, so the recorded path relative to the
    folder of runs still holds from the current one.
    """
    then = Path(recorded)
    beside = Path(os.path.normpath(runs_now.absolute() / os.path.relpath(recorded, runs_then)))
    if beside.exists():
        return beside
    # A path that was never beside the runs was not moved with them.
    was_beside = Path(runs_then).parent in then.parents
    return then.absolute() if then.exists() or not was_beside else beside


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Hold a lock file with this process in it, removed on exit. Workers forked in the meantime do
    not keep the lock."""
    from filelock import FileLock, Timeout  # takes 20 ms to import

    lock = FileLock(path, fallback_to_soft=False)
    try:
        os.close(open_plain(path, os.O_RDWR | os.O_CREAT, 0o644))  # refuses a link
        lock.acquire(blocking=False)
        pid, since = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S")
        holder = Holder(pid=pid, host=socket.gethostname(), since=since, process=process_of(pid))
        # Without O_TRUNC the rest of a longer entry would remain and make the file invalid.
        with open(open_plain(path, os.O_RDWR | os.O_TRUNC), "w", encoding="utf-8") as stream:
            json.dump(asdict(holder), stream)
    except Timeout:
        other = holder_of(path)
        by = f"{other.name} since {other.since}" if other else "another"
        raise RunFolderError(
            f"{path.parent}: is in use by {by}  (stop that process first; if it is surely gone, "
            f"remove {path})"
        ) from None
    except OSError as error:
        lock.release()
        raise unwritable(path.parent, error) from error
    try:
        yield
    finally:
        with suppress(OSError):  # still locked: a process that has opened it finds it unlinked
            path.unlink()
        lock.release()


@contextmanager
def waiting_lock(path: Path, doing: str, waits: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock beside a file or folder; while another process has it, wait and report through
    `waits` what that one is `doing`.

    The lock ends with its process. It only saves duplicate work and is not needed for correctness.
    """
    from filelock import FileLock, Timeout

    file = path.with_name(f".{path.name}.lock")
    lock = FileLock(file, fallback_to_soft=False)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(open_plain(file, os.O_RDWR | os.O_CREAT, 0o644))
        try:
            lock.acquire(blocking=False)
        except Timeout:
            waits(f"waiting while another process is {doing}")
            lock.acquire()
    except OSError:
        pass  # a read-only file system: the same work may be done twice
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                file.unlink()
        lock.release()


def holder_of(path: Path) -> Holder | None:
    """The holder named in a lock file; None if the file is missing or invalid."""
    try:
        holder = read_object(path)
        return Holder(
            pid=int(holder["pid"]),
            host=str(holder["host"]),
            since=str(holder.get("since", "")),
            process=str(holder.get("process", "")),
        )
    except (OSError, ValueError, KeyError, TypeError, LinkRefused):
        return None


def unwritable(folder: Path, error: OSError) -> ExpertError:
    """The error for a folder in which a run cannot be kept."""
    said = disk_full_message(error)
    if said:
        return disk_full_error(folder, said)
    return RunFolderError(
        f"{folder}: cannot be written: {error.strerror}  (fix that, or set another folder in "
        "training.config.output_dir)"
    )


def process_of(pid: int) -> str:
    """Boot id and start time of a process; "" if the system does not provide them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The second field is the command in brackets and may contain anything; the 22nd is the start.
    return f"{boot}:{fields.rpartition(')')[2].split()[19]}"


# --- verdicts ------------------------------------------------------------------------------------


def outdated(found: Mapping[str, Any], folder: RunFolder) -> str:
    """Why a validation.json is not about the current weights; "" if it is."""
    step, weights = found.get("step"), found.get("weights")
    state = folder.final
    if isinstance(step, int) and not isinstance(step, bool):
        state = folder.checkpoints / checkpoint_name(step)
    if weights == weights_hash(state):
        return ""
    return "is about earlier weights: the run continued since"

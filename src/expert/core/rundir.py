"""The folder of one run: its name, what lies where in it, who may write into it, how runs and
checkpoints are found, and whether its verdict speaks for the weights it has now."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from expert.core.errors import EXIT_RUN_FAILED, ExpertError
from expert.core.events import plain, refuse_endless
from expert.core.files import sync_folder
from expert.core.hashed import hash_file, refuse_damaged, write_hashed
from expert.core.links import LinkRefused, open_plain, refuse_links, refuse_links_inside
from expert.core.publish import DONE, damage, fingerprint, is_alive
from expert.core.room import no_room, said_no_room
from expert.core.secrets import known_secrets
from expert.core.stored_json import read_object
from expert.core.text import json_text

NAMING_TRIES = 20
NAMING_WAIT_SECONDS = 0.05
TURN_WAIT_SECONDS = 0.2

_NO_LOCKS_HERE = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
_RUN = re.compile(r"(.+)-(\d{8}-\d{6})(?:-(\d+))?")
_CHECKPOINT = re.compile(r"step-(\d{6,})")


class RunFolderError(ExpertError):
    """A run folder that cannot be made, opened or written, with the reason."""


class RunInUse(RunFolderError):
    """Another trainer is at work in this run folder."""


class RunFolderMoved(RunFolderError):
    """The folder of a run that trains was renamed, or removed with what is in it."""

    exit_code = EXIT_RUN_FAILED

    def __init__(self, path: Path, now: Path | None) -> None:
        """`now`: where it lies, where it was renamed."""
        self.now = now
        what = "removed, or emptied," if now is None else f"renamed to {now}"
        super().__init__(f"{path}: was {what} while training")


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds the lock of a run; `process` tells two processes with one number apart."""

    pid: int
    host: str
    since: str
    process: str

    @property
    def name(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def may_live(self) -> bool:
        """False where it is known to be gone: of this machine, and no longer there."""
        return self.host != socket.gethostname() or is_alive(self.pid)

    def is_at_work(self, *, has_locks: bool) -> bool:
        """Whether this process lives although its lock could be taken.

        Some file systems give a lock to everyone, so a living holder of this machine counts. One
        of another machine counts only where there are no locks at all.
        """
        if self.host != socket.gethostname():
            return not has_locks
        if not is_alive(self.pid):
            return False
        process = process_of(self.pid)
        if not process or not self.process:  # not Linux: a number may have been given away
            return not has_locks
        return process == self.process and self.pid != os.getpid()


@dataclass(frozen=True)
class _Place:
    """A file or folder of a run."""

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
        """A new folder, named after the expert and the time; a taken name gets -2, -3, …"""
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
            said = said_no_room(error)
            if said:
                raise no_room(parent, said) from error
            raise RunFolderError(
                f"{parent}: no run folder can be made here: {error.strerror}  (fix that, or set "
                "another folder in training.config.output_dir)"
            ) from error

    @classmethod
    def open(cls, path: Path) -> Self:
        """The run folder that lies there; anything else is an error."""
        folder = cls(path)
        if not path.is_dir():
            raise RunFolderError(f"{path}: there is no such folder  (name a folder under runs/)")
        if not folder.was_started:
            raise RunFolderError(
                f"{path}: is not a run folder: it has no {folder.plan.name}  (name a folder under "
                "runs/)"
            )
        folder.refuse_foreign()
        return folder

    def refuse_foreign(self) -> None:
        """Raise where the folder holds what no run writes: it may come from somebody else. What is
        written or deleted here must not be elsewhere, by a link, a pipe or a device; events
        without end would be read without end."""
        refuse_links_inside(
            self.path,
            instead="a run that shall lie on another disk is put there with --output FOLDER",
        )
        with suppress(OSError):  # whoever reads them says so
            refuse_endless(self.events)

    def refuse_damaged(self) -> None:
        """Raise where a file that the run was made by has other bytes than were written: answers
        and later steps follow from it."""
        for file in (self.plan, self.manifest, self.path / "vocabulary.json"):
            advice = f"remove {hash_file(file).name} if you changed it yourself, else train again"
            refuse_damaged(file, advice)

    @property
    def was_started(self) -> bool:
        """Whether the plan of a run is there, without which nothing can be resumed or shown."""
        return self.plan.is_file()

    def remove_if_unused(self) -> None:
        """Take the folder away where no run began in it; anything else is left alone.

        Its lock is made before the plan is written down, and nothing else.
        """
        with suppress(OSError):
            if {path.name for path in self.path.iterdir()} <= {self.lock_file.name}:
                self.lock_file.unlink(missing_ok=True)
                self.path.rmdir()

    def write_json(self, name: str, data: Any) -> Path:
        """Write a file of the folder as a whole; secrets become "***"."""
        assert Path(name).name == name, f"{name} is not a plain file name"
        text = json_text(plain(data, known_secrets()), indent=2)
        write_hashed(self.path / name, text + "\n", trusts_old=True)
        return self.path / name

    @contextmanager
    def held_open(self) -> Iterator[Callable[[], None]]:
        """A function that raises RunFolderMoved where the folder, once its plan is written, is no
        longer what lies under its name. Windows lets nobody rename a folder in use."""
        try:
            handle = os.open(self.path, os.O_RDONLY)
        except OSError:
            yield lambda: None
            return

        def check() -> None:
            try:
                there = os.path.samestat(os.stat(self.path), os.fstat(handle))
                if there and self.was_started:
                    return
            except (FileNotFoundError, NotADirectoryError):
                there = False
            except OSError:  # a disk that does not answer: the next write says so
                return
            now = None if there else _path_of(handle)
            raise RunFolderMoved(self.path, now)

        try:
            yield check
        finally:
            os.close(handle)

    @contextmanager
    def locked(self) -> Iterator[Holder | None]:
        """Keep other trainers out; gives the dead holder whose lock was taken over, if any."""
        if not self.path.is_dir():
            raise RunFolderError(f"{self.path}: there is no such folder  (name a folder of runs)")
        self.refuse_foreign()
        with suppress(OSError):  # not there yet, or not to be written to: training continues
            os.close(open_plain(self.events, os.O_RDWR))
        with held(self.lock_file) as previous:
            yield previous


def _path_of(handle: int) -> Path | None:
    """Where an open folder lies now; None where it was removed, or the system does not tell."""
    try:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        return path if os.path.samestat(path.stat(), os.fstat(handle)) else None
    except OSError:
        return None


def checkpoint_name(step: int) -> str:
    """The name of the folder of a step's checkpoint."""
    return f"step-{step:06d}"


def checkpoint_step(name: str) -> int | None:
    """The step of a checkpoint by the name of its folder; None where that is another name."""
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) if match and name == checkpoint_name(int(match[1])) else None


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """Everything that is named like a checkpoint, by its step, whole or not."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(
        (step, path) for path in paths if (step := checkpoint_step(path.name)) is not None
    )


def runs_in(parent: Path, expert: str | None = None) -> list[RunFolder]:
    """The runs of a folder, or those of one expert, that have a plan, newest first by the time in
    their names."""
    wanted = None if expert is None else _folder_name(expert)
    found = []
    for path in parent.iterdir() if parent.is_dir() else ():
        match = _RUN.fullmatch(path.name)
        if match and wanted in (None, match[1]) and RunFolder(path).was_started:
            found.append((match[2], int(match[3] or 1), path.name))
    return [RunFolder(parent / name) for _, _, name in sorted(found, reverse=True)]


def latest_run(parent: Path, expert: str | None = None) -> RunFolder | None:
    """The newest run in a folder of runs; None without one. It was found, not named by the user:
    it must be the folder itself, not a link to another one."""
    run = next(iter(runs_in(parent, expert)), None)
    if run is not None:
        refuse_links(run.path, below=parent, instead="or name the folder that is meant")
        run.refuse_foreign()
    return run


def finished_beside(folder: RunFolder) -> RunFolder | None:
    """The newest run of the same expert in the same folder that has a finished expert."""
    match = _RUN.fullmatch(folder.path.absolute().name)
    runs = runs_in(folder.path.parent, match[1]) if match else []
    return next((run for run in runs if not damage(run.final, contents=False)), None)


def named_manifest(started: Mapping[str, Any]) -> str:
    """The manifest that the event of a start names, from here; FILE where it is not there."""
    told = started.get("manifest")
    if not isinstance(told, str) or not Path(told).is_file():
        return "FILE"
    here = Path.cwd()
    return str(Path(told).relative_to(here)) if Path(told).is_relative_to(here) else told


def _folder_name(expert: str) -> str:
    """The name without what could leave the folder or trouble a shell."""
    return re.sub(r"[^\w.-]+", "-", expert).strip("-.")[:100] or "expert"


def found_again(recorded: str, *, runs_then: str, runs_now: Path) -> Path:
    """Where a recorded path lies now; where nothing lies there any more, where it would.

    Data, tokens and runs of an expert are moved together: the way from the folder of its runs,
    as recorded, leads from where the run lies now to the same place. Earlier versions recorded
    both as seen from the folder the run was started in, which nobody knows any more.
    """
    then = Path(recorded)
    if then.is_absolute() != Path(runs_then).is_absolute():
        return then.absolute()
    try:
        way = os.path.relpath(recorded, runs_then)
    except ValueError:  # on another drive of a Windows machine, to which no way leads
        return then.absolute()
    beside = Path(os.path.normpath(runs_now.absolute() / way))
    if beside.exists():
        return beside
    # What never lay beside the runs was not moved with them.
    was_beside = Path(runs_then).parent in then.parents
    return then.absolute() if then.exists() or not was_beside else beside


@contextmanager
def held(path: Path) -> Iterator[Holder | None]:
    """Hold a lock file, which is gone afterwards; gives the dead holder that left it behind.

    Workers that are forked meanwhile do not keep the lock.
    """
    from filelock import FileLock, Timeout  # 20 ms, for who trains

    lock = FileLock(path, fallback_to_soft=False)
    has_locks = True
    try:
        os.close(open_plain(path, os.O_RDWR | os.O_CREAT, 0o644))  # refuses what is a link by now
        lock.acquire(blocking=False)
    except Timeout:
        raise _in_use(path, _named(path)) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise _unwritable(path, error) from error
        has_locks = False
    try:
        previous = holder_of(path)
        if previous is not None and previous.is_at_work(has_locks=has_locks):
            raise _in_use(path, previous)
        with _signed(path):
            yield previous
    finally:
        lock.release()


@contextmanager
def _signed(path: Path) -> Iterator[None]:
    """Name this process in a lock file that it holds; the file is gone afterwards."""
    own = _write(path)
    try:
        yield
    finally:
        with suppress(OSError):  # still locked: whoever opened it by then finds it unlinked
            if os.path.samestat(own, path.stat()):
                path.unlink()


@contextmanager
def in_turn(path: Path, doing: str, waits: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock beside a file or folder; while another process has it, wait, and say for whom
    and what it is `doing`.

    The lock ends with its process. Where a file system has no locks, or is only read, nobody is
    waited for: what is done in turn must be right without it, and saves work by it.
    """
    from filelock import FileLock, Timeout

    file = path.with_name(f".{path.name}.lock")
    lock, told = FileLock(file, fallback_to_soft=False), None
    with ExitStack() as ours:
        ours.callback(lock.release)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            os.close(open_plain(file, os.O_RDWR | os.O_CREAT, 0o644))
            while not lock.is_locked:
                try:
                    lock.acquire(blocking=False)
                except Timeout:
                    holder = holder_of(file)
                    if holder is not None and holder != told and holder.may_live:
                        told = holder
                        waits(f"waiting while another process is {doing}: {holder.name}")
                    time.sleep(TURN_WAIT_SECONDS)
            ours.enter_context(_signed(file))
        except (OSError, RunFolderError) as error:
            if getattr(error, "errno", None) in _NO_LOCKS_HERE:
                waits(f"{path.parent}: no file locks here; other processes may do the same work")
        yield


def holder_of(path: Path) -> Holder | None:
    """Who a lock file names; None where it is not there or says nothing."""
    try:
        told = read_object(path)
        return Holder(
            pid=int(told["pid"]),
            host=str(told["host"]),
            since=str(told.get("since", "")),
            process=str(told.get("process", "")),
        )
    except (OSError, ValueError, KeyError, TypeError, LinkRefused):
        return None


def _named(path: Path) -> Holder | None:
    """Who holds a lock that is taken; it may be about to write its name."""
    for _ in range(NAMING_TRIES):
        if (holder := holder_of(path)) is not None:
            return holder
        time.sleep(NAMING_WAIT_SECONDS)
    return None


def _write(path: Path) -> os.stat_result:
    """Name this process as the holder."""
    pid = os.getpid()
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    holder = Holder(pid=pid, host=socket.gethostname(), since=since, process=process_of(pid))
    try:
        # Without O_TRUNC the end of a longer name stays behind, and the file then names nobody.
        with open(open_plain(path, os.O_RDWR | os.O_TRUNC), "w", encoding="utf-8") as stream:
            json.dump(asdict(holder), stream)
            return os.fstat(stream.fileno())
    except OSError as error:
        raise _unwritable(path, error) from error


def _in_use(path: Path, holder: Holder | None) -> RunInUse:
    by = f"{holder.name} since {holder.since}" if holder else "another"
    return RunInUse(
        f"{path.parent}: is in use by {by}  (stop that one first; if it is surely gone, "
        f"remove {path})"
    )


def _unwritable(path: Path, error: OSError) -> ExpertError:
    said = said_no_room(error)
    if said:
        return no_room(path.parent, said)
    return RunFolderError(
        f"{path.parent}: cannot be written: {error.strerror}  (mend that, or copy the run "
        "folder to a place that can)"
    )


def process_of(pid: int) -> str:
    """Boot and start time of a process; "" where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The second field is the command in brackets and may hold anything; start time is the 22nd.
    return f"{boot}:{fields.rpartition(')')[2].split()[19]}"


# --- verdicts ------------------------------------------------------------------------------------


def weights_of(state: Path) -> str:
    """One sha256 for the weights of `final` or of a checkpoint; "" where there are none."""
    return fingerprint(state, ".safetensors")


def outdated(found: Mapping[str, Any], folder: RunFolder) -> str:
    """Why a validation.json says nothing of the weights there are now; "" where it does."""
    step, told = found.get("step"), found.get("weights")
    state = folder.final
    if isinstance(step, int) and not isinstance(step, bool):
        state = folder.checkpoints / checkpoint_name(step)
    if isinstance(told, str):
        return (
            "" if told == weights_of(state) else "is about earlier weights: the run continued since"
        )
    # A file of an earlier version does not say what it judged, and times alone may come from
    # copying the run. A pass is doubted by them, a failure is not: nothing gets out by a copy.
    gate = found.get("gate")
    failed = isinstance(gate, Mapping) and gate.get("passed") is False
    if failed or _written_at(state / DONE) <= _written_at(folder.validation):
        return ""
    return "is older than the weights and does not say which it judged"


def _written_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0

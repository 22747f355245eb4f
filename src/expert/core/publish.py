"""Folders that are complete or absent: filled under a temporary name, listed in DONE, renamed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import stat
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from expert.core.errors import ExpertError
from expert.core.files import read_bytes, sha256_of, sync_file, sync_folder
from expert.core.stored_json import parse_json

DONE = "DONE"
MAX_DONE_BYTES = 16_000_000  # about 100,000 files
SHOWN_FAULTS = 5
# sha256 releases the GIL and was measured at 1.2 GB/s per core.
HASHING_THREADS = 4
SMALL_BYTES = 4_000_000  # hashed in 3 ms, faster than threads start

_LEFTOVER = re.compile(r"\.tmp-([^@]+)(?:@(.+))?-(\d{1,10})")
_BROUGHT = re.compile(r"\.gitattributes|(\.git|\.cache/huggingface)/.+")
"""Files that the hub adds to an uploaded folder, and its download to a copy."""
_sound: dict[Path, list[tuple[str, int, int, int]]] = {}  # folders this process has verified
_in_use: set[Path] = set()  # temporary folders this process is filling


class PublishError(ExpertError):
    """A folder that cannot be published, with the reason."""


@contextmanager
def publishing(target: Path) -> Iterator[Path]:
    """Yield a private folder to fill; on exit it is sealed with DONE and renamed to `target`.

    The order makes a power cut harmless: the files reach the disk first, then DONE that lists them,
    then the folder, then the name. An exception leaves nothing behind.
    """
    if os.path.lexists(target) and not (target / DONE).is_file():
        raise PublishError(
            f"{target}: already exists and was never finished  (move it away, then try again)"
        )
    _make_folder(target.parent)
    # Machines sharing a folder may publish from processes with the same number.
    temporary = target.with_name(f".tmp-{target.name}@{socket.gethostname()}-{os.getpid()}")
    own = temporary.absolute()
    assert own not in _in_use, f"{target} is being published by another thread"
    shutil.rmtree(temporary, ignore_errors=True)  # left by an earlier process with this number
    temporary.mkdir()
    _in_use.add(own)
    try:
        yield temporary
        listed = _seal(temporary)
        _name(temporary, target, listed)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # absent after the rename
        _in_use.discard(own)


def damage(folder: Path, *, contents: bool = True, more_files: bool = False) -> str:
    """What is wrong with a published folder, in words; "" if it is as it was published.

    Without `contents` only names and sizes are compared, and no weights are read. `more_files`
    accepts files that were added since.
    """
    wrong = faults(folder, contents=contents, more_files=more_files)
    more = f"; and {len(wrong) - SHOWN_FAULTS} more" if len(wrong) > SHOWN_FAULTS else ""
    return "; ".join(wrong[:SHOWN_FAULTS]) + more


def faults(folder: Path, *, contents: bool = True, more_files: bool = False) -> list[str]:
    """Like `damage`, with one sentence per file."""
    try:
        listed, files = _listing(folder), _files_of(folder)
    except (OSError, PublishError) as error:
        return [_words(error)]
    if not listed:  # nothing is published empty, and an empty list would accept any folder
        return [f"{DONE} lists no file"]
    files.pop(DONE, None)
    wrong = [f"{name} is missing" for name in listed if name not in files]
    if not more_files:
        more = [name for name in files if name not in listed and not _BROUGHT.fullmatch(name)]
        wrong += [f"{name} is not listed in {DONE}" for name in more]
    present = [name for name in listed if name in files]
    resized = {name for name in present if files[name].st_size != listed[name]["size"]}
    for name in sorted(resized):
        size, expected = files[name].st_size, listed[name]["size"]
        wrong.append(f"{name} has {size} bytes instead of {expected}")
    if contents:
        sound = {name: files[name] for name in present if name not in resized}
        for name, sha256 in _hashes(folder, sound).items():
            if isinstance(sha256, OSError):
                wrong.append(f"{name} cannot be read: {sha256.strerror}")
            elif sha256 != listed[name]["sha256"]:
                wrong.append(f"{name} does not match its hash in {DONE}")
    return wrong


def cached_damage(folder: Path) -> str:
    """Like `damage`, for a folder that others may add files to: this process hashes its files again
    only if a size, time or inode has changed."""
    try:
        states = [(str(path), path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    except OSError as error:
        return _words(error)
    stamps = [(name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in states]
    if _sound.get(folder) == stamps:
        return ""
    fault = damage(folder, more_files=True)
    if not fault:
        _sound[folder] = stamps
    return fault


def listed_hash(folder: Path, name: str) -> str:
    """The sha256 of a file in DONE; "" if it is not listed or DONE cannot be read."""
    try:
        return str(_listing(folder).get(name, {}).get("sha256", ""))
    except (OSError, PublishError):
        return ""


def weights_hash(state: Path) -> str:
    """One sha256 for the weights of `final` or of a checkpoint, computed from DONE without reading
    them. "" if the folder is not published or has no weights."""
    try:
        listed = _listing(state)
    except (OSError, PublishError):
        return ""
    weights = {name: one["sha256"] for name, one in listed.items() if name.endswith(".safetensors")}
    return _of_all(weights) if weights else ""


def content_hash(folder: Path, names: Collection[str]) -> str:
    """The same for any folder, from the files themselves; OSError if one cannot be read."""
    hashes = _hashes(folder, {name: (folder / name).stat() for name in sorted(names)})
    for value in hashes.values():
        if isinstance(value, OSError):
            raise value
    return _of_all(hashes)


def _of_all(hashes: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def remove_leftovers(parent: Path, *, alone: bool = False, name: str | None = None) -> list[Path]:
    """Remove temporary folders, all or those of one `name`, whose process is gone; returns them.

    `alone`: nobody else can be publishing here (the caller holds the lock of the run), so leftovers
    go even if another process now has their process number.
    """
    removed = []
    for path in sorted(parent.glob(".tmp-*")):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        maker, is_here = int(match[3]), match[2] in (None, socket.gethostname())
        if path.absolute() in _in_use or name not in (None, match[1]):
            continue
        if alone or (is_here and (maker == os.getpid() or not is_alive(maker))):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def is_alive(pid: int) -> bool:
    """Whether a process with this number exists on this machine."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it belongs to another user
        pass
    return True


def _make_folder(folder: Path) -> None:
    """Make a folder and its parents so that their names survive a power cut."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def _seal(folder: Path) -> dict[str, dict[str, Any]]:
    """Sync every file to disk, then DONE with their sizes and hashes, then the folders."""
    files = _files_of(folder)
    assert DONE not in files, f"{DONE} is written here"
    readable = stat.S_IMODE(folder.stat().st_mode) & 0o444
    for name, status in files.items():
        # Some writers (safetensors 0.8) create files that only their owner can read.
        os.chmod(folder / name, stat.S_IMODE(status.st_mode) | readable)
        sync_file(folder / name)
    listed = {}
    for name, sha256 in _hashes(folder, files).items():
        if isinstance(sha256, OSError):
            raise sha256
        listed[name] = {"size": files[name].st_size, "sha256": sha256}
    done = folder / DONE
    with done.open("w", encoding="utf-8", newline="\n") as stream:
        json.dump(listed, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())
    for inner in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        sync_folder(inner)
    sync_folder(folder)
    return listed


def _name(temporary: Path, target: Path, listed: dict[str, dict[str, Any]]) -> None:
    """Rename the sealed folder; an identical one that is already there is as good."""
    try:
        os.rename(temporary, target)
    except OSError:
        if not os.path.lexists(target):
            raise
        fault = damage(target)
        if fault:
            raise PublishError(
                f"{target}: already exists and is damaged: {fault}  (move it away)"
            ) from None
        if _listing(target) != listed:
            raise PublishError(
                f"{target}: already exists with other content  (it is never overwritten; move "
                "it away, or use another name)"
            ) from None
    sync_folder(target.parent)


def _files_of(folder: Path) -> dict[str, os.stat_result]:
    """Every file under the folder by its relative POSIX path; devices and links are errors, except
    links of a snapshot in the hub's cache that stay inside the folder of its model."""
    files, own = {}, folder.resolve()
    is_snapshot = own.parent.name == "snapshots" and own.parents[1].name.startswith("models--")
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        name = path.relative_to(folder).as_posix()
        is_link = is_snapshot and stat.S_ISLNK(status.st_mode)
        if is_link and path.resolve().is_relative_to(own.parents[1]):
            status = path.stat()
        if stat.S_ISREG(status.st_mode):
            files[name] = status
        elif path.is_symlink() or not stat.S_ISDIR(status.st_mode):
            raise PublishError(f"{name} is not a plain file")
    return files


def _listing(folder: Path) -> dict[str, dict[str, Any]]:
    """The contents of DONE; PublishError if it is missing or invalid."""
    if not folder.is_dir():
        raise PublishError("it is not a folder" if os.path.lexists(folder) else "it does not exist")
    done = folder / DONE
    if not done.is_file():
        empty = next(folder.iterdir(), None) is None
        raise PublishError("it is empty" if empty else f"{DONE} is missing, it was never finished")
    if done.stat().st_size > MAX_DONE_BYTES:
        raise PublishError(f"{DONE} is too large to be a listing")
    try:
        listed = parse_json(read_bytes(done, MAX_DONE_BYTES))
    except ValueError:
        raise PublishError(f"{DONE} is damaged") from None
    kinds = {"size": int, "sha256": str}
    if not isinstance(listed, dict) or not all(
        isinstance(entry, dict) and {key: type(value) for key, value in entry.items()} == kinds
        for entry in listed.values()
    ):
        raise PublishError(f"{DONE} is damaged")
    return listed


def _hashes(folder: Path, files: dict[str, os.stat_result]) -> dict[str, str | OSError]:
    """The sha256 of every file, or why it could not be read."""

    def hashed(name: str) -> str | OSError:
        try:
            return sha256_of(folder / name)
        except OSError as error:
            return error

    if sum(status.st_size for status in files.values()) < SMALL_BYTES:
        return {name: hashed(name) for name in files}
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        return dict(zip(files, threads.map(hashed, files), strict=True))


def _words(error: OSError | PublishError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename} cannot be read: {error.strerror}"
    return str(error)

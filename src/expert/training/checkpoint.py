"""Checkpoints: complete or absent, verified when written and read, and never unpickled.

A checkpoint is a published folder, checkpoints/step-000400/: one safetensors file for each group
of tensors, state.json, and DONE with every file's size and sha256. The newest is found by its
number, not by a file time or a pointer that could be wrong.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from expert.core.errors import ExpertError
from expert.core.files import sync_folder
from expert.core.hashed import free_name
from expert.core.publish import damage, publishing
from expert.core.resources import (
    TOO_LITTLE,
    DiskFull,
    disk_full_error,
    disk_full_message,
    free_bytes,
)
from expert.core.rundir import checkpoint_name, checkpoints_in
from expert.core.stored_json import read_object
from expert.parallel.engine import Groups

FORMAT = 1
STATE = "state.json"
SPACE_FACTOR = 1.2  # required free space, as a multiple of a checkpoint's size
HEADER_BYTES_PER_TENSOR = 256  # a name of 150 characters, type, shape and offsets as JSON
STATE_BYTES = 65_536
SHOWN_CHARACTERS = 60


class CheckpointError(ExpertError):
    """A checkpoint cannot be written or used: where, what, and what to do."""


class DifferentRun(CheckpointError):
    """A checkpoint of a run with other settings; `started_with`: the options of that run."""

    def __init__(self, text: str, started_with: Sequence[tuple[str, Any]] = ()) -> None:
        super().__init__(text)
        self.started_with = tuple(started_with)


def save_checkpoint(folder: Path, step: int, tensors: Groups, state: Mapping[str, Any]) -> Path:
    """Write, read back and verify a checkpoint; returns its folder.

    An existing name is an error unless the content is the same. A full disk leaves nothing behind.
    """
    path = folder / checkpoint_name(step)
    try:
        with publishing(path) as temporary:
            head = {"format": FORMAT, "step": step, "groups": sorted(tensors)}
            text = json.dumps({**head, "state": _encoded(state)}, indent=2, allow_nan=False)
            (temporary / STATE).write_text(text + "\n", encoding="utf-8")
            for group, named in tensors.items():
                _write_group(temporary / _group_file(group), named)
    except (OSError, SafetensorError) as error:
        said = disk_full_message(error)
        if not said:
            raise CheckpointError(
                f"{path}: cannot be written: {error}  (fix that; earlier checkpoints are intact)"
            ) from error
        raise _disk_full(path, bytes_needed(tensors), said) from error
    fault = damage(path)
    if fault:
        raise CheckpointError(
            f"{path}: was written but does not read back: {fault}  (the disk may be failing; save "
            "to another one with training.config.output_dir)"
        )
    return path


def load_checkpoint(path: Path) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Tensors by group on the CPU, and the state; raises unless the checkpoint is intact."""
    fault = damage(path)
    if fault:
        raise _unusable(path, fault)
    try:
        head = _head(path)
        groups = {group: _read_group(path / _group_file(group)) for group in head["groups"]}
        return groups, _decoded(head["state"])
    except (OSError, ValueError, TypeError) as error:
        raise _unusable(path, str(error)) from error


def read_state(path: Path) -> dict[str, Any]:
    try:
        return dict(_decoded(_head(path)["state"]))
    except ValueError as error:
        raise _unusable(path, str(error)) from error


def find_checkpoint(folder: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest valid checkpoint, and the newer invalid ones with reasons: those are renamed,
    never deleted."""
    rejected: list[tuple[Path, str]] = []
    for step, path in reversed(checkpoints_in(folder)):
        fault = damage(path) or _foreign(path, step)
        if not fault:
            return path, rejected
        rejected.append((put_aside(path, "bad"), fault))
    return None, rejected


def put_aside_after(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints after `step`, so that a run that goes back can save them again."""
    later = [path for number, path in checkpoints_in(folder) if number > step]
    return [put_aside(path, "old") for path in later]


def prune(
    folder: Path,
    keep: int | None,
    protect: Collection[int],
    *,
    verified: Path | None = None,
) -> list[Path]:
    """Delete all but the newest `keep` (None: all) and the protected steps; returns the deleted.

    Nothing is deleted unless the newest verifies; `verified`:
    one just returned by save_checkpoint, which need not be read again. Incomplete ones neither
    count nor are deleted.
    """
    assert keep is None or keep >= 1, "the newest checkpoint is never deleted"
    whole = [
        (step, path)
        for step, path in reversed(checkpoints_in(folder))
        if not (damage(path, contents=False) or _foreign(path, step))
    ]
    older = [] if keep is None else whole[keep:]
    going = [path for step, path in older if step not in protect]
    if not going or (whole[0][1] != verified and damage(whole[0][1])):
        return []
    for path in reversed(going):
        delete(path)
    return going


def bytes_needed(groups: Groups) -> int:
    """Size of a checkpoint of these tensors; a tensor with two names counts once."""
    total = STATE_BYTES
    for named in groups.values():
        kept = [named[name] for name in _names_to_keep(named).values()]
        unique = {id(tensor): tensor for tensor in kept}.values()
        total += sum(tensor.numel() * tensor.element_size() for tensor in unique)
        total += HEADER_BYTES_PER_TENSOR * len(named)
    return total


def check_space(folder: Path, needed: int, count: int = 1) -> None:
    """Raise DiskFull if `count` checkpoints do not fit on the disk, with a margin for the last."""
    if free_bytes(folder) < (count - 1 + SPACE_FACTOR) * needed:
        raise _disk_full(folder, needed, count=count)


def state_difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences that make it another run, one line each; empty if it is the same."""
    lines: list[str] = []
    for name in dict.fromkeys((*saved, *now)):
        _compare(name, saved.get(name), now.get(name), lines)
    return lines


def _compare(name: str, saved: Any, now: Any, lines: list[str]) -> None:
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in sorted({*saved, *now}, key=str):
            _compare(f"{name}.{key}", saved.get(key), now.get(key), lines)
    elif _encoded(saved) != _encoded(now):
        lines.append(f"{name}: was {_shown(saved)}, is {_shown(now)}")


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    text = json.dumps(_encoded(value), ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"


def _write_group(path: Path, named: Mapping[str, torch.Tensor]) -> None:
    """One safetensors file; of a tensor with several names, one copy and the names as metadata."""
    keep = _names_to_keep(named)
    shared = {name: kept for name, kept in keep.items() if name != kept}
    stored: dict[str, torch.Tensor] = {}
    used: set[int] = set()
    for name, tensor in named.items():
        if name not in shared:
            # A CPU copy that shares no memory with previous ones, as safetensors requires.
            copy = tensor.detach().to("cpu").contiguous()
            if copy.untyped_storage().data_ptr() in used:
                copy = copy.clone()
            used.add(copy.untyped_storage().data_ptr())
            stored[name] = copy
    # Only one key: safetensors writes several in an order that changes between calls.
    save_file(stored, path, metadata={"shared": json.dumps(shared)})


def _read_group(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as stream:
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
            shared = json.loads((stream.metadata() or {}).get("shared", "{}"))
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path.name}: {error}") from error
    if not isinstance(shared, dict) or not set(shared.values()) <= set(tensors):
        raise ValueError(f"{path.name}: shared tensor names refer to missing tensors")
    return {**tensors, **{name: tensors[kept] for name, kept in shared.items()}}


def _names_to_keep(named: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """For every name, the first name of exactly the same memory (tied weights)."""
    first: dict[object, str] = {}
    keep = {}
    for name, tensor in named.items():
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        keep[name] = first.setdefault(view if tensor.numel() else name, name)
    return keep


def _group_file(group: str) -> str:
    assert group.isidentifier(), f"{group} is not a valid file name"
    return f"{group}.safetensors"


def _encoded(value: Any) -> Any:
    """The value as JSON that decodes to an equal value, except that tuples become lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, Mapping):
        assert all(isinstance(key, str) for key in value), "JSON keys must be strings"
        assert value.keys() != {"float"}, "reserved for numbers that JSON does not have"
        return {key: _encoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(item) for item in value]
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"float"}:
            return float(value["float"])
        return {key: _decoded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    return value


def _head(path: Path) -> dict[str, Any]:
    """The contents of state.json; ValueError if they are not those of a checkpoint."""
    try:
        head = read_object(path / STATE)
        fits = (
            head["format"] == FORMAT
            and type(head["step"]) is int
            and type(head["state"]) is dict
            and type(head["groups"]) is list
            and all(type(group) is str and group.isidentifier() for group in head["groups"])
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        fits = False
    if not fits:
        raise ValueError(f"{STATE} is not from a checkpoint of this version")
    for group in head["groups"]:
        if not (path / _group_file(group)).is_file():
            raise ValueError(f"{_group_file(group)} is missing")
    return dict(head)


def _foreign(path: Path, step: int) -> str:
    """Why an intact folder is not the checkpoint of that step; empty if it is."""
    try:
        saved = _head(path)["step"]
    except ValueError as error:
        return str(error)
    return "" if saved == step else f"it is the checkpoint of step {saved} under another name"


def put_aside(path: Path, why: str) -> Path:
    """Rename to .bad-… or .old-…; if that fails, it stays and is skipped again next time."""
    aside = free_name(path.with_name(f".{why}-{path.name}"))
    try:
        os.rename(path, aside)
    except OSError:
        return path
    sync_folder(path.parent)
    return aside


def delete(path: Path) -> None:
    """Rename first, so that being killed halfway leaves nothing that looks like a checkpoint."""
    doomed = path.with_name(f".tmp-delete-{path.name}-{os.getpid()}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    sync_folder(path.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def _unusable(path: Path, fault: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: cannot be used as a checkpoint: {fault}  (resume from another one, or let Expert "
        "choose the newest valid one)"
    )


def _disk_full(place: Path, needed: int, said: str = TOO_LITTLE, count: int = 1) -> DiskFull:
    what = "saving" if count == 1 else f"saving {count} checkpoints"
    room = math.ceil((count - 1 + SPACE_FACTOR) * needed)
    fix = (
        "make room and resume, keep fewer with training.config.save_total_limit, or save elsewhere "
        "with training.config.output_dir"
    )
    return disk_full_error(place, said, what=what, needed=room, fix=fix)

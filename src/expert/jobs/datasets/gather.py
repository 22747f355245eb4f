"""The job behind `expert find-datasets --consolidate`: copies what manifests need to one place."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from expert.core.files import read_bytes, sha256_of, write_text_atomically
from expert.data.records import DataError
from expert.jobs.datasets.find import DatasetUser
from expert.jobs.datasets.hub_copies import Caches, NotCached, cached_rows
from expert.manifest.migrate.aliases import CORPORA
from expert.planning.plan import folder_name
from expert.planning.survey import local_path, looks_local


@dataclass(frozen=True)
class Copy:
    """A file that was copied, or that already existed with the same content."""

    source: str
    target: str
    size: int
    sha256: str
    done: Literal["copied", "there already"]


@dataclass(frozen=True)
class Gathered:
    """What `--consolidate` did for one expert, and the options that use the copies."""

    expert: str
    manifest: str
    copies: tuple[Copy, ...]
    set_options: str
    left: tuple[str, ...]
    """What was not copied, and why."""


@dataclass
class _CopyPlan:
    user: DatasetUser
    files: list[tuple[Path, Path]] = field(default_factory=list)
    texts: dict[Path, str] = field(default_factory=dict)
    """Files that describe the copies, by path."""
    options: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def consolidate(users: Sequence[DatasetUser], destination: Path, caches: Caches) -> list[Gathered]:
    """Copy the data of every manifest into DEST/<expert>/, hub data from its caches; raises before
    copying if anything conflicts."""
    destination = destination.resolve()
    plans = [_plan_copies(user, destination, caches) for user in users]
    wanted: dict[Path, str] = {}
    problems = []
    for source, target in (pair for plan in plans for pair in plan.files):
        digest = sha256_of(source)
        if wanted.setdefault(target, digest) != digest:
            problems.append(f"{target}: two manifests name different files for it: {source}")
        elif target.exists() and (not target.is_file() or sha256_of(target) != digest):
            problems.append(f"{target}: exists and differs from {source}")
    for target, text in (pair for plan in plans for pair in plan.texts.items()):
        if target.exists() and (not target.is_file() or read_bytes(target) != text.encode()):
            problems.append(f"{target}: exists and describes something else")
    if problems:
        shown = "\n".join(f"  - {problem}" for problem in dict.fromkeys(problems))
        raise DataError(
            f"{destination}: nothing was copied, no file is ever overwritten\n{shown}\n"
            "  (remove what is old, or name another folder with --consolidate)"
        )
    return [_gather(plan, wanted) for plan in plans]


def _plan_copies(user: DatasetUser, destination: Path, caches: Caches) -> _CopyPlan:
    plan = _CopyPlan(user)
    folder = destination / folder_name(user.name)
    for key, value in user.paths.items():
        found = local_path(value, user.folder)
        if value in CORPORA:
            plan.left.append(f"{key}: {value} is a built-in corpus, not a file")
        elif not found.exists() and looks_local(value, user.folder):
            plan.left.append(f"{key}: {value} is not there")
        elif not found.exists():
            _plan_of_hub(plan, key, value, folder, caches)
        else:
            target = folder / _kept_name(found, user.folder)
            files = [found] if found.is_file() else sorted(found.rglob("*"))
            plan.files += [
                (path, target / path.relative_to(found)) for path in files if path.is_file()
            ]
            _, marks, split = value.partition("::")
            plan.options.append(f"--set {shlex.quote(f'{key}={target}{marks}{split}')}")
    return plan


def _plan_of_hub(plan: _CopyPlan, key: str, value: str, folder: Path, caches: Caches) -> None:
    try:
        rows = cached_rows(value, caches)
    except NotCached as why:
        plan.left.append(f"{key}: {value} {why}")
        return
    target = folder / rows.folder
    plan.files += [(file.resolve(), target / place) for place, file in rows.files.items()]
    plan.texts |= {target / place: text for place, text in rows.texts.items()}
    plan.options.append(f"--set {shlex.quote(f'{key}={target}{rows.path}')}")


def _kept_name(path: Path, folder: Path) -> Path:
    """The path below the manifest's folder, so that a/train.jsonl and b/train.jsonl stay apart; the
    name alone for files elsewhere."""
    path, folder = path.resolve(), folder.resolve()
    if path != folder and path.is_relative_to(folder):
        return path.relative_to(folder)
    return Path(path.name)


def _gather(plan: _CopyPlan, digests: Mapping[Path, str]) -> Gathered:
    copies = []
    for source, target in dict.fromkeys(plan.files):
        done: Literal["copied", "there already"] = "there already"
        if not target.exists():
            _copy_verified(source, target, digests[target])
            done = "copied"
        size = target.stat().st_size
        copies.append(Copy(str(source), str(target), size, digests[target], done))
    for target, text in plan.texts.items():  # last: without them it is not a dataset yet
        if not target.exists():
            write_text_atomically(target, text)
    options = " ".join(plan.options)
    return Gathered(plan.user.name, plan.user.source, tuple(copies), options, tuple(plan.left))


def _copy_verified(source: Path, target: Path, digest: str) -> None:
    """Copy under a temporary name, verify the copy, and only then rename it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copy2(source, temporary)
        if sha256_of(temporary) != digest:
            raise DataError(
                f"{target}: the copy differs from {source}  (the file changed meanwhile, or the "
                "disk is faulty: copy again)"
            )
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)

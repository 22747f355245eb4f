"""The job behind `expert find-datasets --consolidate`: copies what manifests need to one place.

Hub datasets come from the caches of this machine, in a form that is read without a network. The
`datasets` package keeps Arrow files of every split: with two description files next to them they
are a saved dataset. What was only downloaded is a folder of data files as uploaded.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from expert.core.files import read_bytes, read_text, sha256_of, write_text_atomically
from expert.core.stored_json import read_object_or_empty
from expert.data.read.sources import find_source, first_row
from expert.data.records import DataError
from expert.jobs.datasets.find import DatasetUser, same_id
from expert.manifest.migrate.aliases import CORPORA
from expert.manifest.schema.dataset import DatasetSpec
from expert.planning.plan import folder_name
from expert.planning.survey import local_path, looks_local

_PLAIN = re.compile(r"[\w.+\-]*[\w+\-][\w.+\-]*")
"""A single path component, so that an untrusted manifest cannot name a place elsewhere."""


@dataclass(frozen=True)
class Caches:
    """The hub's files, and what the `datasets` package made of them."""

    hub: Path
    datasets: Path


@dataclass(frozen=True)
class Copy:
    """A file that was copied, or that already existed with the same content."""

    source: str
    target: str
    size: int
    sha256: str
    done: Literal["copied", "there already"]


@dataclass(frozen=True)
class ConsolidatedExpert:
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


def consolidate(
    users: Sequence[DatasetUser], destination: Path, caches: Caches
) -> list[ConsolidatedExpert]:
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
            _plan_hub_copy(plan, key, value, folder, caches)
        else:
            target = folder / _path_in_copy(found, user.folder)
            files = [found] if found.is_file() else sorted(found.rglob("*"))
            plan.files += [
                (path, target / path.relative_to(found)) for path in files if path.is_file()
            ]
            _, marks, split = value.partition("::")
            plan.options.append(f"--set {shlex.quote(f'{key}={target}{marks}{split}')}")
    return plan


def _plan_hub_copy(plan: _CopyPlan, key: str, value: str, folder: Path, caches: Caches) -> None:
    try:
        copy_name, path, files, texts = cached_rows(value, caches)
    except NotCached as why:
        plan.left.append(f"{key}: {value} {why}")
        return
    target = folder / copy_name
    plan.files += [(file.resolve(), target / place) for place, file in files.items()]
    plan.texts |= {target / place: text for place, text in texts.items()}
    plan.options.append(f"--set {shlex.quote(f'{key}={target}{path}')}")


def _path_in_copy(path: Path, folder: Path) -> Path:
    """The path below the manifest's folder, so that a/train.jsonl and b/train.jsonl stay apart; the
    name alone for files elsewhere."""
    path, folder = path.resolve(), folder.resolve()
    if path != folder and path.is_relative_to(folder):
        return path.relative_to(folder)
    return Path(path.name)


def _gather(plan: _CopyPlan, digests: Mapping[Path, str]) -> ConsolidatedExpert:
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
    return ConsolidatedExpert(
        plan.user.name, plan.user.source, tuple(copies), options, tuple(plan.left)
    )


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


# --- rows of the hub -----------------------------------------------------------------------------


CachedRows = tuple[str, dict[Path, Path], dict[Path, str]]
"""What names the rows in a copy, after its folder: "" or `::split`; its files by their path in the
copy, and the texts next to them."""


class NotCached(Exception):
    """Why hub rows cannot be copied."""


def cached_rows(value: str, caches: Caches) -> tuple[str, *CachedRows]:
    """The files behind `id::split::configuration`, after a name for their copy; NotCached if they
    are not here."""
    name, *parts = value.split("::")
    split, config = [*parts, "", ""][:2]
    split = split or "train"
    if not all(_PLAIN.fullmatch(part) for part in (split.partition("[")[0], config) if part):
        raise NotCached("names a split or a configuration that no folder may be called")
    if "[" in split:
        raise NotCached(f"names a slice of a split, which a copy cannot: take {name}::train")
    copy_name = name.replace("/", "--") + (f"--{config}" if config else "")
    cached = _in_datasets_cache(name, config, caches.datasets)
    if cached is not None:
        return copy_name, *_saved_dataset_files(split, cached)
    snapshot = _snapshot(name, caches.hub)
    if snapshot is None:
        raise NotCached(f"is not in a cache here ({caches.datasets} and {caches.hub}): fetch it")
    return copy_name, *_data_folder_files(split, config, snapshot)


def _in_datasets_cache(name: str, config: str, cache: Path) -> Path | None:
    """The folder of a configuration; if it was made several times, the newest."""
    infos = [
        info
        for folder in sorted(cache.glob("*"))
        if same_id(folder.name.replace("___", "/"), name)
        for info in folder.glob(f"{config or '*'}/**/dataset_info.json")
    ]
    if not config:
        plain = [info for info in infos if info.relative_to(cache).parts[1] == "default"]
        configs = {info.relative_to(cache).parts[1] for info in infos}
        infos = plain or (infos if len(configs) == 1 else [])
    newest = max(infos, key=lambda info: info.stat().st_mtime, default=None)
    return newest.parent if newest is not None else None


def _saved_dataset_files(split: str, cached: Path) -> CachedRows:
    from expert.data.tokens.documents import dataset_files

    info = read_object_or_empty(cached / "dataset_info.json")
    splits = info.get("splits")
    names = [each for each in splits if _PLAIN.fullmatch(each)] if isinstance(splits, dict) else []
    if split not in names:
        raise NotCached(f"has no split {split!r} in {cached}; its splits: {', '.join(names)}")
    copied: dict[Path, Path] = {}
    texts: dict[Path, str] = {}
    prefix = re.escape(str(info.get("dataset_name") or "")) or ".+"
    for each in names:
        # `name-train.arrow` or its parts; not what `map` has left next to them.
        shape = re.compile(rf"{prefix}-{re.escape(each)}(-\d+-of-\d+)?\.arrow")
        files = sorted(path for path in cached.glob("*.arrow") if shape.fullmatch(path.name))
        if not files:
            raise NotCached(f"has no Arrow files of {each!r} in {cached}")
        copied |= {Path(each, file.name): file for file in files}
        described = dataset_files([file.name for file in files], cached.name)
        texts |= {Path(each, file): text for file, text in described.items()}
    texts[Path("dataset_dict.json")] = json.dumps({"splits": names})
    return f"::{split}", copied, texts


def _snapshot(name: str, cache: Path) -> Path | None:
    """The files of the newest downloaded revision: of the branch main, if known."""
    for folder in sorted(cache.glob("datasets--*")):
        if not same_id(folder.name.removeprefix("datasets--").replace("--", "/"), name):
            continue
        try:
            main = read_text(folder / "refs" / "main").strip()
        except OSError:
            main = ""
        if main and (folder / "snapshots" / main).is_dir():
            return folder / "snapshots" / main
        states = [path for path in (folder / "snapshots").glob("*") if path.is_dir()]
        if states:
            return max(states, key=lambda path: path.stat().st_mtime)
    return None


def _data_folder_files(split: str, config: str, snapshot: Path) -> CachedRows:
    """The data files as uploaded, if their names show the split."""
    top = snapshot / config
    if not top.is_dir():
        raise NotCached(f"has no folder of its configuration {config!r} in {snapshot}")
    why = ""
    for path in (f"::{split}", *([""] if split == "train" else [])):
        try:
            source = find_source(f"{top}{path}", "train", DatasetSpec(path=str(top)), top)
            first_row(source)
        except DataError as error:
            why = why or str(error).partition("  (")[0]
            continue
        # If all files are the rows, every file except those that describe the repository.
        every = (p for p in sorted(top.rglob("*")) if p.is_file() and p.suffix.lower() != ".md")
        read = source.files if path else [p for p in every if not p.name.startswith(".")]
        return path, {file.relative_to(top): file for file in read}, {}
    raise NotCached(f"is in {snapshot}, in a form that is not read from a folder: {why}")

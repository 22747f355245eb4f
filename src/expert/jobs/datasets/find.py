"""The job behind `expert find-datasets`: data on this machine, which experts use it, and copies of
what they need in one place."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from expert.core.errors import ManifestError
from expert.core.files import files_below, sha256_of
from expert.core.stored_json import read_object_or_empty
from expert.core.text import counted
from expert.data.read.folders import SPLIT_NAMES, words_of
from expert.data.records import DataError
from expert.insight.record import mapping
from expert.manifest.migrate.aliases import CORPORA
from expert.manifest.reader import read_manifest
from expert.manifest.text.document import FILE_NAMES, is_other_tools_file
from expert.planning.models.resolve import hf_cache_folder
from expert.planning.plan import folder_name
from expert.planning.survey import cache_folder, local_path, looks_local

Kind = Literal["hub cache", "datasets cache", "file", "folder", "prepared"]
_PATH_KEYS = ("path", "validation_path", "test_path")
_TASK_KEYS = ("train", "valid", "test")


@dataclass(frozen=True)
class FoundDataset:
    """A dataset on this machine; None for what is unknown without reading all of it."""

    kind: Kind
    name: str
    path: str
    splits: tuple[str, ...]
    rows: int | None
    size: int
    used_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class DatasetUser:
    """An expert's manifest and the data it names, by manifest key."""

    name: str
    source: str
    folder: Path
    paths: Mapping[str, str]
    cache: Path


def manifests_below(folder: Path) -> list[Path]:
    """Every manifest in a folder of experts; runs, environments and caches are skipped."""
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "there is no such folder"
        raise DataError(f"--all {folder}: {what}  (name a folder of experts)")
    found = [file for file in files_below(folder) if file.name in FILE_NAMES]
    if not found:
        raise DataError(f"{folder}: no manifest below  (looked for {', '.join(FILE_NAMES)})")
    return found


def read_users(folder: Path) -> tuple[list[DatasetUser], list[str]]:
    """The manifests below a folder, and what is wrong with those that cannot be read."""
    from expert.data.named_sources import is_token_folder

    users, unread = [], []
    for file in manifests_below(folder):
        if is_other_tools_file(file):
            unread.append(f"{file}: not read: it names neither a model nor rows to train on")
            continue
        try:
            read = read_manifest(file)
        except ManifestError as error:
            unread.append(f"{file}: not read: {counted(len(error.problems), 'problem')}")
            continue
        training = read.manifest.training
        keys = {key: getattr(training.dataset, key) for key in _PATH_KEYS}
        for name, task in (training.dataset.tasks or {}).items():
            keys |= {f"tasks.{name}.{key}": getattr(task, key) for key in _TASK_KEYS}
        paths = {f"training.dataset.{key}": value for key, value in keys.items() if value}
        own = training.config.pretokenized_cache
        if own and is_token_folder(cache_folder(own, read.folder)[0]):
            paths["training.config.pretokenized_cache"] = own
        automatic = read.folder / "datasets_optimized" / folder_name(read.manifest.name)
        cache = read.folder / own if own else automatic
        users.append(DatasetUser(read.manifest.name, str(file), read.folder, paths, cache))
    return users, unread


def find_datasets(
    *, environ: Mapping[str, str], home: Path, users: Sequence[DatasetUser] = ()
) -> list[FoundDataset]:
    """Datasets in the Hugging Face caches, and the files, folders and prepared tokens of experts;
    each with the experts that use it."""
    hub, datasets = caches(environ, home)
    found = {entry.path: entry for entry in (*_in_hub_cache(hub), *_in_datasets_cache(datasets))}
    used: dict[str, dict[str, None]] = {path: {} for path in found}
    for user in users:
        ids = [_plain_id(value.split("::")[0]) for value in user.paths.values()]
        for path, entry in found.items():
            if "cache" in entry.kind and _plain_id(entry.name.partition(" (")[0]) in ids:
                used[path][user.name] = None
        for own in _data_of(user):
            found.setdefault(own.path, own)
            used.setdefault(own.path, {})[user.name] = None
    return [replace(entry, used_by=tuple(used[path])) for path, entry in found.items()]


def _data_of(user: DatasetUser) -> Iterator[FoundDataset]:
    """The files and folders that a manifest names, and its prepared tokens."""
    for place in (local_path(value, user.folder) for value in user.paths.values()):
        if place.exists():
            kind: Kind = "file" if place.is_file() else "folder"
            splits = _splits_in_names([place.name])
            yield FoundDataset(kind, place.name, str(place), splits, None, _size(place))
    for place in (user.cache, *sorted(user.cache.glob("tokens-*"))):
        if (place / "recipe.json").is_file() and (place / "DONE").is_file():
            rows = read_object_or_empty(place / "statistics.json").get("documents")
            yield FoundDataset("prepared", place.name, str(place), (), rows, _size(place))


def caches(environ: Mapping[str, str], home: Path) -> tuple[Path, Path]:
    """The hub's cache, and where the `datasets` package keeps what it made of the hub's files: from
    their variables, else below `home`."""
    given = {key: value for key, value in environ.items() if value}
    given = {"XDG_CACHE_HOME": str(home / ".cache"), **given}
    beside = {key: value for key, value in given.items() if key != "HF_HUB_CACHE"}
    datasets = given.get("HF_DATASETS_CACHE") or hf_cache_folder(beside).with_name("datasets")
    return hf_cache_folder(given), Path(datasets)


def _in_hub_cache(cache: Path) -> Iterator[FoundDataset]:
    for folder in sorted(cache.glob("datasets--*")):
        files = [path for path in folder.rglob("*") if path.is_file()]
        splits = _splits_in_names(path.name for path in files if "snapshots" in path.parts)
        name = folder.name.removeprefix("datasets--").replace("--", "/")
        yield FoundDataset("hub cache", name, str(folder), splits, None, _size(folder))


def _in_datasets_cache(cache: Path) -> Iterator[FoundDataset]:
    """One entry per configuration; if it was made several times, the newest."""
    for config in sorted(cache.glob("*/*")):
        infos = sorted(config.rglob("dataset_info.json"), key=lambda path: path.stat().st_mtime)
        if infos:
            splits = mapping(read_object_or_empty(infos[-1]).get("splits"))
            counts = [entry.get("num_examples") for entry in map(mapping, splits.values())]
            known = [number for number in counts if isinstance(number, int)]
            rows = sum(known) if known and len(known) == len(counts) else None
            name = config.parent.name.replace("___", "/")
            name += "" if config.name == "default" else f" ({config.name})"
            size = _size(config)
            yield FoundDataset("datasets cache", name, str(config), tuple(splits), rows, size)


def _size(place: Path) -> int:
    """Without links: the hub's snapshots link to its blobs."""
    every = [place] if place.is_file() else place.rglob("*")
    return sum(path.stat().st_size for path in every if path.is_file() and not path.is_symlink())


def _splits_in_names(names: Iterable[str]) -> tuple[str, ...]:
    words = {word for name in names for word in words_of(name)}
    named = {SPLIT_NAMES[word] for word in words & SPLIT_NAMES.keys()}
    return tuple(split for split in ("train", "validation", "test") if split in named)


def _plain_id(name: str) -> str:
    """A hub id without what `datasets` spells differently."""
    return re.sub(r"[^a-z0-9/]", "", name.lower())


# --- copies in one place -------------------------------------------------------------------------


@dataclass
class ConsolidatedExpert:
    """What `--consolidate` did for one expert, and the options that use the copies."""

    expert: str
    manifest: str
    copies: list[dict[str, Any]] = field(default_factory=list)
    """`source` and `target` of each file, and whether it was copied or was there already."""
    set_options: str = ""
    left: list[str] = field(default_factory=list)
    """What was not copied, and why."""


def consolidate(users: Sequence[DatasetUser], destination: Path) -> list[ConsolidatedExpert]:
    """Copy the local data of every manifest into DEST/<expert>/; raises before copying if anything
    conflicts."""
    destination = destination.resolve()
    done: list[ConsolidatedExpert] = []
    sources: dict[Path, Path] = {}
    problems: list[str] = []
    for user in users:
        own = ConsolidatedExpert(user.name, user.source)
        options: list[str] = []
        for key, value in user.paths.items():
            found = local_path(value, user.folder)
            if value in CORPORA:
                own.left.append(f"{key}: {value} is a built-in corpus, not a file")
                continue
            if not found.exists():
                why = "is not there"
                if not looks_local(value, user.folder):
                    why = "is in the hub's cache, which HF_HOME moves as a whole"
                own.left.append(f"{key}: {value} {why}")
                continue
            # Below the manifest's folder, a/train.jsonl and b/train.jsonl stay apart.
            place, home = found.resolve(), user.folder.resolve()
            inside = place != home and place.is_relative_to(home)
            within = place.relative_to(home) if inside else Path(place.name)
            target = destination / folder_name(user.name) / within
            options.append(f"{key}={target}{''.join(value.partition('::')[1:])}")
            every = [found] if found.is_file() else sorted(found.rglob("*"))
            for file in (file for file in every if file.is_file()):
                copy = target / file.relative_to(found)
                there = sources.setdefault(copy, file)
                if there != file and sha256_of(there) != sha256_of(file):
                    problems.append(f"{copy}: two manifests name different files for it: {file}")
                elif copy.exists() and (not copy.is_file() or sha256_of(copy) != sha256_of(file)):
                    problems.append(f"{copy}: exists and differs from {file}")
                state = "there already" if copy.exists() else "copied"
                own.copies.append({"source": str(file), "target": str(copy), "done": state})
        own.set_options = " ".join(f"--set {shlex.quote(option)}" for option in options)
        done.append(own)
    if problems:
        shown = "\n".join(f"  - {problem}" for problem in dict.fromkeys(problems))
        fix = "remove what is old, or name another folder with --consolidate"
        what = f"{destination}: nothing was copied, no file is ever overwritten"
        raise DataError(f"{what}\n{shown}\n  ({fix})")
    for target, source in sources.items():
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.{os.getpid()}")
            shutil.copy2(source, temporary)
            os.replace(temporary, target)  # an interrupted copy has no name that is taken for data
    return done

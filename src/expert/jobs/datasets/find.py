"""The job behind `expert find-datasets`: data on this machine, and which experts use it."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from expert.core.errors import ManifestError
from expert.core.stored_json import read_object_or_empty
from expert.core.text import counted
from expert.data.read.folders import SPLIT_NAMES, saved_files, saved_splits, words_of
from expert.data.read.rows import is_markdown, suffix_format
from expert.data.read.streams import open_bytes
from expert.data.records import DataError
from expert.insight.record import mapping
from expert.jobs.pretokenize import manifests_below
from expert.manifest.reader import read_manifest
from expert.manifest.schema.file_formats import WITHOUT_ROWS
from expert.manifest.text.document import is_other_tools_file
from expert.planning.models.resolve import hf_cache_folder
from expert.planning.plan import folder_name
from expert.planning.survey import cache_folder, local_path

Kind = Literal["hub cache", "datasets cache", "file", "saved", "tokenised", "prepared"]
_PATH_KEYS = ("path", "validation_path", "test_path")
_TASK_KEYS = ("train", "valid", "test")
_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages"}
# JSON and text files next to data and models that hold no rows.
_NOT_DATA = re.compile(
    r"(manifest|config|.*_config|tokenizer.*|special_tokens_map|added_tokens|vocab|package.*"
    r"|dataset_infos?|dataset_dict|state|metadata|.*\.index)\.json"
    r"|(merges|vocab|license|readme|requirements.*)\.txt"
)


@dataclass(frozen=True)
class FoundDataset:
    """A dataset on this machine; None for what is unknown without reading all of it."""

    kind: Kind
    name: str
    path: str
    splits: tuple[str, ...]
    rows: int | None
    size: int
    last_used: float | None
    """Last access or modification, in seconds since 1970."""
    tokens: int | None = None
    used_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class DatasetUser:
    """An expert's manifest and the data it names, by manifest key."""

    name: str
    source: str
    folder: Path
    paths: Mapping[str, str]
    cache: Path


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
    folders: Sequence[Path],
    *,
    environ: Mapping[str, str],
    home: Path,
    users: Sequence[DatasetUser] = (),
) -> list[FoundDataset]:
    """Datasets in the Hugging Face caches and in the given folders, and which experts use them."""
    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"{folder}: there is no such folder")
    found = [*_in_hub_cache(hub_cache(environ, home))]
    found += _in_datasets_cache(datasets_cache(environ, home))
    for folder in folders:
        found += _in_folder(folder)
    unique = {(entry.kind, entry.path, entry.name): entry for entry in found}
    return [replace(entry, used_by=_users_of(entry, users)) for entry in unique.values()]


def hub_cache(environ: Mapping[str, str], home: Path) -> Path:
    """The hub cache: from huggingface_hub's variables, else below `home`."""
    given = {key: value for key, value in environ.items() if value}
    return hf_cache_folder({"XDG_CACHE_HOME": str(home / ".cache"), **given})


def datasets_cache(environ: Mapping[str, str], home: Path) -> Path:
    """Where the `datasets` package keeps what it made of the hub's files."""
    if environ.get("HF_DATASETS_CACHE"):
        return Path(environ["HF_DATASETS_CACHE"])
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]) / "datasets"
    cache = environ.get("XDG_CACHE_HOME") or str(home / ".cache")
    return Path(cache) / "huggingface" / "datasets"


def _in_hub_cache(cache: Path) -> Iterator[FoundDataset]:
    for folder in sorted(cache.glob("datasets--*")):
        files = _files_below(folder)
        splits = _splits_in_names(path.name for path in files if "snapshots" in path.parts)
        name = folder.name.removeprefix("datasets--").replace("--", "/")
        yield _found("hub cache", name, folder, splits, None, files)


def _in_datasets_cache(cache: Path) -> Iterator[FoundDataset]:
    """One entry per configuration; if it was made several times, the newest."""
    for config in sorted(cache.glob("*/*")):
        infos = sorted(config.rglob("dataset_info.json"), key=lambda path: path.stat().st_mtime)
        if not infos:
            continue
        splits = mapping(read_object_or_empty(infos[-1]).get("splits"))
        counts = [entry.get("num_examples") for entry in map(mapping, splits.values())]
        known = [number for number in counts if isinstance(number, int)]
        rows = sum(known) if known and len(known) == len(counts) else None
        name = config.parent.name.replace("___", "/")
        name += "" if config.name == "default" else f" ({config.name})"
        files = _files_below(config)
        yield _found("datasets cache", name, config, tuple(splits), rows, files)


def _files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _in_folder(top: Path) -> Iterator[FoundDataset]:
    for here, names, files in os.walk(top):
        folder = Path(here)
        names[:] = sorted(n for n in names if not n.startswith(".") and n not in _SKIPPED_FOLDERS)
        if (folder / "events.jsonl").is_file() and (folder / "plan.json").is_file():
            names.clear()  # a run: its events and plans are not rows
            continue
        if (folder / "recipe.json").is_file() and (folder / "DONE").is_file():
            names.clear()
            counts = read_object_or_empty(folder / "statistics.json")
            rows, tokens = counts.get("documents"), counts.get("tokens")
            yield _found("prepared", folder.name, folder, (), rows, _files_below(folder), tokens)
            continue
        try:
            saved = saved_splits(folder)
        except DataError:
            saved = None
        if saved is not None:
            names.clear()
            rows, tokens = _saved_counts(saved.values())
            splits = tuple(name for name in saved if name)
            kind: Kind = "saved" if tokens is None else "tokenised"
            yield _found(kind, folder.name, folder, splits, rows, _files_below(folder), tokens)
            continue
        for path in sorted(folder / name for name in files if not name.startswith(".")):
            name = path.name.lower()
            if suffix_format(path) in (None, "arrow") or name in WITHOUT_ROWS:
                continue
            if _NOT_DATA.fullmatch(name) or not path.is_file():  # a dangling link, a pipe
                continue
            if not is_markdown(path):
                splits = _splits_in_names([path.name])
                yield _found("file", path.name, path, splits, count_rows(path), [path])


def _found(
    kind: Kind,
    name: str,
    path: Path,
    splits: tuple[str, ...],
    rows: int | None,
    files: Iterable[Path],
    tokens: int | None = None,
) -> FoundDataset:
    # A link's target is counted at its own path: the hub's snapshots link to its blobs.
    states = [file.stat() for file in files if kind == "file" or not file.is_symlink()]
    used = max((max(state.st_atime, state.st_mtime) for state in states), default=None)
    size = sum(state.st_size for state in states)
    return FoundDataset(kind, name, str(path), splits, rows, size, used, tokens)


def count_rows(path: Path) -> int | None:
    """Lines of a jsonl, or of a csv without its header; None for other formats and broken files."""
    kind = suffix_format(path)
    if kind not in ("jsonl", "csv", "tsv"):
        return None
    lines, last = 0, b"\n"
    try:
        with open_bytes(path) as stream:
            while block := stream.read(4 * 2**20):
                lines += block.count(b"\n")
                last = block
    except (OSError, EOFError, zlib.error, DataError):
        return None
    lines += not last.endswith(b"\n")
    return lines if kind == "jsonl" else max(0, lines - 1)


def _saved_counts(folders: Iterable[Path]) -> tuple[int | None, int | None]:
    """Rows of saved datasets and, if they are tokenised, tokens including padding."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from expert.data.tokens.token_rows import IDS

    rows, tokens = 0, 0
    try:
        for file in (file for folder in folders for file in saved_files(folder)):
            with pa.memory_map(str(file)) as stream:
                for batch in pa.ipc.open_stream(stream):
                    rows += batch.num_rows
                    if IDS in batch.schema.names:
                        tokens += pc.sum(pc.list_value_length(batch.column(IDS))).as_py() or 0
    except (DataError, OSError, pa.ArrowException):
        return None, None
    return rows, tokens or None


def _splits_in_names(names: Iterable[str]) -> tuple[str, ...]:
    words = {word for name in names for word in words_of(name)}
    named = {SPLIT_NAMES[word] for word in words & SPLIT_NAMES.keys()}
    return tuple(split for split in ("train", "validation", "test") if split in named)


def _plain_id(name: str) -> str:
    """A hub id without what `datasets` spells differently."""
    return re.sub(r"[^a-z0-9/]", "", name.lower())


def _users_of(entry: FoundDataset, users: Sequence[DatasetUser]) -> tuple[str, ...]:
    place = Path(entry.path).resolve()
    names = []
    for user in users:
        if entry.kind in ("hub cache", "datasets cache"):
            ids = [_plain_id(value.split("::")[0]) for value in user.paths.values()]
            used = _plain_id(entry.name.partition(" (")[0]) in ids
        elif entry.kind == "prepared":
            used = user.cache.resolve() in (place, place.parent)
        else:
            named = [local_path(value, user.folder).resolve() for value in user.paths.values()]
            used = any(place == path or path in place.parents for path in named)
        if used:
            names.append(user.name)
    return tuple(dict.fromkeys(names))

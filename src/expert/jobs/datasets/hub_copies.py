"""Hub datasets in a cache of this machine, copied in a form that is read without a network.

The `datasets` package keeps Arrow files of every split: with two description files next to them
they are a saved dataset. What was only downloaded is a folder of data files as uploaded.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from expert.core.files import read_text
from expert.core.stored_json import object_in
from expert.data.read.sources import find_source, first_row
from expert.data.records import DataError
from expert.jobs.datasets.find import same_id
from expert.manifest.schema.dataset import DatasetSpec

_PLAIN = re.compile(r"[\w.+\-]*[\w+\-][\w.+\-]*")
"""A name inside the same folder and nothing outside: manifests may come from anyone."""


@dataclass(frozen=True)
class Caches:
    """The hub's files, and what the `datasets` package made of them."""

    hub: Path
    datasets: Path


@dataclass
class CachedRows:
    """What to copy from a cache: files by their path in the copy, and texts next to them."""

    folder: str
    """The name of the copy."""
    path: str
    """The suffix that names the rows in it, after the folder: "" or `::split`."""
    files: dict[Path, Path] = field(default_factory=dict)
    """Path in the copy -> file."""
    texts: dict[Path, str] = field(default_factory=dict)


class NotCached(Exception):
    """Why hub rows cannot be copied."""


def cached_rows(value: str, caches: Caches) -> CachedRows:
    """The files behind `id::split::configuration`; NotCached if they are not here."""
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
        return _as_saved(copy_name, split, cached)
    snapshot = _snapshot(name, caches.hub)
    if snapshot is None:
        raise NotCached(f"is not in a cache here ({caches.datasets} and {caches.hub}): fetch it")
    return _as_folder(copy_name, split, config, snapshot)


# --- the cache of the datasets package ------------------------------------------------------------


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


def _as_saved(copy_name: str, split: str, cached: Path) -> CachedRows:
    from expert.data.tokens.documents import dataset_files

    info = object_in(cached / "dataset_info.json")
    splits = info.get("splits")
    names = [each for each in splits if _PLAIN.fullmatch(each)] if isinstance(splits, dict) else []
    if split not in names:
        raise NotCached(f"has no split {split!r} in {cached}; its splits: {', '.join(names)}")
    found = CachedRows(copy_name, f"::{split}")
    prefix = re.escape(str(info.get("dataset_name") or "")) or ".+"
    for each in names:
        # `name-train.arrow` or its parts; not what `map` has left next to them.
        shape = re.compile(rf"{prefix}-{re.escape(each)}(-\d+-of-\d+)?\.arrow")
        files = sorted(path for path in cached.glob("*.arrow") if shape.fullmatch(path.name))
        if not files:
            raise NotCached(f"has no Arrow files of {each!r} in {cached}")
        found.files |= {Path(each, file.name): file for file in files}
        described = dataset_files([file.name for file in files], cached.name)
        found.texts |= {Path(each, file): text for file, text in described.items()}
    found.texts[Path("dataset_dict.json")] = json.dumps({"splits": names})
    return found


# --- what was downloaded -------------------------------------------------------------------------


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


def _as_folder(copy_name: str, split: str, config: str, snapshot: Path) -> CachedRows:
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
        return CachedRows(copy_name, path, {file.relative_to(top): file for file in read})
    raise NotCached(f"is in {snapshot}, in a form that is not read from a folder: {why}")

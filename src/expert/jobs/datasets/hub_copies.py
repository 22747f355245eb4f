"""Rows of the hub that lie in a cache of this machine, in a form that is read without a network.

The package `datasets` keeps Arrow files of every split: with two descriptions beside them they are
a saved data set. What was only downloaded is a folder of data files as its owner has uploaded them.
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
"""Names something in the same folder, and nothing outside: manifests may come from anyone."""


@dataclass(frozen=True)
class Caches:
    """Where the hub's files are kept, and what the package `datasets` has made of them."""

    hub: Path
    datasets: Path


@dataclass
class CachedRows:
    """What is to be copied of a cache: files by their place in the copy, and texts beside them."""

    folder: str
    """The name of the copy."""
    path: str
    """What names the rows in it, after the folder: "" or `::split`."""
    files: dict[Path, Path] = field(default_factory=dict)
    """Place in the copy -> file."""
    texts: dict[Path, str] = field(default_factory=dict)


class NotCached(Exception):
    """Why rows of the hub cannot be copied."""


def cached_rows(value: str, caches: Caches) -> CachedRows:
    """The files behind `id::split::configuration`; NotCached where they are not here."""
    name, *parts = value.split("::")
    split, config = [*parts, "", ""][:2]
    split = split or "train"
    if not all(_PLAIN.fullmatch(part) for part in (split.partition("[")[0], config) if part):
        raise NotCached("names a split or a configuration that no folder may be called")
    if "[" in split:
        raise NotCached(f"names a slice of a split, which a copy cannot: take {name}::train")
    copy_name = name.replace("/", "--") + (f"--{config}" if config else "")
    made = _in_datasets_cache(name, config, caches.datasets)
    if made is not None:
        return _as_saved(copy_name, split, made)
    snapshot = _snapshot(name, caches.hub)
    if snapshot is None:
        raise NotCached(f"is not in a cache here ({caches.datasets} and {caches.hub}): fetch it")
    return _as_folder(copy_name, split, config, snapshot)


# --- what the package datasets has made ----------------------------------------------------------


def _in_datasets_cache(name: str, config: str, cache: Path) -> Path | None:
    """The folder of a configuration, where it was made several times the newest."""
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


def _as_saved(copy_name: str, split: str, made: Path) -> CachedRows:
    from expert.data.tokens.documents import dataset_files

    info = object_in(made / "dataset_info.json")
    splits = info.get("splits")
    names = [each for each in splits if _PLAIN.fullmatch(each)] if isinstance(splits, dict) else []
    if split not in names:
        raise NotCached(f"has no split {split!r} in {made}; its splits: {', '.join(names)}")
    found = CachedRows(copy_name, f"::{split}")
    prefix = re.escape(str(info.get("dataset_name") or "")) or ".+"
    for each in names:
        # `name-train.arrow`, or the parts of it; not what `map` has left beside them.
        shape = re.compile(rf"{prefix}-{re.escape(each)}(-\d+-of-\d+)?\.arrow")
        files = sorted(path for path in made.glob("*.arrow") if shape.fullmatch(path.name))
        if not files:
            raise NotCached(f"has no Arrow files of {each!r} in {made}")
        found.files |= {Path(each, file.name): file for file in files}
        described = dataset_files([file.name for file in files], made.name)
        found.texts |= {Path(each, file): text for file, text in described.items()}
    found.texts[Path("dataset_dict.json")] = json.dumps({"splits": names})
    return found


# --- what was downloaded -------------------------------------------------------------------------


def _snapshot(name: str, cache: Path) -> Path | None:
    """The files of the newest state that was fetched: that of the branch main, where known."""
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
    """The data files as they were uploaded, where their names show the split."""
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
        # Every file but those that describe the repository, where all of them are the rows.
        every = (p for p in sorted(top.rglob("*")) if p.is_file() and p.suffix.lower() != ".md")
        read = source.files if path else [p for p in every if not p.name.startswith(".")]
        return CachedRows(copy_name, path, {file.relative_to(top): file for file in read})
    raise NotCached(f"is in {snapshot}, in a form that is not read from a folder: {why}")

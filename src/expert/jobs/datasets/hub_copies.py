"""Rows of the hub that lie in a cache of this machine, in a form that is read without a network.

The package `datasets` keeps Arrow files of every split: with two descriptions beside them they are
a saved data set. What was only downloaded is a folder of data files as its owner has uploaded them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expert.data.records import DataError


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


_PLAIN = re.compile(r"[\w.+\-]*[\w+\-][\w.+\-]*")
"""Names something in the same folder, and nothing outside: manifests may come from anyone."""


class NotCached(Exception):
    """Rows of the hub that cannot be copied; the text says why."""


def cached_rows(value: str, caches: Caches) -> CachedRows:
    """The files behind `id::split::configuration`; NotCached where they are not here."""
    name, *parts = value.split("::")
    split, config = [*parts, "", ""][:2]
    split = split or "train"
    if not all(_PLAIN.fullmatch(part) for part in (split.partition("[")[0], config) if part):
        raise NotCached("names a split or a configuration that no folder may be called")
    if "[" in split:
        raise NotCached(f"names a slice of a split, which a copy cannot: take {name}::train")
    made = _in_datasets_cache(name, config, caches.datasets)
    if made is not None:
        return _as_saved(name, split, config, made)
    snapshot = _snapshot(name, caches.hub)
    if snapshot is None:
        raise NotCached(f"is not in a cache here ({caches.datasets} and {caches.hub}): fetch it")
    return _as_folder(name, split, config, snapshot)


def same_id(one: str, other: str) -> bool:
    """Whether two ids of the hub are one: `datasets` writes them its own way."""
    return _letters(one) == _letters(other)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9/]", "", name.lower())


def _copy_name(name: str, config: str) -> str:
    return name.replace("/", "--") + (f"--{config}" if config else "")


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


def _as_saved(name: str, split: str, config: str, made: Path) -> CachedRows:
    from expert.data.tokens.documents import dataset_files

    info = _read(made / "dataset_info.json")
    splits = info.get("splits")
    names = [each for each in splits if _PLAIN.fullmatch(each)] if isinstance(splits, dict) else []
    if split not in names:
        raise NotCached(f"has no split {split!r} in {made}; its splits: {', '.join(names)}")
    found = CachedRows(_copy_name(name, config), f"::{split}")
    for each in names:
        files = _arrow_files(made, each, str(info.get("dataset_name") or ""))
        if not files:
            raise NotCached(f"has no Arrow files of {each!r} in {made}")
        found.files |= {Path(each, file.name): file for file in files}
        described = dataset_files([file.name for file in files], made.name)
        found.texts |= {Path(each, file): text for file, text in described.items()}
    found.texts[Path("dataset_dict.json")] = json.dumps({"splits": names})
    return found


def _arrow_files(made: Path, split: str, prefix: str) -> list[Path]:
    """`name-train.arrow`, or the parts of it; not what `map` has left beside them."""
    start = re.escape(prefix) if prefix else r".+"
    shape = re.compile(rf"{start}-{re.escape(split)}(-\d+-of-\d+)?\.arrow")
    return sorted(path for path in made.glob("*.arrow") if shape.fullmatch(path.name))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# --- what was downloaded -------------------------------------------------------------------------


def _snapshot(name: str, cache: Path) -> Path | None:
    """The files of the newest state that was fetched: that of the branch main, where it is told."""
    folders = [
        folder
        for folder in sorted(cache.glob("datasets--*"))
        if same_id(folder.name.removeprefix("datasets--").replace("--", "/"), name)
    ]
    for folder in folders:
        try:
            told = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        except OSError:
            told = ""
        if told and (folder / "snapshots" / told).is_dir():
            return folder / "snapshots" / told
        states = [path for path in (folder / "snapshots").glob("*") if path.is_dir()]
        if states:
            return max(states, key=lambda path: path.stat().st_mtime)
    return None


def _as_folder(name: str, split: str, config: str, snapshot: Path) -> CachedRows:
    """The data files as they were uploaded, where the split can be told by their names."""
    from expert.data.read.sources import find_source, first_row
    from expert.manifest.schema.dataset import DatasetSpec

    top = snapshot
    if config:
        if not (snapshot / config).is_dir():
            raise NotCached(f"has no folder of its configuration {config!r} in {snapshot}")
        top = snapshot / config
    why = ""
    for path in (f"::{split}", *([""] if split == "train" else [])):
        try:
            source = find_source(f"{top}{path}", "train", DatasetSpec(path=str(top)), top)
            first_row(source)
        except DataError as error:
            why = why or str(error).partition("  (")[0]
            continue
        read = source.files if path else _all_files(top)
        files = {file.relative_to(top): file for file in read}
        return CachedRows(_copy_name(name, config), path, files)
    raise NotCached(f"is in {snapshot}, in a form that is not read from a folder: {why}")


def _all_files(folder: Path) -> list[Path]:
    """Every file but those that describe the repository."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".") and path.suffix.lower() != ".md"
    ]

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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from expert.core.files import sha256_of, write_text_atomically
from expert.core.stored_json import read_object_or_empty
from expert.data.read.folders import SPLIT_NAMES, files_by_split
from expert.data.records import DataError
from expert.jobs.datasets.find import DatasetUser, same_id
from expert.manifest.migrate.aliases import CORPORA
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


@dataclass
class ConsolidatedExpert:
    """What `--consolidate` did for one expert, and the options that use the copies."""

    expert: str
    manifest: str
    copies: list[Copy] = field(default_factory=list)
    set_options: str = ""
    left: list[str] = field(default_factory=list)
    """What was not copied, and why."""


class NotCached(Exception):
    """Why hub rows cannot be copied."""


def consolidate(
    users: Sequence[DatasetUser], destination: Path, caches: Caches
) -> list[ConsolidatedExpert]:
    """Copy the data of every manifest into DEST/<expert>/, hub data from its caches; raises before
    copying if anything conflicts."""
    destination = destination.resolve()
    plans: list[tuple[ConsolidatedExpert, dict[Path, Path]]] = []
    texts: dict[Path, str] = {}
    for user in users:
        done = ConsolidatedExpert(user.name, user.source)
        files: dict[Path, Path] = {}
        folder = destination / folder_name(user.name)
        options = []
        for key, value in user.paths.items():
            found = local_path(value, user.folder)
            if value in CORPORA:
                done.left.append(f"{key}: {value} is a built-in corpus, not a file")
            elif not found.exists() and looks_local(value, user.folder):
                done.left.append(f"{key}: {value} is not there")
            elif not found.exists():
                try:
                    named, suffix, copied, described = _cached_rows(value, caches)
                except NotCached as why:
                    done.left.append(f"{key}: {value} {why}")
                    continue
                target = folder / named
                files |= {target / place: file.resolve() for place, file in copied.items()}
                texts |= {target / place: text for place, text in described.items()}
                options.append(f"{key}={target}{suffix}")
            else:
                # Below the manifest's folder, a/train.jsonl and b/train.jsonl stay apart.
                own, home = found.resolve(), user.folder.resolve()
                inside = own != home and own.is_relative_to(home)
                target = folder / (own.relative_to(home) if inside else own.name)
                every = [found] if found.is_file() else sorted(found.rglob("*"))
                files |= {target / p.relative_to(found): p for p in every if p.is_file()}
                options.append(f"{key}={target}{''.join(value.partition('::')[1:])}")
        done.set_options = " ".join(f"--set {shlex.quote(option)}" for option in options)
        plans.append((done, files))
    digests = _refuse_conflicts(plans, destination)
    for done, files in plans:
        done.copies = [_copy(file, target, digests[target]) for target, file in files.items()]
    for target, text in texts.items():  # last: without them it is not a dataset yet
        if not target.exists():
            write_text_atomically(target, text)
    return [done for done, _ in plans]


def _refuse_conflicts(
    plans: Sequence[tuple[ConsolidatedExpert, dict[Path, Path]]], destination: Path
) -> dict[Path, str]:
    """The digest of every file by its target; DataError if one differs from what is there."""
    wanted: dict[Path, str] = {}
    problems = []
    for target, source in (pair for _, files in plans for pair in files.items()):
        digest = sha256_of(source)
        if wanted.setdefault(target, digest) != digest:
            problems.append(f"{target}: two manifests name different files for it: {source}")
        elif target.exists() and (not target.is_file() or sha256_of(target) != digest):
            problems.append(f"{target}: exists and differs from {source}")
    if problems:
        shown = "\n".join(f"  - {problem}" for problem in dict.fromkeys(problems))
        raise DataError(
            f"{destination}: nothing was copied, no file is ever overwritten\n{shown}\n"
            "  (remove what is old, or name another folder with --consolidate)"
        )
    return wanted


def _copy(source: Path, target: Path, digest: str) -> Copy:
    """Copy under a temporary name, verify the copy, and only then rename it."""
    if target.exists():
        return Copy(str(source), str(target), target.stat().st_size, digest, "there already")
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
    return Copy(str(source), str(target), target.stat().st_size, digest, "copied")


def _cached_rows(value: str, caches: Caches) -> tuple[str, str, dict[Path, Path], dict[Path, str]]:
    """Of `id::split::configuration`: the name of a copy, what follows it to name the rows (""
    or `::split`), its files by their path in the copy, and the texts next to them."""
    name, *parts = value.split("::")
    split, config = [*parts, "", ""][:2]
    split = split or "train"
    if "[" in split:
        raise NotCached(f"names a slice of a split, which a copy cannot: take {name}::train")
    if not all(_PLAIN.fullmatch(part) for part in (split, config) if part):
        raise NotCached("names a split or a configuration that no folder may be called")
    copy_name = name.replace("/", "--") + (f"--{config}" if config else "")
    made = [f for f in caches.datasets.glob("*") if same_id(f.name.replace("___", "/"), name)]
    configs = {info for folder in made for info in folder.glob(config or "*") if info.is_dir()}
    configs = {each for each in configs if each.name == "default"} or configs
    if len(configs) == 1:
        infos = configs.pop().rglob("dataset_info.json")
        newest = max(infos, key=lambda info: info.stat().st_mtime, default=None)
        if newest is not None:
            return copy_name, f"::{split}", *_saved_dataset(split, newest)
    folders = [
        folder
        for folder in caches.hub.glob("datasets--*")
        if same_id(folder.name.removeprefix("datasets--").replace("--", "/"), name)
    ]
    states = [state for folder in folders for state in (folder / "snapshots").glob("*")]
    if not states:
        raise NotCached(f"is not in a cache here ({caches.datasets} and {caches.hub}): fetch it")
    top = max(states, key=lambda state: state.stat().st_mtime) / config
    try:
        by_split = files_by_split(top, None)
    except DataError as error:
        raise NotCached(f"is in {top}, in a form that is not read: {error}") from None
    own = by_split[SPLIT_NAMES.get(split)] if split in SPLIT_NAMES else []
    files = own or (by_split[None] if split == "train" else [])
    if not files:
        raise NotCached(f"has no data files of {split!r} in {top}")
    suffix = f"::{split}" if own else ""
    return copy_name, suffix, {file.relative_to(top): file for file in files}, {}


def _saved_dataset(split: str, info_file: Path) -> tuple[dict[Path, Path], dict[Path, str]]:
    """The Arrow files of every split that `datasets` cached, and what describes them."""
    from expert.data.tokens.documents import dataset_files

    folder, info = info_file.parent, read_object_or_empty(info_file)
    splits = info.get("splits")
    names = [each for each in splits if _PLAIN.fullmatch(each)] if isinstance(splits, dict) else []
    if split not in names:
        raise NotCached(f"has no split {split!r} in {folder}; its splits: {', '.join(names)}")
    copied: dict[Path, Path] = {}
    texts = {Path("dataset_dict.json"): json.dumps({"splits": names})}
    prefix = re.escape(str(info.get("dataset_name") or "")) or ".+"
    for each in names:
        # `name-train.arrow` or its parts; not what `map` has left next to them.
        shape = re.compile(rf"{prefix}-{re.escape(each)}(-\d+-of-\d+)?\.arrow")
        files = sorted(path for path in folder.glob("*.arrow") if shape.fullmatch(path.name))
        if not files:
            raise NotCached(f"has no Arrow files of {each!r} in {folder}")
        copied |= {Path(each, file.name): file for file in files}
        described = dataset_files([file.name for file in files], folder.name)
        texts |= {Path(each, file): text for file, text in described.items()}
    return copied, texts

"""Where the rows of a manifest come from: files, folders, saved data sets, the hub, corpora."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Literal

from expert.core.files import sha256_of
from expert.core.text import some_of
from expert.data.read.corpora import download_shakespeare, python_stdlib_text, user_shakespeare
from expert.data.read.folders import SPLIT_NAMES, Split, files_by_split, saved_files, saved_splits
from expert.data.read.hub import hub_fingerprint, read_hub
from expert.data.read.rows import file_format, read_rows
from expert.data.read.streams import data_error
from expert.data.records import BadRow, FilesNotFound, Row
from expert.manifest.check.problems import closest
from expert.manifest.migrate.aliases import CORPORA
from expert.manifest.schema.dataset import DatasetSpec
from expert.manifest.schema.file_formats import COMPRESSED
from expert.manifest.schema.types import parse_size
from expert.planning.survey import local_path, looks_local

SHOWN_BAD_ROWS = 3
MAKES_ROWS = "make_data.py"
"""A script beside a manifest that makes its rows."""


@dataclass(frozen=True)
class Source:
    name: str
    """As in the manifest, for messages."""
    kind: Literal["files", "saved", "hub", "corpus"]
    files: tuple[Path, ...] = ()
    format: str | None = None
    """Overrides the format by file name."""
    split: str = "train"
    """Split on the hub, possibly with a slice."""
    config: str | None = None
    """Configuration on the hub."""
    streaming: bool = False
    max_chars: int | None = None
    """Use only this many characters of plain text."""
    max_samples: int | None = None
    """Use only this many rows."""
    encoding: str | None = None
    """Of text that is not UTF-8."""
    max_unpacked: int | None = None
    """Bytes that a compressed file may unpack to; None: depends on its size."""

    @property
    def on_hub(self) -> dict[str, Any]:
        return {"split": self.split, "config": self.config, "streaming": self.streaming}

    @property
    def is_stdlib(self) -> bool:
        return self.name == "python-stdlib" and self.kind == "corpus"


@dataclass(frozen=True)
class Sources:
    """The source of each split; of a multi-task data set those of its tasks instead."""

    train: Source | None
    validation: Source | None = None
    test: Source | None = None
    weight: float = 1.0
    """Of a task."""
    tasks: tuple[Sources, ...] = ()

    def of(self, split: str) -> list[Source]:
        """The sources of a split: one per task, or just one."""
        found = [getattr(each, split) for each in self.tasks or (self,)]
        return [source for source in found if source is not None]

    @property
    def weights(self) -> list[float]:
        return [each.weight for each in self.tasks or (self,)]

    @property
    def trains(self) -> list[Source]:
        return self.of("train")

    @property
    def every(self) -> list[Source]:
        return [*self.trains, *self.of("validation"), *self.of("test")]


def resolve_sources(spec: DatasetSpec, folder: Path) -> Sources:
    """Find all sources in the manifest, relative to its folder; reads and downloads nothing."""
    finder = SourceFinder(spec, folder)
    if spec.tasks:
        tasks = [
            Sources(
                finder.find(task.train, "train"),
                finder.find(task.valid, "validation") if task.valid else None,
                finder.find(task.test, "test") if task.test else None,
                task.weight,
            )
            for task in spec.tasks.values()
        ]
        held_out = [source for task in tasks for source in (task.validation, task.test)]
        apart = (replace(task, train=_apart_from(task.trains[0], held_out)) for task in tasks)
        return Sources(None, tasks=tuple(apart))
    path = spec.path
    named: dict[Split, str | None] = {"validation": spec.validation_path, "test": spec.test_path}
    if not path:
        raise data_error("training.dataset", "it names no rows", "set path or tasks")
    train = finder.find(path, "train")
    validation, test = (
        finder.find(value, split) if value else finder.beside(path, split)
        for split, value in named.items()
    )
    return Sources(_apart_from(train, (validation, test)), validation, test)


def _apart_from(train: Source, held_out: Iterable[Source | None]) -> Source:
    """The training rows of a folder without the files in it that the manifest names as held out.
    Where no other files are left they stay, and the rows in both splits are warned of."""
    held = {file.resolve() for source in held_out if source is not None for file in source.files}
    left = tuple(file for file in train.files if file.resolve() not in held)
    return replace(train, files=left) if left and len(left) < len(train.files) else train


def iterate(source: Source) -> Iterator[Row | BadRow]:
    """The rows of a source, up to `max_samples` good ones."""
    left = source.max_samples
    for row in _every_row(source):
        yield row
        if left is not None and isinstance(row, Row):
            left -= 1
            if not left:
                return


def _every_row(source: Source) -> Iterator[Row | BadRow]:
    if source.kind == "hub":
        yield from read_hub(source.name, **source.on_hub)
        return
    if source.is_stdlib:
        yield Row({"text": python_stdlib_text(source.max_chars)}, source.name, 1)
        return
    left = source.max_chars
    for path in _files_of(source):
        is_text = left is not None and file_format(path, source.format) == "txt"
        if is_text and left == 0:
            continue
        most = left if is_text else None
        for row in read_rows(
            path,
            format=source.format,
            max_chars=most,
            max_unpacked=source.max_unpacked,
            encoding=source.encoding,
        ):
            if is_text and left is not None and isinstance(row, Row):
                left -= len(row.values["text"])
            yield row


def first_row(source: Source) -> Row:
    """The first readable row; DataError if there is none."""
    bad: list[BadRow] = []
    for row in iterate(source):
        if isinstance(row, Row):
            return row
        bad = [*bad[:SHOWN_BAD_ROWS], row]
    if bad:
        shown = "\n".join(f"  - {row}" for row in bad[:SHOWN_BAD_ROWS])
        raise data_error(source.name, f"none of its rows can be read\n{shown}\n", "fix the data")
    # In a folder, the files of one split may be empty.
    of_folder = [file.name for file in source.files if file.name != PurePath(source.name).name]
    where = f"{source.name}: {some_of(of_folder)}" if of_folder else source.name
    raise data_error(where, "there are no rows in it", "put rows into it, or name another file")


def content_hash(source: Source) -> str:
    """SHA-256 of the content of the rows, regardless of `max_samples` and file names."""
    if source.kind == "hub":
        return hub_fingerprint(source.name, **source.on_hub)
    whole = hashlib.sha256()
    if source.is_stdlib:
        whole.update(python_stdlib_text(source.max_chars).encode())
        return whole.hexdigest()
    whole.update(f"max_chars {source.max_chars}\n".encode())
    if source.encoding:
        whole.update(f"encoding {source.encoding}\n".encode())
    for path in _files_of(source):
        try:
            digest = sha256_of(path)
        except OSError as error:
            raise data_error(str(path), f"it cannot be read: {error.strerror}") from error
        packing = path.suffix.lower() if path.suffix.lower() in COMPRESSED else ""
        whole.update(f"{file_format(path, source.format)}{packing} {digest}\n".encode())
    return whole.hexdigest()


def _files_of(source: Source) -> Sequence[Path]:
    return source.files if source.kind != "corpus" or source.files else (download_shakespeare(),)


class SourceFinder:
    """Turns the paths of one manifest into sources."""

    def __init__(self, spec: DatasetSpec, folder: Path) -> None:
        self._spec = spec
        self._folder = folder
        self._format = None if spec.format == "huggingface" else spec.format
        self._hub_meant = "huggingface" in (spec.type, spec.format)
        self._files = Source(
            *("", "files", (), self._format),
            max_chars=spec.max_chars,
            max_samples=spec.max_samples,
            encoding=spec.encoding,
            max_unpacked=parse_size(spec.max_unpacked_size) if spec.max_unpacked_size else None,
        )

    def find(self, path: str, split: Split) -> Source:
        """The source that `path` names for a split, or DataError."""
        local = local_path(path, self._folder)
        _, *parts = path.split("::")
        if path in CORPORA:
            file = user_shakespeare(self._folder) if path == "shakespeare" else None
            corpus = replace(self._files, name=path, kind="corpus", files=(file,) if file else ())
            return replace(corpus, format="txt", max_samples=None)
        if local.is_dir():
            return self._in_folder(path, local, split, parts[0] if parts else None)
        if local.exists():
            if parts:
                raise data_error(path, "a file has no splits", "leave out what follows '::'")
            file_format(local, self._format)
            return replace(self._files, name=path, files=(local,))
        is_id_and_split = re.fullmatch(r"[\w-]+::.*", path)  # without an owner, unlike a file
        if self._hub_meant or not looks_local(path, self._folder) or is_id_and_split:
            return self._on_hub(path)
        fix, beside = "paths are relative to the folder of the manifest", list[str]()
        with suppress(OSError):
            beside = [entry.name for entry in local.parent.iterdir()]
            fix = "check training.dataset.path"
        what = f"there is no {local}" if str(local) != path else "there is no such file"
        if close := closest(local.name, beside, 0.8):  # misspelt: no file is missing
            raise data_error(path, what, f"did you mean {close!r}?")
        raise self._not_here(path, what, fix, local)

    def beside(self, train: str, split: Split) -> Source | None:
        """Another split in the folder of the training rows, found by name."""
        local = local_path(train, self._folder)
        if train in CORPORA or "::" in train or not local.is_dir():
            return None
        saved = saved_splits(local)
        if saved is not None:
            name = next((name for name in saved if SPLIT_NAMES.get(name) == split), None)
            return self._saved(f"{train}::{name}", saved[name]) if name else None
        files = files_by_split(local, self._format)[split]
        return replace(self._files, name=train, files=tuple(files)) if files else None

    def _saved(self, name: str, folder: Path) -> Source:
        plain = replace(self._files, name=name, files=saved_files(folder))
        return replace(plain, kind="saved", format="arrow", max_chars=None)

    def _on_hub(self, path: str) -> Source:
        name, *parts = path.split("::")
        if self._spec.encoding:
            what = "rows of the hub have no encoding"
            raise data_error(path, what, "remove training.dataset.encoding")
        if len(parts) > 2:
            raise data_error(path, "too many '::'", "write id::split or id::split::configuration")
        split, config = [*parts, "", ""][:2]
        return Source(
            name,
            "hub",
            split=split or "train",
            config=config or None,
            streaming=self._spec.streaming,
            max_samples=self._spec.max_samples,
        )

    def _in_folder(self, path: str, folder: Path, split: Split, asked: str | None) -> Source:
        saved = saved_splits(folder)
        if saved is not None:
            wanted = asked or next((n for n in saved if SPLIT_NAMES.get(n) == split), None)
            if asked is None and list(saved) == [""]:
                wanted = ""
            if wanted is None or wanted not in saved:
                names = ", ".join(name for name in saved if name) or "none"
                what = f"the saved data set has no split {asked or split!r}; its splits: {names}"
                raise data_error(path, what, "name one: path::split")
            return self._saved(path, saved[wanted])
        by_split = files_by_split(folder, self._format)
        if asked is not None:
            files = by_split[SPLIT_NAMES.get(asked)] if asked in SPLIT_NAMES else []
        elif split == "train":
            files = sorted([*by_split["train"], *by_split[None]])
        else:
            every = [file for files in by_split.values() for file in files]
            files = by_split[split] or by_split[None] or sorted(every)
        if not files:
            what = f"the folder has no data files for {asked or split!r}"
            fix = "put .jsonl, .csv, .parquet or other data files there"
            raise self._not_here(path, what, fix, folder)
        return replace(self._files, name=path, files=tuple(files))

    def _not_here(self, path: str, what: str, fix: str, wanted: Path) -> FilesNotFound:
        """The error for missing files, with the command that makes them if there is one."""
        script = self._folder / MAKES_ROWS
        if script.is_file() and wanted.is_relative_to(self._folder):
            fix = f"python {script} makes it"
        return FilesNotFound(str(data_error(path, what, fix)))

"""Data sets of other trainers as training.dataset, or as its tasks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from expert.manifest.migrate.migration import Entries, Migration, with_value
from expert.manifest.text.item import Item

PREFERENCES = (
    "preference rows; only sft (supervised fine-tuning) is supported",
    "docs/DATA.md shows how to train on the preferred answers",
)
_FILE = re.compile(r"\.(?:jsonl?|ndjson|csv|tsv|parquet|arrow|txt|md)(?:\.gz|\.zst)?$")
# Columns that are found without a mapping.
_USUAL_COLUMNS = {
    "system": ("system",),
    "tools": ("tools", "functions"),
    "messages": ("messages", "conversations"),
}


@dataclass
class NamedDataset:
    """A data set of another trainer's file, with its columns."""

    name: str
    item: Item
    """Where the user wrote it."""
    path: Item | None = None
    split: Item = field(default_factory=lambda: Item(None))
    subset: Item = field(default_factory=lambda: Item(None))
    mapping: Entries = field(default_factory=dict)
    more: Entries = field(default_factory=dict)
    """More keys of training.dataset: format, max_samples."""
    refused: bool = False
    """A problem was already reported."""

    @property
    def source(self) -> Item | None:
        """training.dataset.path: the path with split and configuration."""
        if self.path is None or not isinstance(self.path.value, str):
            return self.path
        parts = [self.path.value]
        split = str(self.split.value) if self.split.value is not None else "train"
        whole_file = split == "train" and _FILE.search(self.path.value)
        if self.subset.value is not None:
            parts += [split, str(self.subset.value)]
        elif self.split.value is not None and not whole_file:
            parts.append(split)
        return with_value(self.path, "::".join(parts))

    def map_column(self, part: str, item: Item) -> None:
        """Map a column to a part of an example, unless it has a name that is found anyway."""
        if item.value not in (None, *_USUAL_COLUMNS.get(part, ())):
            self.mapping[part] = item


def put_rows(work: Migration, sets: Sequence[NamedDataset]) -> None:
    """Write the data sets to training.dataset: one as its path, several as tasks."""
    if not sets:  # all were refused
        work.seen.add("no rows")
        return
    for named in sets:
        put_mapping(work, named)
        part_of_hub = named.split if named.split.value is not None else named.subset
        if named.source is not None and part_of_hub.value is not None:
            work.read_as(part_of_hub, f"path: {named.source.value}")
    first = sets[0]
    if len(sets) > 1:
        _put_tasks(work, sets)
    elif first.source is not None:
        work.place_in_dataset("path", first.source)
    for key, item in first.more.items():
        work.place_in_dataset(key, item)


def put_mapping(work: Migration, named: NamedDataset) -> None:
    """Write the columns to training.dataset.field_mapping; those of the first data set."""
    for part, column in named.mapping.items():
        if column.value != part:
            work.read_as(column, f"training.dataset.field_mapping.{part}")
    if named.mapping:
        at = next(iter(named.mapping.values()))
        work.dataset.setdefault("field_mapping", with_value(at, named.mapping))


def _put_tasks(work: Migration, sets: Sequence[NamedDataset]) -> None:
    """Write tasks; all must have the same columns and formats."""
    valid = [named for named in sets if not named.refused]
    columns = [{k: v.plain() for k, v in {**s.mapping, **s.more}.items()} for s in valid]
    for named, its in zip(valid[1:], columns[1:], strict=False):
        if its != columns[0]:
            what = f"{named.name} and {valid[0].name} have different columns, formats or limits"
            fix = "rows of all tasks need the same columns: train them one after the other, or "
            work.problem(named.item, what, f"{fix}rename the columns in one of the files")
    tasks: Entries = {}
    for named in sets:
        if named.source is not None:
            name, number = named.name, 2
            while name in tasks:  # a set listed twice is two tasks
                name, number = f"{named.name}-{number}", number + 1
            tasks[name] = with_value(named.item, {"train": named.source})
    at = sets[0].item
    work.place_in_dataset("tasks", with_value(at, tasks))
    work.dataset.setdefault("type", with_value(at, "multi_task"))


def put_validation(work: Migration, item: Item, sets: Sequence[NamedDataset | None]) -> None:
    """Write the data set to training.dataset.validation_path; several are a problem."""
    if len(sets) > 1:
        work.problem(item, f"{len(sets)} sets of validation rows", "keep one of them")
    elif sets and sets[0] is not None and sets[0].source is not None:
        work.place_in_dataset("validation_path", sets[0].source)


def title_of(path: str) -> str:
    """A name for the data set at a path."""
    last = re.split(r"[\\/]", path.split("::")[0].rstrip("\\/"))[-1]
    return last.removesuffix(".jsonl").removesuffix(".json") or "rows"

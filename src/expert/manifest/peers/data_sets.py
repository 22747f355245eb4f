"""Data sets as other trainers name them, as one data set or as tasks of ours."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from expert.core.errors import Problem
from expert.manifest.migrate.moving import Entries, Migration
from expert.manifest.notices import notice
from expert.manifest.text.document import Item, shown

ROLES = frozenset(
    {
        "system",
        "developer",
        "user",
        "human",
        "assistant",
        "gpt",
        "bot",
        "model",
        "function_call",
        "tool",
        "function",
        "observation",
        "ipython",
    }
)
"""Who may speak in a message, by the names that rows are read with."""
KEYS_OF_MESSAGES = {"role": ("role", "from"), "content": ("content", "value")}
MESSAGES = ("messages", "conversations")
"""Columns that are taken for conversations by their name."""
_OWN_NAMES = {"system": ("system",), "tools": ("tools", "functions"), "history": ("history",)}
"""Columns that are read under these names only."""


@dataclass
class Named:
    """One data set of a list: where it lies and which of its columns mean what."""

    name: str
    item: Item
    """Where the user wrote it."""
    path: Item | None = None
    split: Item | None = None
    subset: Item | None = None
    mapping: Entries = field(default_factory=dict)
    more: Entries = field(default_factory=dict)
    """Further keys of training.dataset: format, text_field, max_samples."""
    refused: bool = False
    """Something of it is a problem already."""

    def source(self) -> Item | None:
        """The path with split and configuration, as training.dataset.path has them."""
        if self.path is None or not isinstance(self.path.value, str):
            return self.path
        parts = [self.path.value]
        if self.split is not None or self.subset is not None:
            parts.append(str(self.split.value) if self.split is not None else "train")
        if self.subset is not None:
            parts.append(str(self.subset.value))
        return Item("::".join(parts), self.path.path, self.path.line)


def put_rows(work: Migration, sets: Sequence[Named]) -> None:
    """Write them as training.dataset: one by its path, several as tasks of the same columns."""
    if not sets:  # all were refused
        work.seen.add("no rows")
        return
    dataset = work.section("training", "dataset")
    for named in sets:
        for part, column in named.mapping.items():
            home = f"training.dataset.field_mapping.{part}"
            if column.value != part:
                work.notices.append(notice("read as", column, home))
        if named.split is not None or named.subset is not None:
            source = named.source()
            told = named.split or named.subset
            if source is not None and told is not None:
                work.notices.append(notice("read as", told, f"path: {source.value}"))
    if len(sets) == 1:
        only = sets[0]
        source = only.source()
        if source is not None:
            work.place(dataset, "path", source, "training.dataset.path")
    else:
        _refuse_differences(work, sets)
        tasks: Entries = {}
        for named in sets:
            source = named.source()
            if source is not None:
                train = {"train": source}
                tasks[_free_name(named.name, tasks)] = Item(train, named.item.path, named.item.line)
        first = sets[0].item
        work.place(dataset, "tasks", Item(tasks, first.path, first.line), "training.dataset.tasks")
        dataset.setdefault("type", Item("multi_task", first.path, first.line))
    first_set = sets[0]
    if first_set.mapping:
        at = next(iter(first_set.mapping.values()))
        dataset.setdefault("field_mapping", Item(first_set.mapping, at.path, at.line))
    for key, item in first_set.more.items():
        work.place(dataset, key, item, f"training.dataset.{key}")


def read_hub_parts(work: Migration) -> None:
    """TRL's dataset_name with dataset_config, dataset_train_split and dataset_test_split."""
    parts = {
        key: work.root.pop(f"dataset_{key}")
        for key in ("config", "train_split", "test_split")
        if f"dataset_{key}" in work.root
    }
    given = {key: item for key, item in parts.items() if item.value is not None}
    path = work.root.get("dataset_name")
    if not given:
        return
    if path is None or not isinstance(path.value, str):
        for item in given.values():
            what = "a part of dataset_name, which is not given"
            work.problems.append(Problem(item.path, what, "name the data set", item.line))
        return
    config, judged = given.get("config"), given.get("test_split")
    rows = Named("rows", path, path, given.get("train_split"), config)
    tests = Named("rows", path, path, judged, config)
    source, held_out = rows.source(), tests.source()
    for key, item in given.items():
        home = "validation_path" if key == "test_split" else "path"
        whole = held_out if key == "test_split" else source
        if whole is not None:
            work.notices.append(notice("read as", item, f"training.dataset.{home}: {whole.value}"))
    if source is not None:
        work.root["dataset_name"] = source
    if judged is not None and held_out is not None:
        dataset = work.section("training", "dataset")
        dataset.setdefault("validation_path", held_out)


def _free_name(name: str, taken: Entries) -> str:
    """The name of a task; a set named twice is two tasks."""
    number = 2
    free = name
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free


def _refuse_differences(work: Migration, sets: Sequence[Named]) -> None:
    """Tasks share their columns: what one set says of them, all must say."""
    sets = [named for named in sets if not named.refused]
    for named in sets[1:]:
        if _says(named) != _says(sets[0]):
            what = f"{named.name} and {sets[0].name} have other columns or formats"
            fix = "rows of all tasks need the same columns: train them one after the other, or "
            fix += "rename the columns in one of the files"
            work.problems.append(Problem(named.item.path, what, fix, named.item.line))


def _says(named: Named) -> dict[str, object]:
    return {key: item.plain() for key, item in {**named.mapping, **named.more}.items()}


def title_of(path: str) -> str:
    """What a data set is called where only its place is known."""
    last = re.split(r"[\\/]", path.split("::")[0].rstrip("\\/"))[-1]
    return last.removesuffix(".jsonl").removesuffix(".json") or "rows"


def own_column(work: Migration, part: str, item: Item) -> None:
    """A column that is read under its own name only: another name is refused."""
    usual = _OWN_NAMES[part]
    if item.value not in (None, *usual):
        what = f"the {part} texts are in the column {shown(item.plain())}"
        fix = f"call it {usual[0]} in the rows"
        work.problems.append(Problem(item.path, what, fix, item.line))


def keys_of_messages(work: Migration, part: str, item: Item) -> None:
    """Who speaks and what is said: `role` or `from`, `content` or `value`."""
    usual = KEYS_OF_MESSAGES.get(part)
    if usual and item.value not in (None, *usual):
        what = f"the {part} of a message is in its key {shown(item.plain())}"
        fix = f"call it {' or '.join(usual)} in the rows"
        work.problems.append(Problem(item.path, what, fix, item.line))


def roles(work: Migration, names: Sequence[Item]) -> None:
    """Every name of a speaker has to be one that rows are read with."""
    for item in names:
        if item.value is not None and not (isinstance(item.value, str) and item.value in ROLES):
            what = f"{shown(item.plain())} speaks in the messages"
            fix = "call the speakers system, user and assistant in the rows"
            work.problems.append(Problem(item.path, what, fix, item.line))

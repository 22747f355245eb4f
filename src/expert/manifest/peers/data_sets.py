"""Data sets as other trainers name them, as one data set or as tasks of ours."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from expert.manifest.migrate.migration import Entries, Migration
from expert.manifest.schema.message_names import ROLES, THOUGHTS, TRAINED, TRAINED_IN_PARTS
from expert.manifest.text.item import Item, shown

KEYS_OF_MESSAGES = {
    "role": ("role", "from"),
    "content": ("content", "value"),
    "train": TRAINED,
    "train_detail": (TRAINED_IN_PARTS,),
    **dict.fromkeys(THOUGHTS, THOUGHTS),
}
MESSAGES = ("messages", "conversations")
"""Columns that are taken for conversations by their name."""
PREFERENCES = (
    "preference rows; only sft (supervised fine-tuning) is built",
    "docs/DATA.md says how the preferred answers are trained on",
)
_FILE = re.compile(r"\.(?:jsonl?|ndjson|csv|tsv|parquet|arrow|txt|md)(?:\.gz|\.zst)?$")
_LOSS_KEYS = {
    *("completion_only_loss", "assistant_only_loss", "train_on_responses_only"),
    *("train_on_completions_only", "train_on_prompt", "train_on_inputs"),
}
_USUAL_COLUMNS = {"system": ("system",), "tools": ("tools", "functions")}


@dataclass
class NamedDataset:
    """One data set of a list: where it is and which of its columns mean what."""

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

    @property
    def source(self) -> Item | None:
        """The path with split and configuration, as training.dataset.path has them."""
        if self.path is None or not isinstance(self.path.value, str):
            return self.path
        parts = [self.path.value]
        split = str(self.split.value) if self.split is not None else "train"
        all_of_a_file = split == "train" and _FILE.search(self.path.value)
        if self.subset is not None or (self.split is not None and not all_of_a_file):
            parts.append(split)
        if self.subset is not None:
            parts.append(str(self.subset.value))
        return Item("::".join(parts), self.path.path, self.path.line)

    def columns(self) -> dict[str, object]:
        """What it says of its columns and formats."""
        return {key: item.plain() for key, item in {**self.mapping, **self.more}.items()}


def put_rows(work: Migration, sets: Sequence[NamedDataset]) -> None:
    """Write them as training.dataset: one by its path, several as tasks of the same columns."""
    if not sets:  # all were refused
        work.seen.add("no rows")
        return
    for named in sets:
        for part, column in named.mapping.items():
            if column.value != part:
                work.read_as(column, f"training.dataset.field_mapping.{part}")
        told = named.split or named.subset
        if named.source is not None and told is not None:
            work.read_as(told, f"path: {named.source.value}")
    first = sets[0]
    if len(sets) > 1:
        _put_tasks(work, sets)
    elif first.source is not None:
        work.place_in_dataset("path", first.source)
    if first.mapping:
        at = next(iter(first.mapping.values()))
        work.dataset.setdefault("field_mapping", Item(first.mapping, at.path, at.line))
    for key, item in first.more.items():
        work.place_in_dataset(key, item)


def _put_tasks(work: Migration, sets: Sequence[NamedDataset]) -> None:
    """Tasks share their columns: what one set says of them, all must say."""
    sound = [named for named in sets if not named.refused]
    for named in sound[1:]:
        if named.columns() != sound[0].columns():
            what = f"{named.name} and {sound[0].name} have other columns or formats"
            fix = "rows of all tasks need the same columns: train them one after the other, or "
            work.problem(named.item, what, f"{fix}rename the columns in one of the files")
    tasks: Entries = {}
    for named in sets:
        if named.source is not None:
            name, number = named.name, 2
            while name in tasks:  # a set named twice is two tasks
                name, number = f"{named.name}-{number}", number + 1
            tasks[name] = Item({"train": named.source}, named.item.path, named.item.line)
    at = sets[0].item
    work.place_in_dataset("tasks", Item(tasks, at.path, at.line))
    work.dataset.setdefault("type", Item("multi_task", at.path, at.line))


def put_validation(work: Migration, item: Item, sets: Sequence[NamedDataset | None]) -> None:
    """One set of validation rows, as training.dataset.validation_path."""
    if len(sets) > 1:
        work.problem(item, f"{len(sets)} sets of validation rows", "keep one of them")
    elif sets and sets[0] is not None and sets[0].source is not None:
        work.place_in_dataset("validation_path", sets[0].source)


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
            work.problem(item, "a part of dataset_name, which is not given", "name the data set")
        return
    config, judged = given.get("config"), given.get("test_split")
    source = NamedDataset("rows", path, path, given.get("train_split"), config).source
    held_out = NamedDataset("rows", path, path, judged, config).source
    for key, item in given.items():
        home = "validation_path" if key == "test_split" else "path"
        whole = held_out if key == "test_split" else source
        if whole is not None:
            work.read_as(item, f"training.dataset.{home}: {whole.value}")
    if source is not None:
        work.root["dataset_name"] = source
    if judged is not None and held_out is not None:
        work.dataset.setdefault("validation_path", held_out)


def note_loss(work: Migration) -> None:
    """TRL trains on the requests of conversations too, unless it is told otherwise."""
    if not {"model_name_or_path", "model_name"} & {*work.root} or work.is_whole:
        return
    if {"dataset_name", "dataset_text_field"} & {*work.root} and not _LOSS_KEYS & {*work.root}:
        at = work.root.get("dataset_name") or work.root["dataset_text_field"]
        text = (
            "of conversations only the answers are trained on; train_on_prompt: true is TRL's way"
        )
        work.report("note", at, text)


def title_of(path: str) -> str:
    """What a data set is called where only its place is known."""
    last = re.split(r"[\\/]", path.split("::")[0].rstrip("\\/"))[-1]
    return last.removesuffix(".jsonl").removesuffix(".json") or "rows"


def map_column(named: NamedDataset, part: str, item: Item) -> None:
    """A column beside the conversation; under its usual name it is found without being named."""
    if item.value not in (None, *_USUAL_COLUMNS[part]):
        named.mapping[part] = item


def keys_of_messages(work: Migration, part: str, item: Item) -> None:
    """What a message has under names of its own: `role` or `from`, `content` or `value`, …"""
    usual = KEYS_OF_MESSAGES.get(part, (part,))
    if item.value not in (None, *usual):
        what = f"the {part} of a message is in its key {shown(item.plain())}"
        work.problem(item, what, f"call it {' or '.join(usual)} in the rows")


def roles(work: Migration, names: Sequence[Item], role: str) -> None:
    """Every name of a speaker has to be one that rows are read with, and mean the same there."""
    for item in names:
        known = ROLES.get(item.value) if isinstance(item.value, str) else None
        if item.value is not None and known != ROLES.get(role, known or role):
            what = f"{shown(item.plain())} speaks in the messages"
            if known:
                what = f"{what} as {role}; here it is {known}"
            work.problem(item, what, "call the speakers system, user and assistant in the rows")

"""Converts data sets of other trainers to training.dataset, or to its tasks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from expert.manifest.migrate.migration import Entries, Migration, with_value
from expert.manifest.schema.message_names import REASONING_FIELDS, ROLES, TRAIN_DETAIL, TRAIN_FIELDS
from expert.manifest.text.item import Item, shown

MESSAGE_KEYS = {
    "role": ("role", "from"),
    "content": ("content", "value"),
    "train": TRAIN_FIELDS,
    "train_detail": (TRAIN_DETAIL,),
    **dict.fromkeys(REASONING_FIELDS, REASONING_FIELDS),
}
MESSAGES = ("messages", "conversations")
"""Columns that hold conversations by default."""
PREFERENCES = (
    "preference rows; only sft (supervised fine-tuning) is supported",
    "docs/DATA.md shows how to train on the preferred answers",
)
_FILE = re.compile(r"\.(?:jsonl?|ndjson|csv|tsv|parquet|arrow|txt|md)(?:\.gz|\.zst)?$")
_LOSS_KEYS = {
    *("completion_only_loss", "assistant_only_loss", "train_on_responses_only"),
    *("train_on_completions_only", "train_on_prompt", "train_on_inputs"),
}
_REFUSED_ROWS = ("dataset_mixture", "dataset_mixer", "hf_dataset")
_SCHEDULES = {"lr_scheduler_type", "lr_scheduler", "scheduler"}
_ADAPTER_KEYS = re.compile(r".*(lora|dora|peft|adapter|finetun).*|r|rank")
_USUAL_COLUMNS = {"system": ("system",), "tools": ("tools", "functions")}


@dataclass
class NamedDataset:
    """A data set of another trainer's file, with its columns."""

    name: str
    item: Item
    """Where the user wrote it."""
    path: Item | None = None
    split: Item | None = None
    subset: Item | None = None
    mapping: Entries = field(default_factory=dict)
    more: Entries = field(default_factory=dict)
    """More keys of training.dataset: format, text_field, max_samples."""
    refused: bool = False
    """A problem was already reported."""

    @property
    def source(self) -> Item | None:
        """training.dataset.path: the path with split and configuration."""
        if self.path is None or not isinstance(self.path.value, str):
            return self.path
        parts = [self.path.value]
        split = str(self.split.value) if self.split is not None else "train"
        whole_file = split == "train" and _FILE.search(self.path.value)
        if self.subset is not None or (self.split is not None and not whole_file):
            parts.append(split)
        if self.subset is not None:
            parts.append(str(self.subset.value))
        return with_value(self.path, "::".join(parts))

    def columns(self, but: str = "") -> dict[str, object]:
        """What all tasks must have in common."""
        parts = {**self.mapping, **self.more}
        return {key: item.plain() for key, item in parts.items() if key != but}


def put_rows(work: Migration, sets: Sequence[NamedDataset]) -> None:
    """Write the data sets to training.dataset: one as its path, several as tasks."""
    if not sets:  # all were refused
        work.seen.add("no rows")
        return
    for named in sets:
        for part, column in named.mapping.items():
            if column.value != part:
                work.read_as(column, f"training.dataset.field_mapping.{part}")
        part_of_hub = named.split or named.subset
        if named.source is not None and part_of_hub is not None:
            work.read_as(part_of_hub, f"path: {named.source.value}")
    first = sets[0]
    if len(sets) > 1:
        _put_tasks(work, sets)
    elif first.source is not None:
        work.place_in_dataset("path", first.source)
    if first.mapping:
        at = next(iter(first.mapping.values()))
        work.dataset.setdefault("field_mapping", with_value(at, first.mapping))
    for key, item in first.more.items():
        work.place_in_dataset(key, item)


def _put_tasks(work: Migration, sets: Sequence[NamedDataset]) -> None:
    """Write tasks; all must have the same columns and formats."""
    valid = [named for named in sets if not named.refused]
    for named in valid[1:]:
        if named.columns() != valid[0].columns():
            what = f"{named.name} and {valid[0].name} have different columns or formats"
            fix = "rows of all tasks need the same columns: train them one after the other, or "
            fix += "rename the columns in one of the files"
            if named.columns(but="max_samples") == valid[0].columns(but="max_samples"):
                what = f"{named.name} and {valid[0].name} have different limits on their rows"
                fix = "write training.dataset.max_samples for all, or shorten the file"
            work.problem(named.item, what, fix)
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


def read_hub_parts(work: Migration) -> None:
    """Convert TRL's dataset_config, dataset_train_split and dataset_test_split."""
    if any(work.root.get(key, Item(None)).value for key in _REFUSED_ROWS):
        work.seen.add("no rows")
    parts = {
        key: work.root.pop(f"dataset_{key}")
        for key in ("config", "train_split", "test_split")
        if f"dataset_{key}" in work.root
    }
    parts = {key: item for key, item in parts.items() if item.value is not None}
    path = work.root.get("dataset_name")
    if not parts:
        return
    if path is None or not isinstance(path.value, str):
        for item in parts.values():
            work.problem(item, "needs dataset_name, which is missing", "add dataset_name")
        return
    config, test_split = parts.get("config"), parts.get("test_split")
    source = NamedDataset("rows", path, path, parts.get("train_split"), config).source
    held_out = NamedDataset("rows", path, path, test_split, config).source
    for key, item in parts.items():
        home = "validation_path" if key == "test_split" else "path"
        full_path = held_out if key == "test_split" else source
        if full_path is not None:
            work.read_as(item, f"training.dataset.{home}: {full_path.value}")
    if source is not None:
        work.root["dataset_name"] = source
    if test_split is not None and held_out is not None:
        work.dataset.setdefault("validation_path", held_out)


def note_defaults(work: Migration) -> None:
    """Note the differences to TRL, which by default trains on prompts of conversations too, and all
    weights."""
    if not {"model_name_or_path", "model_name"} & {*work.root} or work.is_expert_manifest:
        return
    keys = [*work.root, *work.section("training")]
    if "dataset_name" in work.root and not any(map(_ADAPTER_KEYS.fullmatch, keys)):
        text = "a lora adapter is trained; TRL's default is all weights, use_peft: false here"
        work.report("note", work.root["dataset_name"], text)
    if {"dataset_name", "dataset_text_field"} & {*work.root} and not _LOSS_KEYS & {*work.root}:
        at = work.root.get("dataset_name") or work.root["dataset_text_field"]
        text = (
            "of conversations, only answers are trained on; TRL's default is train_on_prompt: true"
        )
        work.report("note", at, text)
    if "dataset_name" in work.root and not _SCHEDULES & {*keys}:
        text = "the learning rate falls like a cosine; TRL's default is lr_scheduler_type: linear"
        work.report("note", work.root["dataset_name"], text)


def title_of(path: str) -> str:
    """A name for the data set at a path."""
    last = re.split(r"[\\/]", path.split("::")[0].rstrip("\\/"))[-1]
    return last.removesuffix(".jsonl").removesuffix(".json") or "rows"


def map_column(named: NamedDataset, part: str, item: Item) -> None:
    """Map a column of the system text or the tools, unless it has its default name."""
    if item.value not in (None, *_USUAL_COLUMNS[part]):
        named.mapping[part] = item


def check_message_key(work: Migration, part: str, item: Item) -> None:
    """Refuse keys of messages that are not read, such as another name for `role` or `from`."""
    known = MESSAGE_KEYS.get(part, (part,))
    if item.value not in (None, *known):
        what = f"{shown(item.plain())} is not a known message key for {part}"
        work.problem(item, what, f"rename it to {' or '.join(known)} in the rows")


def roles(work: Migration, names: Sequence[Item], role: str) -> None:
    """Refuse role names that are unknown, or known as another role."""
    for item in names:
        known = ROLES.get(item.value) if isinstance(item.value, str) else None
        if item.value is not None and known != ROLES.get(role, known or role):
            what = f"{shown(item.plain())} is not a known role"
            if known:
                what = f"{shown(item.plain())} is the role {role} there, but {known} here"
            work.problem(item, what, "use the roles system, user and assistant in the rows")

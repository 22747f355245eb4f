"""Data sets of other trainers as training.dataset, or as its tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from expert.manifest.migrate.migration import Entries, Migration, with_value
from expert.manifest.schema.file_formats import ALL_ENDINGS
from expert.manifest.text.item import Item

# Columns that are found without a mapping.
_USUAL_COLUMNS = {
    "system": ("system",),
    "tools": ("tools", "functions"),
    "messages": ("messages", "conversations"),
}


def hub_path(path: Item, split: Item, subset: Item) -> Item:
    """training.dataset.path: the path with split and configuration."""
    if not isinstance(path.value, str):
        return path
    text, part = path.value, str(split.value or "train")
    if subset.value is not None:
        text += f"::{part}::{subset.value}"
    elif split.value is not None and not (part == "train" and text.endswith(ALL_ENDINGS)):
        text += f"::{part}"
    return with_value(path, text)


def mapping_of(work: Migration, columns: Mapping[str, Item]) -> Entries:
    """`field_mapping` with the columns of parts of an example, if there are any: columns with a
    usual name are found anyway."""
    mapping = {
        part: column
        for part, column in columns.items()
        if column.value not in (None, *_USUAL_COLUMNS.get(part, ()))
    }
    for part, column in mapping.items():
        if column.value != part:
            work.read_as(column, f"training.dataset.field_mapping.{part}")
    return {"field_mapping": with_value(next(iter(mapping.values())), mapping)} if mapping else {}


def put_rows(work: Migration, item: Item, sets: Sequence[Entries]) -> None:
    """Write data sets, each as keys of training.dataset: one as its path, several as tasks, which
    may have a weight."""
    tasks: Entries = {}
    weights = [keys.pop("weight", Item(1)) for keys in sets]
    if len(sets) == 1 and weights[0].value not in (1, None):
        work.problem(weights[0], "there is only one data set", "write training.dataset.max_samples")
    for keys, weight in zip(sets, weights, strict=True):
        path = keys.get("path", Item(None))
        if path.value is None:
            continue
        others, first = (Item({**each, "path": path}).plain() for each in (keys, sets[0]))
        last = re.split(r"[\\/]", str(path.value).split("::")[0].rstrip("\\/"))[-1]
        title = name = last.removesuffix(".jsonl").removesuffix(".json") or "rows"
        if others != first:
            what = f"{title} and the first data set have different columns or formats"
            work.problem(path, what, "rename the columns in one of the files")
        number = 2
        while name in tasks:  # a set listed twice is two tasks
            name, number = f"{title}-{number}", number + 1
        share = {"weight": weight} if weight.value not in (1, None) else {}
        tasks[name] = with_value(path, {"train": path, **share})
    for key, entry in sets[0].items():
        if key == "field_mapping":
            work.dataset.setdefault(key, entry)
        elif key != "path" or len(sets) == 1:
            work.put(f"training.dataset.{key}", entry)
    if len(sets) > 1:
        work.put("training.dataset.tasks", with_value(item, tasks))
        work.dataset.setdefault("type", with_value(item, "multi_task"))

"""Comments survive the move to another layout, wherever their key went."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from expert.manifest.text.item import Item, add_entry, is_comment


@dataclass(frozen=True)
class Remark:
    """YAML comments of one item, and where it stood."""

    path: str
    line: int | None
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Memory:
    """Every comment of a tree before it is rewritten."""

    remarks: tuple[Remark, ...]
    keyed: tuple[tuple[str, Item], ...]
    """Entries under comment keys, with their keys."""


def remember(root: Item) -> Memory:
    """Note down the comments of a tree as the user wrote it."""
    remarks = [
        Remark(item.path, item.line, (*item.above, *([item.beside] if item.beside else [])))
        for item in root.walk()
        if item.above or item.beside
    ]
    return Memory(tuple(remarks), tuple(_comment_entries(root)))


def restore(root: Item, memory: Memory) -> list[str]:
    """Bring back comments that got lost, and drop copies; what has no home left is returned."""
    present = {id(item) for _, item in _comment_entries(root)}
    for key, item in memory.keyed:
        if id(item) not in present:
            add_entry(_section_for(root, item.path), key, item, [])
    wanted = Counter(text for remark in memory.remarks for text in remark.texts)
    _drop_copies(root, wanted)
    homeless: list[str] = []
    for remark in reversed(memory.remarks):  # each is put before those that follow it
        lost = [text for text in remark.texts if wanted[text] > 0]
        wanted.subtract(lost)
        home = _home(root, remark) if lost else None
        if home is not None:
            home.above[:0] = lost
        else:
            homeless[:0] = lost
    return homeless


def _comment_entries(root: Item) -> list[tuple[str, Item]]:
    return [
        (key, entry)
        for item in root.walk()
        for key, entry in item.fields().items()
        if is_comment(key)
    ]


def _section_for(root: Item, path: str) -> dict[str, Item]:
    """Where a comment key goes whose section is gone: to the model, the data or the top."""
    steps = path.split(".")
    models = root.get("base_models")
    model = models.below(0) if models is not None else None
    dataset = root.get("training", "dataset")
    home: Item | None = None
    if steps[0] in ("model", "base_model"):
        home = model
    elif steps[0] in ("data", "dataset", "training"):
        home = dataset
    return (home or root).fields()


def _drop_copies(root: Item, wanted: Counter[str]) -> None:
    """Keep as many of each comment as the user wrote; leave in `wanted` those that are missing."""
    for item in root.walk():
        kept = []
        for text in item.above:
            if wanted[text] > 0:
                kept.append(text)
                wanted[text] -= 1
        item.above = kept
        if item.beside and wanted[item.beside] > 0:
            wanted[item.beside] -= 1
        else:
            item.beside = ""


def _home(root: Item, remark: Remark) -> Item | None:
    """The first value that came from the remark's line, or from inside its section."""
    items = [item for item in root.walk() if item is not root]
    same_line = (item for item in items if item.line is not None and item.line == remark.line)
    section = (f"{remark.path}.", f"{remark.path}[")
    inside = (item for item in items if item.path.startswith(section))
    return next(same_line, None) or next(inside, None)

"""Any manifest as a 2.0 file: the user's values and comments, with every speed switch in sight."""

from __future__ import annotations

import math
from collections import Counter

from expert.manifest.notices import Notice
from expert.manifest.reader import understand
from expert.manifest.schema.types import AUTO
from expert.manifest.text.document import Document
from expert.manifest.text.item import Item, add_entry, is_comment
from expert.manifest.text.write import to_json, to_yaml

# Written out so that the reader of a file sees what there is to set. pretokenized_cache is not
# among them: its null means a folder keyed by content.
PERFORMANCE_KEYS = (
    *("bf16", "fp16", "use_tf32", "attention", "torch_compile", "gradient_checkpointing", "optim"),
    *("packing", "micro_batch_size", "eval_batch_size", "fused_loss", "dataloader_num_workers"),
    *("dataloader_prefetch_factor", "dataloader_persistent_workers", "dataloader_pin_memory"),
)
FIRST_KEYS = (
    *("schema_version", "name", "version", "description", "author"),
    *("base_models", "soft_prompts", "training"),
)

Entries = dict[str, Item]


def upgrade(document: Document) -> tuple[str, list[Notice]]:
    """The 2.0 text in the file's own format, and what was done; ManifestError on a broken file."""
    root = document.root
    header = _take_header(root)
    texts = [
        (item.path, item.line, [*item.above, *([item.beside] if item.beside else [])])
        for item in root.walk()
        if item.above or item.beside
    ]
    keyed = _comment_entries(root)
    notices = list(understand(document).notices)
    homeless = _restore_comments(root, texts, keyed)
    _in_file_order(root)
    added = _write_out_performance_keys(root)
    root.value = _well_known_first(root.fields())
    next(iter(root.fields().values())).above[:0] = header
    if added:
        text = f"written out as auto: {', '.join(added)}"
        notices.append(Notice("note", "training.config", text))
    if document.format == "json":
        return to_json(root), notices
    return to_yaml(root, [*homeless, *document.closing_comments]), notices


def _take_header(root: Item) -> list[str]:
    """Comments at the head of the file, which stay there whatever becomes of the first key."""
    for key, item in root.fields().items():
        set_apart = (item.line or 0) - 1 > len(item.above)
        if set_apart or key in ("schema_version", "name"):
            header, item.above = item.above, []
            return header
        break
    return []


def _write_out_performance_keys(root: Item) -> list[str]:
    """Add the absent ones behind the user's own keys."""
    training = root.get("training")
    assert training is not None, "a manifest that reads has a training section"
    config = training.fields().setdefault("config", Item({}))
    absent = [key for key in PERFORMANCE_KEYS if key not in config.fields()]
    config.fields().update({key: Item(AUTO) for key in absent})
    return absent


def _in_file_order(root: Item) -> None:
    """Sort moved keys back to where their lines were; those that no line has come last."""
    for item in root.walk():
        if isinstance(item.value, dict):
            item.value = dict(sorted(item.value.items(), key=lambda pair: _place(*pair)))
    models = root.get("base_models")
    first = models.below(0) if models is not None else None
    name = first.get("name") if first is not None else None
    if first is not None and name is not None:
        put_together = name.line is None or not name.path.startswith("base_models[")
        first.value = {"name": name, **first.fields()} if put_together else first.value


def _place(key: str, item: Item) -> float:
    """The item's line; one that nobody wrote, or that repeats a released adapter, has none."""
    is_copy = key == "adapter_type" and item.path.endswith("].type")
    return math.inf if item.line is None or is_copy else item.line


def _well_known_first(entries: Entries) -> Entries:
    """The usual keys in their usual order, then the rest; comment keys stay behind their key."""
    groups: dict[str, Entries] = {"": {}}
    last = ""
    for key, item in entries.items():
        last = last if is_comment(key) else key
        groups.setdefault(last, {})[key] = item
    order = ["", *FIRST_KEYS, *groups]
    return {
        key: item for head in dict.fromkeys(order) for key, item in groups.get(head, {}).items()
    }


# --- comments stay with their key, wherever it moved ---------------------------------------------


def _restore_comments(
    root: Item, texts: list[tuple[str, int | None, list[str]]], keyed: list[tuple[str, Item]]
) -> list[str]:
    """Bring back comments that got lost, and drop copies; what has no place left is returned.

    `texts`: the path, line and YAML comments of each item as the user wrote it; `keyed`: the
    entries under comment keys."""
    present = {id(item) for _, item in _comment_entries(root)}
    for key, item in keyed:
        if id(item) not in present:
            add_entry(_section_for(root, item.path), key, item, [])
    wanted = Counter(text for _, _, written in texts for text in written)
    for item in root.walk():  # as many of each comment as the user wrote
        above = item.above
        item.above = []
        for text in above:
            if wanted[text] > 0:
                item.above.append(text)
                wanted[text] -= 1
        if item.beside and wanted[item.beside] > 0:
            wanted[item.beside] -= 1
        else:
            item.beside = ""
    homeless: list[str] = []
    for path, line, written in reversed(texts):  # each is put before those that follow it
        lost = [text for text in written if wanted[text] > 0]
        wanted.subtract(lost)
        home = _home(root, path, line) if lost else None
        (home.above if home is not None else homeless)[:0] = lost
    return homeless


def _comment_entries(root: Item) -> list[tuple[str, Item]]:
    found = ((key, entry) for item in root.walk() for key, entry in item.fields().items())
    return [(key, entry) for key, entry in found if is_comment(key)]


def _section_for(root: Item, path: str) -> Entries:
    """Where a comment key goes whose section is gone: to the model, the data or the top."""
    section, home = path.split(".")[0], None
    if section in ("model", "base_model"):
        models = root.get("base_models")
        home = models.below(0) if models is not None else None
    elif section in ("data", "dataset", "training"):
        home = root.get("training", "dataset")
    return (home or root).fields()


def _home(root: Item, path: str, line: int | None) -> Item | None:
    """The first value that came from the comment's line, or from inside its section."""
    items = [item for item in root.walk() if item is not root]
    same_line = (item for item in items if item.line is not None and item.line == line)
    inside = (item for item in items if item.path.startswith((f"{path}.", f"{path}[")))
    return next(same_line, None) or next(inside, None)

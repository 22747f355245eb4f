"""Rewrites any manifest as a 2.0 file, with its comments and every performance key."""

from __future__ import annotations

import math
from collections import Counter

from expert.manifest.migrate.migration import Entries
from expert.manifest.notices import Notice
from expert.manifest.reader import interpret_document
from expert.manifest.schema.types import AUTO
from expert.manifest.text.document import Document
from expert.manifest.text.item import Item, add_entry, is_comment
from expert.manifest.text.write import to_json, to_yaml

# Written out so that users see what they can set. Not pretokenized_cache: its null means a folder
# keyed by content.
PERFORMANCE_KEYS = (
    *("bf16", "fp16", "use_tf32", "attention", "torch_compile", "gradient_checkpointing", "optim"),
    *("packing", "micro_batch_size", "eval_batch_size", "fused_loss", "dataloader_num_workers"),
    *("dataloader_prefetch_factor", "dataloader_persistent_workers", "dataloader_pin_memory"),
)
FIRST_KEYS = (
    *("schema_version", "name", "version", "description", "author"),
    *("base_models", "soft_prompts", "training"),
)


def upgrade(document: Document) -> tuple[str, list[Notice]]:
    """The 2.0 text in the format of the file, and notices; ManifestError on a broken file."""
    root = document.root
    header = _take_header(root)
    texts = [
        (item.path, item.line, [*item.above, *([item.beside] if item.beside else [])])
        for item in root.walk()
        if item.above or item.beside
    ]
    keyed = _comment_entries(root)
    notices = list(interpret_document(document).notices)
    orphaned = _restore_comments(root, texts, keyed)
    _in_file_order(root)
    added = _write_out_performance_keys(root)
    root.value = _well_known_first(root.fields())
    next(iter(root.fields().values())).above[:0] = header
    if added:
        text = f"written out as auto: {', '.join(added)}"
        notices.append(Notice("note", "training.config", text))
    if document.format == "json":
        return to_json(root), notices
    return to_yaml(root, [*orphaned, *document.closing_comments]), notices


def _take_header(root: Item) -> list[str]:
    """Remove and return the comments at the top of the file: they stay there even if the first key
    moves."""
    key, first = next(iter(root.fields().items()), ("", Item(None)))
    has_blank_line = (first.line or 0) - 1 > len(first.above)
    if not has_blank_line and key not in ("schema_version", "name"):
        return []
    header, first.above = first.above, []
    return header


def _write_out_performance_keys(root: Item) -> list[str]:
    """Add missing performance keys after the user's keys; return their names."""
    training = root.get("training")
    assert training is not None, "a manifest that reads has a training section"
    config = training.fields().setdefault("config", Item({}))
    absent = [key for key in PERFORMANCE_KEYS if key not in config.fields()]
    config.fields().update({key: Item(AUTO) for key in absent})
    return absent


def _in_file_order(root: Item) -> None:
    """Sort keys by their line in the original file; keys without a line come last."""
    for item in root.walk():
        if isinstance(item.value, dict):
            item.value = dict(sorted(item.value.items(), key=lambda pair: _place(*pair)))
    models = root.get("base_models")
    first = models.below(0) if models is not None else None
    name = first.get("name") if first is not None else None
    if first is not None and name is not None:
        was_moved = name.line is None or not name.path.startswith("base_models[")
        first.value = {"name": name, **first.fields()} if was_moved else first.value


def _place(key: str, item: Item) -> float:
    """The item's line; infinity for added keys and for the kind copied from a released adapter."""
    is_copy = key == "adapter_type" and item.path.endswith("].type")
    return math.inf if item.line is None or is_copy else item.line


def _well_known_first(entries: Entries) -> Entries:
    """FIRST_KEYS in their order, then the rest; comment keys stay after the key they follow."""
    groups: dict[str, Entries] = {"": {}}
    last = ""
    for key, item in entries.items():
        last = last if is_comment(key) else key
        groups.setdefault(last, {})[key] = item
    order = ["", *FIRST_KEYS, *groups]
    return {
        key: item for head in dict.fromkeys(order) for key, item in groups.get(head, {}).items()
    }


# --- comments move with their key ----------------------------------------------------------------


def _restore_comments(
    root: Item, texts: list[tuple[str, int | None, list[str]]], keyed: list[tuple[str, Item]]
) -> list[str]:
    """Put lost comments back and drop copies; return those whose section is gone.

    `texts`: the path, line and YAML comments of each original item; `keyed`: the entries under
    comment keys."""
    present = {id(item) for _, item in _comment_entries(root)}
    for key, item in keyed:
        if id(item) not in present:
            add_entry(_section_for(root, item.path), key, item, [])
    wanted = Counter(text for _, _, written in texts for text in written)
    for item in root.walk():  # each comment as often as the user wrote it
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
    orphaned: list[str] = []
    for path, line, written in reversed(texts):  # each is prepended
        lost = [text for text in written if wanted[text] > 0]
        wanted.subtract(lost)
        home = _home(root, path, line) if lost else None
        (home.above if home is not None else orphaned)[:0] = lost
    return orphaned


def _comment_entries(root: Item) -> list[tuple[str, Item]]:
    entries = ((key, entry) for item in root.walk() for key, entry in item.fields().items())
    return [(key, entry) for key, entry in entries if is_comment(key)]


def _section_for(root: Item, path: str) -> Entries:
    """The section for a comment key whose section is gone: model, dataset or top level."""
    section, home = path.split(".")[0], None
    if section in ("model", "base_model"):
        models = root.get("base_models")
        home = models.below(0) if models is not None else None
    elif section in ("data", "dataset", "training"):
        home = root.get("training", "dataset")
    return (home or root).fields()


def _home(root: Item, path: str, line: int | None) -> Item | None:
    """The first item from the comment's line, or else from its section."""
    items = [item for item in root.walk() if item is not root]
    same_line = (item for item in items if item.line is not None and item.line == line)
    inside = (item for item in items if item.path.startswith((f"{path}.", f"{path}[")))
    return next(same_line, None) or next(inside, None)

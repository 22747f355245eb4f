"""Any manifest as a 2.0 file: the user's values and comments, with every speed switch in sight."""

from __future__ import annotations

import math

from expert.manifest.notices import Notice
from expert.manifest.reader import understand
from expert.manifest.schema.types import AUTO
from expert.manifest.text.comments import remember, restore
from expert.manifest.text.document import Document
from expert.manifest.text.item import Item, is_comment
from expert.manifest.text.write import to_json, to_yaml

# Written out so that the reader of a file sees what there is to set. pretokenized_cache is not
# among them: its null means a folder keyed by content.
PERFORMANCE_KEYS = (
    "bf16",
    "fp16",
    "use_tf32",
    "attention",
    "torch_compile",
    "gradient_checkpointing",
    "optim",
    "packing",
    "micro_batch_size",
    "eval_batch_size",
    "fused_loss",
    "dataloader_num_workers",
    "dataloader_prefetch_factor",
    "dataloader_persistent_workers",
    "dataloader_pin_memory",
)
FIRST_KEYS = (
    "schema_version",
    "name",
    "version",
    "description",
    "author",
    "base_models",
    "soft_prompts",
    "training",
)

Entries = dict[str, Item]


def upgrade(document: Document) -> tuple[str, list[Notice]]:
    """The 2.0 text in the file's own format, and what was done; ManifestError on a broken file."""
    root = document.root
    header = _take_header(root)
    memory = remember(root)
    notices = list(understand(document).notices)
    homeless = restore(root, memory)
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

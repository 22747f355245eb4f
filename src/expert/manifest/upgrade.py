"""Rewrites any manifest as a plain 2.0 file with every performance key."""

from __future__ import annotations

import json

from expert.manifest.notices import Notice
from expert.manifest.reader import interpret_document
from expert.manifest.schema.types import AUTO
from expert.manifest.text.document import Document
from expert.manifest.text.yaml_text import to_yaml

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
    notices = list(interpret_document(document).notices)
    data = document.root.plain()
    config = data["training"].setdefault("config", {})
    absent = [key for key in PERFORMANCE_KEYS if key not in config]
    config.update(dict.fromkeys(absent, AUTO))
    if absent:
        text = f"written out as auto: {', '.join(absent)}"
        notices.append(Notice("note", "training.config", text))
    data = {**{key: data[key] for key in FIRST_KEYS if key in data}, **data}
    data["base_models"] = [{"name": model["name"], **model} for model in data["base_models"]]
    if document.format == "json":
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n", notices
    return to_yaml(data), notices

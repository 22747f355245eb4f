"""Plain data and manifests as the trees that are written."""

from __future__ import annotations

from typing import Any

from expert.manifest.schema.manifest import Manifest
from expert.manifest.text.item import Item


def as_item(data: Any) -> Item:
    """Plain Python data as a tree without lines and comments."""
    if isinstance(data, dict):
        return Item({str(key): as_item(value) for key, value in data.items()})
    if isinstance(data, list | tuple):
        return Item([as_item(value) for value in data])
    return Item(data)


def everything(item: Item) -> Any:
    """Plain data with the comment keys in it."""
    if isinstance(item.value, dict):
        return {key: everything(entry) for key, entry in item.value.items()}
    if isinstance(item.value, list):
        return [everything(entry) for entry in item.value]
    return item.value


def manifest_item(manifest: Manifest) -> Item:
    """What was set in a manifest, nothing that is only a default."""
    said = manifest.model_dump(mode="json", exclude_unset=True)
    return as_item({"schema_version": manifest.schema_version, **said})

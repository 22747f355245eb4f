"""A JSON Schema for editors: the 2.0 layout, in which older layouts are valid too. Old names of
training.config are deprecated; elsewhere unknown keys are allowed, and old names among them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

from expert.manifest.explain import special_names
from expert.manifest.migrate import aliases
from expert.manifest.migrate.values import CONFIG_VALUES, MODEL_VALUES
from expert.manifest.schema.expectations import schema
from expert.manifest.schema.kinds import Tracker

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string", "minLength": 1}
# All other keys may be missing, or be elsewhere in the file.
_REQUIRED = {"SoftPrompt": ["name"], "Task": ["train"]}
# By section and key: values that the reader takes besides those of the schema.
_OTHER_FORMS: dict[tuple[str, str], list[Schema]] = {
    ("TrainingConfig", "adapter_type"): [{"const": "qlora"}],
    ("TrainingConfig", "target_modules"): [{"type": "string", "pattern": ","}],
    ("TrainingConfig", "trackers"): [
        {"enum": [*get_args(Tracker), "none"]},
        {"type": "array", "items": {"const": "none"}, "maxItems": 1},
    ],
    ("TrainingConfig", "early_stopping_patience"): [{"type": "boolean"}],
    ("DatasetSpec", "validation"): [_TEXT],  # a file of rows
    ("Training", "dataset"): [_TEXT],
    ("Manifest", "version"): [{"type": "number"}],
    ("Manifest", "schema_version"): [{}],
    # Names of models; `model` and others fill an empty list.
    ("Manifest", "base_models"): [{"type": "array", "items": _TEXT}, {"maxItems": 0}],
}


def editor_schema() -> Schema:
    """JSON Schema, draft 7; every readable manifest is valid against it, unless it writes a value
    in other capitals than the schema."""
    text = json.dumps(schema()).replace("#/$defs/", "#/definitions/")
    root = json.loads(text.replace('"prefixItems"', '"items"'))  # their names in draft 7
    definitions = root.pop("$defs")
    for title, section in {"Manifest": root, **definitions}.items():
        section |= {"type": ["object", "null"], "patternProperties": {"^_": {}}}
        section["required"] = _REQUIRED.get(title, [])
        keys = section["properties"]
        for key, node in keys.items():
            table = {"TrainingConfig": CONFIG_VALUES, "BaseModelSpec": MODEL_VALUES}.get(title, {})
            more = [{"enum": [*table[key]]}] if table.get(key) else []
            keys[key] = _property(node, [*more, *_OTHER_FORMS.get((title, key), [])])
        if title == "TrainingConfig":
            for name, home in _old_names().items():
                old = f"read as {home}"
                keys.setdefault(name, {"description": old, **_deprecated(old)})
    models = root["properties"]["base_models"]["anyOf"][0]
    models["items"] = {"anyOf": [models["items"], _TEXT]}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **root,
        "title": "Expert manifest",
        "definitions": definitions,
    }


def _old_names() -> dict[str, str]:
    """Other names that are read in training.config, each with its home."""
    homes = dict.fromkeys(aliases.BASE_MODEL_KEYS, "a key of base_models[]")
    for name in (*aliases.CONFIG_ALIASES, *aliases.LOOSE_DATASET_KEYS):
        homes[name] = str(aliases.canonical_path(name))
    special = {name: " and ".join(to.becomes) for name, to in special_names().items()}
    return {**homes, **special}


def _property(node: Mapping[str, Any], more: list[Schema]) -> Schema:
    """A key with its meaning and default; null means not set."""
    notes = {key: node[key] for key in ("description", "default") if key in node}
    if notes.get("description", "").startswith("Superseded"):
        notes |= _deprecated(notes["description"])
    value = {key: entry for key, entry in node.items() if key not in (*notes, "title", "anyOf")}
    if isinstance(value.get("additionalProperties"), Mapping):
        value["patternProperties"] = {"^_": {}}
    choices = node.get("anyOf", [value])
    if "$ref" in value and not more:
        return {**notes, "allOf": choices}  # a section, which may be null
    return {**notes, "anyOf": [*choices, {"type": "null"}, *more]}


def _deprecated(text: str) -> Schema:
    return {"deprecated": True, "deprecationMessage": text}

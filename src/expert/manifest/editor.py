"""A JSON Schema for editors: the 2.0 layout, in which older layouts are valid too. Old names of
training.config are deprecated; elsewhere unknown keys are allowed, and old names among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from expert.manifest.explain import special_names
from expert.manifest.migrate.aliases import (
    BASE_MODEL_KEYS,
    CONFIG,
    CONFIG_ALIASES,
    DATASET,
    LOOSE_DATASET_KEYS,
)
from expert.manifest.migrate.values import CONFIG_VALUES, MODEL_VALUES
from expert.manifest.schema.expectations import schema
from expert.manifest.schema.kinds import Tracker

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string", "minLength": 1}
_KEPT = (
    *("type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("minLength", "minItems", "maxItems"),
)
# All other keys may be missing, or be elsewhere in the file.
_REQUIRED = {"SoftPrompt": ["name"], "Task": ["train"]}
# Values that migrate/values.py converts in code rather than by its tables.
_OTHER_FORMS: dict[str, list[Schema]] = {
    "adapter_type": [{"const": "qlora", "description": "read as lora on an int4 base"}],
    "prompt_template": [{"enum": ["vicuna", "custom"], "description": "read as auto"}],
    "target_modules": [{"type": "string", "pattern": ",", "description": "names between commas"}],
    "trackers": [
        {"enum": [*get_args(Tracker), "none"]},
        {"type": "array", "items": {"const": "none"}, "maxItems": 1},
    ],
    "early_stopping_patience": [{"type": "boolean", "description": "true: read as 3"}],
}


def editor_schema() -> Schema:
    """JSON Schema, draft 7; every readable manifest is valid against it, unless it writes a value
    in other capitals than the schema."""
    definitions = {name: _section(name, node) for name, node in schema()["$defs"].items()}
    config = definitions["TrainingConfig"]["properties"]
    _add_spellings(config, CONFIG_VALUES)
    _add_spellings(definitions["BaseModelSpec"]["properties"], MODEL_VALUES)
    config |= {key: entry for key, entry in _old_names().items() if key not in config}
    root = _section("Manifest", schema())
    keys = root["properties"]
    keys["base_models"]["items"] = {"anyOf": [keys["base_models"]["items"], _TEXT]}
    del keys["base_models"]["minItems"]  # `model` and others fill an empty list
    for properties, key, more in (
        (definitions["DatasetSpec"]["properties"], "validation", _TEXT),  # a file of rows
        (definitions["Training"]["properties"], "dataset", _TEXT),
        (keys, "version", {"type": "number"}),
        (keys, "schema_version", {}),
    ):
        _widen(properties, key, [more])
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Expert manifest",
        **root,
        "definitions": definitions,
    }


def _section(name: str, node: Mapping[str, Any]) -> Schema:
    """An object; comment keys are allowed, and unknown keys where they are kept as metadata."""
    section = {
        "type": ["object", "null"],
        "description": node.get("description", ""),
        "properties": {key: _property(entry) for key, entry in node["properties"].items()},
        "patternProperties": {"^_": {}},
        "additionalProperties": node.get("additionalProperties", True),
    }
    return {**section, "required": _REQUIRED[name]} if name in _REQUIRED else section


def _property(node: Mapping[str, Any]) -> Schema:
    """A key with its meaning and default; null means not set."""
    notes: Schema = {}
    if "description" in node:
        notes["description"] = node["description"]
        if node["description"].startswith("Superseded"):
            notes |= {"deprecated": True, "deprecationMessage": node["description"]}
    if "default" in node and not isinstance(node["default"], dict):
        notes["default"] = node["default"]
    choices = [_value(choice) for choice in node.get("anyOf", [node])]
    if len(choices) == 1 and "$ref" in choices[0]:
        return {**notes, "allOf": choices}  # draft 7 ignores keys beside a $ref; it allows null
    if len(choices) == 1 and isinstance(choices[0].get("type"), str) and "enum" not in choices[0]:
        return {**notes, **choices[0], "type": [choices[0]["type"], "null"]}
    return {**notes, "anyOf": [*choices, {"type": "null"}]} if choices != [{}] else notes


def _value(node: Mapping[str, Any]) -> Schema:
    if "$ref" in node:
        return {"$ref": node["$ref"].replace("#/$defs/", "#/definitions/")}
    value: Schema = {key: node[key] for key in _KEPT if key in node}
    if "prefixItems" in node:
        value["items"] = [_value(part) for part in node["prefixItems"]]
    elif node.get("items"):
        value["items"] = _property(node["items"])
    if isinstance(node.get("additionalProperties"), Mapping):
        value["additionalProperties"] = _property(node["additionalProperties"])
        value["patternProperties"] = {"^_": {}}
    return value


def _old_names() -> Schema:
    """Other names that are read in training.config, each with its home."""
    homes = {name: f"{CONFIG}.{home}" for name, home in CONFIG_ALIASES.items()}
    homes |= {name: f"{DATASET}.{home}" for name, home in LOOSE_DATASET_KEYS.items()}
    homes |= {name: f"base_models[].{name}" for name in BASE_MODEL_KEYS}
    homes |= {name: " and ".join(special.becomes) for name, special in special_names().items()}
    texts = {name: f"read as {home}" for name, home in homes.items()}
    return {
        name: {"description": text, "deprecated": True, "deprecationMessage": text}
        for name, text in texts.items()
    }


def _add_spellings(properties: Schema, table: Mapping[str, Mapping[Any, Any]]) -> None:
    """Allow the other spellings of values."""
    for key, spellings in table.items():
        words = [(str(word).lower(), home) for word, home in spellings.items()]
        meanings = ", ".join(f"{word} = {home}" for word, home in words)
        more = [{"enum": [*spellings], "description": f"read as: {meanings}"}] if words else []
        _widen(properties, key, [*more, *_OTHER_FORMS.get(key, [])])
    for key in ("trackers", "early_stopping_patience"):
        if key in properties:
            _widen(properties, key, _OTHER_FORMS[key])


def _widen(properties: Schema, key: str, more: list[Schema]) -> None:
    """Allow more values of a key."""
    entry = properties[key]
    notes = {name: entry.pop(name) for name in (*entry,) if name.startswith("de")}
    choices = entry.get("anyOf") or entry.get("allOf") or [entry]
    properties[key] = {**notes, "anyOf": [*choices, *more]}

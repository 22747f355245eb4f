"""A JSON Schema for editors: the 2.0 layout, in which older layouts are valid too. Old names of
training.config are deprecated; elsewhere unknown keys are allowed, and old names among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

_COMMENTS: Schema = {"^_": {}}
_NULL: Schema = {"type": "null"}
_TEXT: Schema = {"type": "string", "minLength": 1}
_KEPT = (
    *("type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("minLength", "minItems", "maxItems"),
)
_ANNOTATIONS = ("description", "default", "deprecated", "deprecationMessage")
# All other keys may be missing, or be elsewhere in the file.
_REQUIRED = {"SoftPrompt": ["name"], "Task": ["train"]}
# Values that migrate/values.py converts in code rather than by its tables.
_OTHER_WORDS = {
    "adapter_type": {"qlora": "lora on an int4 base"},
    "prompt_template": {"vicuna": "auto", "custom": "auto"},
}
_OTHER_FORMS: dict[str, list[Schema]] = {
    "target_modules": [{"type": "string", "pattern": ",", "description": "names between commas"}],
    "trackers": [
        {"enum": [*get_args(Tracker), "none"]},
        {"type": "array", "items": {"const": "none"}, "maxItems": 1},
    ],
    "early_stopping_patience": [{"type": "boolean", "description": "true: read as 3"}],
}


def editor_schema() -> Schema:
    """JSON Schema, draft 7; every readable manifest is valid against it."""
    definitions = {name: _section(name, node) for name, node in schema()["$defs"].items()}
    config = definitions["TrainingConfig"]["properties"]
    _add_spellings(config, CONFIG_VALUES)
    _add_spellings(definitions["BaseModelSpec"]["properties"], MODEL_VALUES)
    config |= {key: entry for key, entry in _old_names().items() if key not in config}
    dataset = definitions["DatasetSpec"]["properties"]
    dataset["validation"] = _widened(dataset["validation"], _TEXT)  # a file of validation rows
    training = definitions["Training"]["properties"]
    training["dataset"] = _widened(training["dataset"], _TEXT)
    root = _section("Manifest", schema())
    keys = root["properties"]
    keys["base_models"]["items"] = _widened(keys["base_models"]["items"], _TEXT)
    del keys["base_models"]["minItems"]  # `model` and others fill an empty list
    keys["version"] = _widened(keys["version"], {"type": "number"})
    keys["schema_version"] = _widened(keys["schema_version"], {"enum": ["1.0"]}, {})
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Expert manifest",
        **root,
        "definitions": definitions,
    }


# --- from the reader's schema to draft 7 -----------------------------------------------------


def _section(name: str, node: Mapping[str, Any]) -> Schema:
    """An object; comment keys are allowed, and unknown keys where they are kept as metadata."""
    section = {
        "type": ["object", "null"],
        "description": node.get("description", ""),
        "properties": {key: _property(entry) for key, entry in node["properties"].items()},
        "patternProperties": _COMMENTS,
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
    if len(choices) > 1 or not isinstance(choices[0].get("type", ""), str):
        return {**notes, "anyOf": choices if _NULL in choices else [*choices, _NULL]}
    only = choices[0]
    if "$ref" in only:
        return {**notes, "allOf": [only]}  # draft 7 ignores keys beside a $ref; it allows null
    if "enum" in only or "const" in only:
        return {**notes, "enum": [*only.get("enum", [only.get("const")]), None]}
    return {**notes, **only, "type": [only["type"], "null"]} if only else notes


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
        value["patternProperties"] = _COMMENTS
    return value


# --- other names and values ------------------------------------------------------------------


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


def _widened(entry: Schema, *more: Schema) -> Schema:
    """The same key with more allowed values."""
    notes = {key: entry[key] for key in entry if key in _ANNOTATIONS}
    bare = {key: entry[key] for key in entry if key not in _ANNOTATIONS}
    choices = bare.get("anyOf") or bare.get("allOf") or [bare]
    return {**notes, "anyOf": [*choices, *more]}


def _add_spellings(properties: Schema, table: Mapping[str, Mapping[Any, Any]]) -> None:
    """Allow other spellings of a value, in upper or lower case."""
    for key, in_table in table.items():
        spellings = {**in_table, **_OTHER_WORDS.get(key, {})}
        entry = properties[key]
        words = [
            word
            for choice in [entry, *entry.get("anyOf", [])]
            for word in [*choice.get("enum", ()), choice.get("const")]
        ]
        texts = [word for word in (*words, *spellings) if isinstance(word, str)]
        more: list[Schema] = [{"type": "string", "pattern": _in_any_case(texts)}]
        if spellings:
            meanings = ", ".join(f"{_shown(word)} = {home}" for word, home in spellings.items())
            more.insert(0, {"enum": list(spellings), "description": f"read as: {meanings}"})
        properties[key] = _widened(entry, *more)
    for key, forms in _OTHER_FORMS.items():
        if key in properties:
            properties[key] = _widened(properties[key], *forms)


def _shown(word: Any) -> str:
    return str(word).lower() if isinstance(word, bool) else str(word)


def _in_any_case(words: Iterable[str]) -> str:
    """A case-insensitive pattern; draft 7 has no flag for it."""
    patterns = [
        "".join(
            f"[{letter.lower()}{letter.upper()}]"
            if letter.isalpha()
            else "\\" * (letter == ".") + letter
            for letter in word
        )
        for word in words
    ]
    return f"^({'|'.join(patterns)})$"

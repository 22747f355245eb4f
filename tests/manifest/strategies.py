"""Manifests made from the schema itself, so that a new key is covered as soon as it exists."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from expert.core.errors import ManifestError
from expert.core.text import visible
from expert.manifest.migrate.aliases import CONFIG_ALIASES
from expert.manifest.reader import understand
from expert.manifest.schema.expectations import resolve, schema
from expert.manifest.schema.kinds import SCHEDULES
from expert.manifest.schema.manifest import CHAR_GPT, Manifest
from expert.manifest.text.document import Document, parse_document
from expert.manifest.text.write import to_json
from tests.manifest.items import as_item

_CHARACTERS = st.characters(exclude_characters="\x00", exclude_categories=["Cs"])
TEXTS = st.text(_CHARACTERS, max_size=12) | st.sampled_from(
    ["a: b", "yes", "1.0", "x # y", "a\nb\n", "- a"]
)
KEYS = st.text(_CHARACTERS, min_size=1, max_size=8)
# The parsers refuse NUL, and numbers of more than 40 characters.
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**38), 10**38)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS
)
# Keys that begin with an underscore are comments and never reach the manifest.
METADATA_KEYS = KEYS.filter(lambda key: not key.startswith("_"))
METADATA = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(METADATA_KEYS, inner, max_size=3),
    max_leaves=4,
)
EXTRA_KEYS = st.sampled_from(["x-owner", "x note", "x#1", "é"])
PATHS = st.sampled_from(["a.jsonl", "data/b c.json", "données/ü.txt", "org/set::train"])
PATH_KEYS = {"path", "validation_path", "test_path", "train", "valid", "test"}
PATH_KEYS |= {"output_dir", "pretokenized_cache"}
MODELS = st.sampled_from(["Qwen3-0.6B", "C:\\models\\m", CHAR_GPT]) | st.text(
    _CHARACTERS, min_size=1
)
SIZES = st.sampled_from(["16GB", "900 MiB", "7.5gb"])


def value_of(node: Mapping[str, Any], key: str = "") -> st.SearchStrategy[Any]:
    """Any value that the schema node allows."""
    node = resolve(node)
    if "anyOf" in node:
        return st.one_of([value_of(choice, key) for choice in node["anyOf"]])
    if "const" in node:
        return st.just(node["const"])
    if "enum" in node:
        return st.sampled_from(node["enum"])
    kind = node.get("type")
    if kind == "object":
        return _object(node)
    if kind == "array":
        return _array(node)
    if kind == "string":
        return _string(node, key)
    if kind == "integer":
        return st.integers(node.get("minimum", -(10**12)), node.get("maximum", 10**12))
    if kind == "number":
        return _number(node)
    return {"boolean": st.booleans(), "null": st.none(), None: METADATA}[kind]


def _string(node: Mapping[str, Any], key: str) -> st.SearchStrategy[str]:
    if node.get("format") == "memory-size":
        return SIZES
    if key in PATH_KEYS:
        return PATHS
    return TEXTS.filter(lambda text: len(text) >= node.get("minLength", 0))


def _number(node: Mapping[str, Any]) -> st.SearchStrategy[float]:
    low = node.get("minimum", node.get("exclusiveMinimum"))
    high = node.get("maximum", node.get("exclusiveMaximum"))
    floats = st.floats(
        low, high, exclude_min="exclusiveMinimum" in node, exclude_max="exclusiveMaximum" in node
    )
    return floats | st.just(0.5)


def _array(node: Mapping[str, Any]) -> st.SearchStrategy[list[Any]]:
    if "prefixItems" in node:
        return st.tuples(*(value_of(part) for part in node["prefixItems"])).map(list)
    least = node.get("minItems", 0)
    return st.lists(value_of(node["items"]), min_size=least, max_size=max(2, least))


def _object(node: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    extra = node.get("additionalProperties")
    if "properties" not in node:
        inner = value_of(extra) if isinstance(extra, Mapping) else METADATA
        return st.dictionaries(METADATA_KEYS, inner, max_size=2)
    required = set(node.get("required", ()))
    parts = {key: value_of(part, key) for key, part in node["properties"].items()}
    if "name" in parts and node["title"] == "BaseModelSpec":
        parts["name"] = MODELS
    known = _some_of(parts, required)
    if extra is not True:
        return known
    metadata = st.dictionaries(EXTRA_KEYS, METADATA, max_size=1)
    return st.builds(lambda inner, outer: {**inner, **outer}, known, metadata)


@st.composite
def _some_of(
    draw: st.DrawFn, parts: Mapping[str, st.SearchStrategy[Any]], required: set[str]
) -> dict[str, Any]:
    """All the keys, every second, every third, or few: each set is drawn as often."""
    every = draw(st.sampled_from([1, 2, 3, 5, 20]))
    first = draw(st.integers(0, every - 1))
    optional = [key for key in parts if key not in required][first::every]
    return {key: draw(parts[key]) for key in parts if key in required or key in optional}


@cache
def _unsettled() -> st.SearchStrategy[dict[str, Any]]:
    return _object(schema())


@st.composite
def any_manifest(draw: st.DrawFn) -> dict[str, Any]:
    """A manifest in the 2.0 layout that the schema and the rules accept, as plain data."""
    data: dict[str, Any] = draw(_unsettled())
    data["schema_version"] = "2.0"
    _settle_models(data)
    _settle_dataset(data["training"].setdefault("dataset", {}))
    _settle_config(data)
    _settle_names(data)
    try:
        manifest_of(data)
    except ManifestError:
        assume(False)
    return data


def manifest_of(data: Mapping[str, Any]) -> Manifest:
    """What the reader makes of plain data."""
    return understand(document_of(data)).manifest


def document_of(data: Mapping[str, Any]) -> Document:
    """The data as a parsed JSON file."""
    return parse_document(to_json(as_item(dict(data))), "json")


def _aliases_of(key: str) -> list[str]:
    """Other names of a key of training.config."""
    return [alias for alias, canonical in CONFIG_ALIASES.items() if canonical == key]


def _settle_names(data: dict[str, Any]) -> None:
    """Names hold no character that is not seen."""
    for named in (data, *data["base_models"], *data.get("soft_prompts", [])):
        for key in {"name", "version"} & named.keys():
            named[key] = visible(named[key], keep="")
    dataset = data["training"]["dataset"]
    if dataset.get("tasks"):
        dataset["tasks"] = {visible(key, keep=""): one for key, one in dataset["tasks"].items()}


def _settle_models(data: dict[str, Any]) -> None:
    """Make the base models agree with each other: one character model, or none."""
    models = data["base_models"]
    config = data["training"].setdefault("config", {})
    if models[0]["name"] == CHAR_GPT:
        del models[1:]
        data["soft_prompts"] = []
        config["adapter_type"] = "full"
        shape = models[0].get("architecture") or {}
        if "heads" in shape or "width" in shape:
            shape["heads"] = shape.get("heads", 6) % 16 + 1
            shape["width"] = shape["heads"] * 64
    for model in models:
        if models[0]["name"] != CHAR_GPT:
            model.pop("architecture", None)
            if model["name"] == CHAR_GPT:
                model["name"] = "m"
        if config.get("adapter_type") == "full" and model.get("quantization", "").startswith(
            ("int", "fp8")
        ):
            model["quantization"] = "bf16"
    for prompt in data.get("soft_prompts", []):
        if prompt.get("init_method") == "text":
            prompt["init_text"] = prompt.get("init_text") or "answer"
    if config.get("adapter_type") == "none" and not data.get("soft_prompts"):
        config["adapter_type"] = "dora"


def _settle_dataset(dataset: dict[str, Any]) -> None:
    if dataset.get("tasks"):
        dataset.pop("path", None)
    else:
        dataset["path"] = dataset.get("path") or "a.jsonl"
        if dataset.get("type") == "multi_task":
            del dataset["type"]
    if dataset.get("text_field") and dataset.get("field_mapping"):
        dataset["field_mapping"].pop("text", None)


def _settle_config(data: dict[str, Any]) -> None:
    config = data["training"]["config"]
    if config.get("adapter_type") == "ia3":
        config.pop("rank", None)
        config.pop("alpha", None)
        if isinstance(config.get("target_modules"), list):
            config["feedforward_modules"] = config["target_modules"][:1]
    if config.get("bf16") is True and config.get("fp16") is True:
        config["fp16"] = "auto"
    if config.get("tokenize") == "late":
        config["packing"] = False
        if config.get("overlong") == "split":
            del config["overlong"]
        dataset = data["training"]["dataset"]
        characters = data["base_models"][0]["name"] == CHAR_GPT
        if characters or dataset.get("streaming") or dataset.get("tasks"):
            del config["tokenize"]
    if data["training"]["dataset"].get("streaming") and "epochs" in config:
        config["epochs"] = math.ceil(config["epochs"])
    allowed = SCHEDULES[config.get("lr_scheduler", "cosine")].options
    options = config.get("lr_scheduler_kwargs", {})
    for key in [key for key in options if key not in allowed]:
        del options[key]
    for strategy, steps in (("save_strategy", "save_steps"), ("evaluation_strategy", "eval_steps")):
        if config.get(strategy) == "steps" and config.get(steps) is None:
            config[steps] = 50
    if config.get("evaluation_strategy") == "no":
        config.pop("load_best_model_at_end", None)
        config.pop("early_stopping_patience", None)
    if config.get("early_stopping_patience") is None:
        config.pop("early_stopping_threshold", None)


@st.composite
def any_spelling(draw: st.DrawFn, data: Mapping[str, Any]) -> dict[str, Any]:
    """The same manifest in another layout: aliases, flat keys, the single model of 1.0."""
    spelt = copy.deepcopy(dict(data))
    training = spelt["training"]
    config = training.pop("config", {})
    places: list[dict[str, Any]] = [spelt, training, training.setdefault("config", {})]
    for key, value in config.items():
        if key == "save_every_epochs":  # elsewhere it asks for a checkpoint per epoch besides
            places[-1][key] = value
            continue
        draw(st.sampled_from(places))[draw(st.sampled_from([key, *_aliases_of(key)]))] = value
    if len(spelt["base_models"]) == 1 and draw(st.booleans()):
        spelt["schema_version"] = "1.0"
        spelt["base_model"] = spelt.pop("base_models")[0]
        if "adapters" in spelt["base_model"]:
            spelt["adapters"] = spelt["base_model"].pop("adapters")
    if draw(st.booleans()):
        spelt[draw(st.sampled_from(["dataset", "data"]))] = training.pop("dataset")
    return spelt

"""Manifests made from the schema itself, so that a new key is covered as soon as it exists."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from expert.core.errors import ManifestError
from expert.core.text import visible
from expert.manifest.reader import interpret_document
from expert.manifest.schema.expectations import resolve, schema
from expert.manifest.schema.manifest import CHAR_GPT, Manifest
from expert.manifest.text.document import Document, parse_document

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


def _trees(leaves: int) -> st.SearchStrategy[Any]:
    """Any data of a manifest, with at most this many leaves."""
    return st.recursive(
        SCALARS,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(METADATA_KEYS, inner, max_size=3)
        ),
        max_leaves=leaves,
    )


METADATA, TREES = _trees(4), _trees(8)
EXTRA_KEYS = st.sampled_from(["x-owner", "x note", "x#1", "é"])
PATHS = st.sampled_from(["a.jsonl", "data/b c.json", "données/ü.txt", "org/set::train"])
PATH_KEYS = {"path", "validation_path", "test_path", "train", "valid", "test"}
PATH_KEYS |= {"output_dir", "pretokenized_cache"}
MODELS = st.sampled_from(["Qwen3-0.6B", "C:\\models\\m", CHAR_GPT]) | st.text(
    _CHARACTERS, min_size=1
)
SIZES = st.sampled_from(["16GB", "900 MiB", "7.5gb"])


def value_of(node: Mapping[str, Any], key: str = "") -> st.SearchStrategy[Any]:
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
    """A manifest in the 2.0 layout that the schema and the rules accept, as plain data: what they
    refuse of a drawn one is taken out of it."""
    data: dict[str, Any] = draw(_unsettled())
    data["schema_version"] = "2.0"
    dataset = data["training"].setdefault("dataset", {})
    if not dataset.get("tasks"):
        dataset["path"] = dataset.get("path") or "a.jsonl"
    _settle_names(data)
    for _ in range(6):
        try:
            manifest_of(data)
        except ManifestError as error:
            for problem in error.problems:
                _take_out(data, problem.path)
        else:
            return data
    assume(False)
    raise AssertionError


def _take_out(data: Any, path: str) -> None:
    """Remove the innermost key that is there of those a path leads through."""
    holder, key = data, ""
    for step in re.findall(r"[^.\[\]]+", path):
        if isinstance(data, list):
            data = data[int(step)]
        elif isinstance(data, dict) and step in data:
            holder, key = data, step
            data = data[step]
    holder.pop(key, None)


def manifest_of(data: Mapping[str, Any]) -> Manifest:
    """What the reader makes of plain data."""
    return interpret_document(document_of(data)).manifest


def document_of(data: Mapping[str, Any]) -> Document:
    return parse_document(json.dumps(data), "json")


def _settle_names(data: dict[str, Any]) -> None:
    """Names hold no character that is not seen."""
    for named in (data, *data["base_models"], *data.get("soft_prompts", [])):
        for key in {"name", "version"} & named.keys():
            named[key] = visible(named[key], keep="")
    dataset = data["training"]["dataset"]
    if dataset.get("tasks"):
        dataset["tasks"] = {visible(key, keep=""): one for key, one in dataset["tasks"].items()}

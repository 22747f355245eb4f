"""Describes the values a key may have, from the schema."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from expert.manifest.schema.manifest import Manifest
from expert.manifest.schema.types import MAX_NUMBER

# Sections that may also be plain text; migrate/layout.py converts it to an object.
_SHORT_FORMS = {"BaseModelSpec": "a name", "DatasetSpec": "a path"}


@cache
def schema() -> dict[str, Any]:
    return Manifest.model_json_schema()


def resolve(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow a $ref, keeping the description beside it."""
    if "$ref" in node:
        target = schema()["$defs"][node["$ref"].rsplit("/", 1)[-1]]
        return {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    return node


def schema_at(steps: tuple[str | int, ...]) -> Mapping[str, Any] | None:
    """The schema of the key at a canonical path, or None."""
    node: Mapping[str, Any] | None = schema()
    for step in steps:
        node = below(node, step)
    return resolve(node) if node is not None else None


def below(node: Mapping[str, Any] | None, step: str | int) -> Mapping[str, Any] | None:
    """The schema of a key or entry of `node`, or None."""
    if node is None:
        return None
    node = resolve(node)
    for choice in map(resolve, node.get("anyOf", [node])):
        extra = choice.get("additionalProperties")
        found: Mapping[str, Any] | None = None
        if isinstance(step, int):
            found = choice.get("items", next(iter(choice.get("prefixItems", ())), None))
        elif step in choice.get("properties", {}):
            found = choice["properties"][step]
        elif isinstance(extra, Mapping):
            found = extra
        if found is not None:
            return found
    return None


def allows_null(node: Mapping[str, Any]) -> bool:
    """Whether null is a value of the key, rather than "not set"."""
    node = resolve(node)
    return not node or any(
        choice.get("type") == "null" or not (set(choice) - {"title", "description", "default"})
        for choice in node.get("anyOf", [node])
    )


def expected(node: Mapping[str, Any]) -> str:
    """The allowed values in words: `a whole number of at least 1 or "auto"`."""
    node = resolve(node)
    parts: list[str] = []
    for choice in node.get("anyOf", [node]):
        for text in _describe(resolve(choice)):
            if text not in parts:
                parts.append(text)
    if "null" in parts:
        parts = [part for part in parts if part != "null"] + ["null"]
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} or {parts[-1]}"


def _describe(node: Mapping[str, Any]) -> list[str]:
    if "const" in node:
        return [f'"{node["const"]}"']
    if "enum" in node:
        return [f'"{value}"' for value in node["enum"]]
    kind = node.get("type")
    if node.get("format") == "memory-size":
        return ['a memory size such as "16GB"']
    if kind in ("integer", "number"):
        return [("a whole number" if kind == "integer" else "a number") + _range(node)]
    if kind == "array":
        return [_describe_list(node)]
    if node.get("title") in _SHORT_FORMS:
        return [_SHORT_FORMS[node["title"]], "an object"]
    plain = {"boolean": "true or false", "string": "text", "object": "an object", "null": "null"}
    return [plain[kind]] if kind in plain else []


def _describe_list(node: Mapping[str, Any]) -> str:
    if "prefixItems" in node:
        inner = expected(node["prefixItems"][0])
        return f"a list of {len(node['prefixItems'])}, each {inner}"
    inner = expected(node.get("items", {})).replace("an object", "objects")
    inner = inner.replace("a name or", "names or")
    least = "non-empty " if node.get("minItems") else ""
    return f"a {least}list of {inner}" if inner else f"a {least}list"


def _range(node: Mapping[str, Any]) -> str:
    low, high = node.get("minimum"), node.get("maximum")
    above, below = node.get("exclusiveMinimum"), node.get("exclusiveMaximum")
    high = None if high is not None and high >= MAX_NUMBER else high
    if low is not None and high is not None:
        return f" from {low:g} to {high:g}"
    if above is not None and high is not None:
        return f" above {above:g} and at most {high:g}"
    if low is not None and below is not None:
        return f" from {low:g} to below {below:g}"
    if low is not None:
        return f" of at least {low:g}"
    return f" above {above:g}" if above is not None else ""

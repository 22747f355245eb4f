"""Schema violations and unknown keys, told as where, what, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from expert.core.errors import Problem
from expert.manifest.document import Item, is_comment, join
from expert.manifest.expectations import expected, resolve, schema, schema_at
from expert.manifest.names import CONFIG, CONFIG_ALIASES, home_of
from expert.manifest.notices import Notice

_KINDS: list[tuple[type | tuple[type, ...], str]] = [
    (bool, "true or false"),
    (int, "a whole number"),
    (float, "a number"),
    (str, "text"),
    (dict, "an object"),
    (list, "a list"),
]


def schema_problems(error: ValidationError, root: Item) -> list[Problem]:
    """One problem for each place that violates the schema, in the order of the file."""
    found: dict[str, Problem] = {}
    for detail in error.errors(include_url=False, include_context=False):
        problem = _problem(detail, root)
        found.setdefault(problem.path, problem)
    return list(found.values())


def broken_places(error: ValidationError, root: Item) -> list[tuple[str | int, ...]]:
    """Canonical paths of the values that violate the schema."""
    return [_locate(root, tuple(detail["loc"]))[1] for detail in error.errors()]


def _problem(detail: Mapping[str, Any], root: Item) -> Problem:
    location = tuple(detail["loc"])
    item, canonical = _locate(root, location)
    if detail["type"] == "missing" and isinstance(location[-1], str):
        key = str(location[-1])
        node = schema_at((*canonical, key)) or {}
        meaning = str(node.get("description", "")).rstrip(".")
        path = join(item.path, key)
        return Problem(path, f"missing: {meaning[:1].lower()}{meaning[1:]}", "add it", item.line)
    node = schema_at(canonical) or {}
    got = item.plain()
    what = f"got {_show(got)}, expected {expected(node)}"
    return Problem(item.path, what, _fix(got, node), item.line)


def _locate(root: Item, location: tuple[str | int, ...]) -> tuple[Item, tuple[str | int, ...]]:
    """The user's item for a schema location, whose steps may name branches of a union too."""
    item = root
    canonical: list[str | int] = []
    for step in location:
        below = item.below(step)
        if below is not None:
            item = below
            canonical.append(step)
    return item, tuple(canonical)


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, dict):
        return "an object"
    kind = next((name for types, name in _KINDS if isinstance(value, types)), "")
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    text = text if len(text) <= 60 else text[:57] + "…"
    return f"{text} ({kind})" if not isinstance(value, bool) else text


def _fix(got: Any, node: Mapping[str, Any]) -> str:
    words = expected(node)
    if isinstance(got, str):
        if "number" in words and got.strip().replace(".", "", 1).replace("e-", "", 1).isdigit():
            return "remove the quotes"
        if "true or false" in words and got.lower() in {"true", "false", "yes", "no"}:
            return "remove the quotes"
        choices = [
            str(value)
            for choice in node.get("anyOf", [node])
            for value in resolve(choice).get("enum", [])
        ]
        near = closest(got, choices)
        return f"did you mean {near!r}?" if near else ""
    if isinstance(got, int | float) and "memory size" in words:
        return f'write "{got}GB"'
    if isinstance(got, bool) and "text" in words:
        return "YAML reads a bare yes, no, on and off as true or false: put it in quotes"
    return ""


def closest(word: str, choices: list[str]) -> str | None:
    """The one choice that looks like a slip of the pen, or None."""
    near = difflib.get_close_matches(word.lower(), [choice.lower() for choice in choices], 1, 0.75)
    return next((choice for choice in choices if choice.lower() == near[0]), None) if near else None


def unknown_keys(root: Item, *, strict: bool) -> tuple[list[Problem], list[Notice]]:
    """Unknown keys: errors in training.config, elsewhere metadata with near misses warned about."""
    problems: list[Problem] = []
    notices: list[Notice] = []
    for item, key, node, closed in _unknown(root, schema()):
        hint = _hint(key, node, item)
        if closed or strict:
            fix = hint or ("remove it" if strict and not closed else _known(node))
            problems.append(Problem(item.path, "unknown key", fix, item.line))
        elif hint:
            notices.append(Notice("warning", item.path, f"kept as metadata: {hint}", item.line))
    return problems, notices


def _unknown(
    item: Item, node: Mapping[str, Any]
) -> Iterator[tuple[Item, str, Mapping[str, Any], bool]]:
    node = resolve(node)
    choices = [resolve(choice) for choice in node.get("anyOf", [node])]
    if isinstance(item.value, list):
        inner = next((choice["items"] for choice in choices if "items" in choice), None)
        for entry in item.value if inner else []:
            yield from _unknown(entry, inner or {})
        return
    section = next((choice for choice in choices if "properties" in choice), None)
    objects = [choice for choice in choices if choice.get("type") == "object"]
    extra = objects[0].get("additionalProperties") if objects else None
    for key, entry in item.fields().items():
        if is_comment(key):
            continue
        if section is not None and key in section["properties"]:
            yield from _unknown(entry, section["properties"][key])
        elif section is not None:
            yield entry, key, section, section.get("additionalProperties") is False
        elif isinstance(extra, Mapping):
            yield from _unknown(entry, extra)


def _hint(key: str, node: Mapping[str, Any], item: Item) -> str:
    here = list(node["properties"])
    in_config = node.get("title") == "TrainingConfig"
    near = closest(key, here + (list(CONFIG_ALIASES) if in_config else []))
    if near:
        return f"did you mean {near!r}?"
    home = _other_home(key)
    if home:
        return f"{key!r} belongs at {home!r}"
    if in_config:
        return ""
    near = closest(key, list(schema()["$defs"]["TrainingConfig"]["properties"]))
    if near and node.get("title") in {"Training", "DatasetSpec"}:
        return f"did you mean '{CONFIG}.{near}'?"
    return ""


_HOMES = {
    "DatasetSpec": "training.dataset",
    "Decoding": "training.decoding",
    "BaseModelSpec": "base_models[]",
    "Training": "training",
}
# Words too common to say where they belong.
_AMBIGUOUS = {"name", "type", "path", "format", "validation", "version", "text", "input", "config"}


def _other_home(key: str) -> str | None:
    if key in _AMBIGUOUS:
        return None
    home = home_of(key)
    if home:
        return home
    for title, place in _HOMES.items():
        if key in schema()["$defs"][title]["properties"]:
            return f"{place}.{key}"
    if key in {"load_order", "incompatible_with", "requires", "max_chain"}:
        return f"constraints.{key}"
    return key if key in schema()["properties"] else None


def _known(node: Mapping[str, Any]) -> str:
    names = sorted(node["properties"])
    if len(names) > 12:
        return "see: expert manifest explain " + _HOMES.get(str(node.get("title")), CONFIG)
    return f"known keys: {', '.join(names)}"

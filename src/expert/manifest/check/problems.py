"""Schema violations and unknown keys as problems: where, what, and how to fix it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import ValidationError

from expert.core.errors import Problem
from expert.manifest.check.spelling import METADATA_WORDS, closest, correct_spelling
from expert.manifest.migrate.aliases import (
    BASE_MODEL_KEYS,
    CONFIG,
    CONFIG_ALIASES,
    CONFIG_KEYS,
    DATASET_ALIASES,
    LOOSE_DATASET_KEYS,
    SHAPE_ALIASES,
    SPECIAL_NAMES,
    canonical_path,
)
from expert.manifest.notices import Notice
from expert.manifest.schema.expectations import expected, resolve, schema, schema_at
from expert.manifest.schema.types import MAX_NUMBER
from expert.manifest.text.item import Item, is_comment, join, shown

_KINDS = {int: "a whole number", float: "a number", str: "text"}


def schema_problems(error: ValidationError, root: Item) -> list[Problem]:
    """One problem per value that violates the schema."""
    problems: dict[tuple[str | int, ...], Problem] = {}
    for detail in error.errors(include_url=False, include_context=False):
        place, problem = _problem(detail, root)
        problems.setdefault(place, problem)
    # `[1]` is neither a list of text nor "auto": report the entry, not the list.
    outer = {place[:length] for place in problems for length in range(len(place))}
    return [problem for place, problem in problems.items() if place not in outer]


def invalid_paths(error: ValidationError, root: Item) -> list[tuple[str | int, ...]]:
    """Canonical paths of the values that violate the schema."""
    return [_locate(root, tuple(detail["loc"]))[1] for detail in error.errors()]


def _problem(detail: Mapping[str, Any], root: Item) -> tuple[tuple[str | int, ...], Problem]:
    """The canonical path of a violation, and its problem."""
    location = tuple(detail["loc"])
    if detail["type"] == "missing" and isinstance(location[-1], str):
        item, canonical = _locate(root, location[:-1])
        place = (*canonical, location[-1])
        node = schema_at(place) or {}
        meaning = str(node.get("description", "")).rstrip(".").split(";")[0]
        what = f"missing: {meaning[:1].lower()}{meaning[1:]}"
        item = item.below(location[-1]) or Item(None, join(item.path, location[-1]), item.line)
        return place, Problem(item.path, what, "add it", item.line)
    item, canonical = _locate(root, location)
    node = schema_at(canonical) or {}
    got = item.plain()
    override = _override_below(item)
    if override is not None:
        what = f"{item.path} is not an object, expected {expected(node)}"
        return canonical, Problem(override.path, what)
    if isinstance(got, int | float) and got > MAX_NUMBER:
        what = f"got {shown(got)}, which is too large"
    elif got == "":
        what = f"is empty, expected {expected(node)}"
    else:
        what = f"got {_show(got)}, expected {expected(node)}"
    fix = _fix(got, node, item.from_command_line)
    return canonical, Problem(item.path, what, fix, item.line)


def _override_below(item: Item) -> Item | None:
    """The value that --set put below a key, such as `name.foo`, which made `name` an object."""
    if not isinstance(item.value, dict) or item.from_command_line:
        return None
    return next((inner for inner in item.walk() if inner.from_command_line), None)


def _locate(root: Item, location: tuple[str | int, ...]) -> tuple[Item, tuple[str | int, ...]]:
    """The item at a pydantic location, whose steps may also name branches of a union."""
    item = root
    canonical: list[str | int] = []
    for step in location:
        below = item.below(step)
        if below is not None:
            item = below
            canonical.append(step)
    return item, tuple(canonical)


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return shown(value)
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, dict):
        return "an object"
    return f"{shown(value)} ({_KINDS[type(value)]})"


def _fix(got: Any, node: Mapping[str, Any], is_override: bool) -> str:
    words = expected(node)
    if isinstance(got, str):
        if "true or false" in words and got.lower() in _BOOLEANS:
            return "remove the quotes"
        choices = [
            str(value)
            for choice in node.get("anyOf", [node])
            for value in resolve(choice).get("enum", [])
        ]
        near = closest(got, choices)
        if near:
            return f"did you mean {near!r}?"
        if words == _MODELS:
            return f"write base_model: {got}"
        return _fix_of_number(got.strip(), words)
    if type(got) is int and got in (0, 1) and "true or false" in words:
        return f"write {'true' if got else 'false'}"
    if isinstance(got, int | float) and "memory size" in words:
        return f'write "{got}GB"'
    if isinstance(got, bool) and "text" in words:
        return "put it in quotes; YAML reads yes, no, on and off as true or false"
    if isinstance(got, int | float) and "text" in words:
        return "put it in quotes"
    if isinstance(got, dict) and is_override and words.startswith("text"):
        return "put the value in quotes"
    if isinstance(got, list) and len(got) == 1 and (list, words) in _FIXES:
        return "write it without the brackets"
    return _FIXES.get((type(got), words), "")


def _fix_of_number(text: str, words: str) -> str:
    """What to write instead of a text that looks like a number, or like none."""
    if text.lower() in ("none", "null"):
        return "write null" if words.endswith("null") else "leave it out for the default"
    if words.startswith("a list"):
        return f"write [{text}]" if "," in text else ""
    if "number" not in words or not text.isascii() or not re.match(r"[-+]?\.?\d", text):
        return ""
    percent = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", text)
    if percent and "from 0 to 1" in words:
        return f"write {float(percent[1]) / 100:g}"
    if re.fullmatch(r"0+\d+", text):
        return f"write {int(text)}"
    if re.fullmatch(r"\d+,\d+", text) and "whole" not in words:
        return f"write {text.replace(',', '.')}"
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text):
        return "remove the quotes" if math.isfinite(float(text)) else ""
    return "write a plain number"


_BOOLEANS = {"true", "false", "yes", "no", "on", "off"}
_MODELS = "a non-empty list of names or objects"
_DASH = "write a list: put '- ' before the first key"
_FIXES: Mapping[tuple[type, str], str] = {
    (list, "a name or an object"): "several base models are written as base_models: [a, b]",
    (list, "a path or an object"): "several data sets are written under training.dataset.tasks",
    **dict.fromkeys(((dict, _MODELS), (dict, "a list of objects")), _DASH),
    (list, "an object"): "write its keys without dashes",
}
"""By what was given and what is expected."""


def unknown_keys(
    root: Item, *, strict: bool, flat: bool = False, top_level_only: bool = False
) -> tuple[list[Problem], list[Notice]]:
    """Problems and notices about unknown keys.

    An unknown key is an error in training.config, with --set, and if it is misspelt; elsewhere it
    is reported as metadata. `flat`: the file has settings at its top level; an unknown key there
    was meant as one, and a warning says that it has no effect. `top_level_only`: the file has no
    section for settings. In both cases a key similar to a setting is an error at the top level; if
    there are no settings, so is a section with some.
    """
    problems: list[Problem] = []
    notices: list[Notice] = []
    kept: dict[str, list[Item]] = {}
    for number, (item, key, node, closed) in enumerate(_unknown(root, schema())):
        # A hint compares with every known key, 0.4 ms: 200 are enough for any file.
        given = next((inner for inner in item.walk() if inner.from_command_line), None)
        intended = _misspelt(key, node) if number < 200 else None
        hint = _hint(key, node, given is not None) if number < 200 and not intended else ""
        at = given or item
        settings = [name for name in item.fields() if canonical_path(name)]
        if top_level_only and not flat and item.path == key and settings and not intended:
            what = f"unknown section with settings: {', '.join(settings[:6])}"
            problems.append(Problem(at.path, what, "move its keys to the top level", at.line))
        elif (flat or top_level_only) and item.path == key and hint.startswith(_DID_YOU_MEAN):
            problems.append(Problem(at.path, "unknown key", hint, at.line))
        elif closed or strict or given is not None or intended:
            fix = _suggestion(intended, given is not None) if intended else hint
            if not fix and closed:
                fix = _known_keys_text(node)
            elif not fix:
                list_keys = "see expert manifest explain for every key"
                fix = list_keys if given is not None else "remove it"
            problems.append(Problem(at.path, "unknown key", fix, at.line))
        elif hint:
            notices.append(Notice("warning", item.path, f"kept as metadata: {hint}", item.line))
        elif flat and item.path == key:
            text = "no effect: Expert has no such key"
            notices.append(Notice("warning", item.path, text, item.line))
        elif key != "error_injection_ratio":  # a rule reports it
            section = item.path.removesuffix(key).removesuffix(".")
            kept.setdefault(section, []).append(item)
    return problems, notices + [_metadata_notice(*each) for each in kept.items()]


def _metadata_notice(section: str, items: list[Item]) -> Notice:
    """One notice for all metadata of a section: real manifests have a lot."""
    names = [item.path.removeprefix(f"{section}.") for item in items]
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    text = f"kept as metadata, without effect: {', '.join(names[:20])}{more}"
    return Notice("note", section or "top level", text, items[0].line)


def _unknown(
    item: Item, node: Mapping[str, Any]
) -> Iterator[tuple[Item, str, Mapping[str, Any], bool]]:
    """Unknown keys: the item, its key, the schema of its section, and whether that is closed."""
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


def _misspelt(key: str, node: Mapping[str, Any]) -> str | None:
    """The key of this section that `key` is a misspelling of, or None.

    Some sections may also hold settings of training.config. There only a clear misspelling of one
    counts, because the same sections may hold metadata.
    """
    if key in _every_name():
        return None
    title = str(node.get("title"))
    section, dot, _ = key.partition(".")
    if title == "Manifest" and dot and section in ("base_models", "training"):
        # A path as for --set; as a key it would be metadata.
        last = key.rpartition(".")[2]
        return last if last in _LOOSE_KEYS else section
    if title == "Training" and f"{key}s" in CONFIG_KEYS and key not in METADATA_WORDS:
        return f"{CONFIG}.{key}s"
    here = [name for name in node["properties"] if name not in _DESCRIPTIVE]
    near = correct_spelling(key, [*here, *_NAMES_TOO.get(title, ())])
    if near or title not in _TAKES_LOOSE_KEYS:
        return near
    near = correct_spelling(key, _LOOSE_KEYS, elsewhere=True)
    return near and (canonical_path(near) or near)


def _hint(key: str, node: Mapping[str, Any], is_override: bool) -> str:
    closed = node.get("additionalProperties") is False
    in_config = node.get("title") == "TrainingConfig"
    here = [name for name in node["properties"] if name not in _DESCRIPTIVE]
    # Where metadata is allowed, checkpoint_path is not a misspelt checkpoint_step.
    likeness = 0.72 if closed else 0.85
    near = _MEANT.get(str(node.get("title")), {}).get(key)
    near = near or closest(key, here + (list(CONFIG_ALIASES) if in_config else []), likeness)
    if near and key not in METADATA_WORDS:
        return f"{_DID_YOU_MEAN} {near!r}?"
    home = _other_home(key)
    if home:
        return f"{key!r} belongs {_place(key, home, is_override)}"
    if in_config or key in METADATA_WORDS:
        return ""
    at_top = node.get("title") == "Manifest"  # metadata is allowed: only clear misspellings
    settings = [*CONFIG_KEYS, *(CONFIG_ALIASES if at_top else ())]
    near = closest(key.replace("-", "_"), settings, 0.88 if at_top and not is_override else 0.75)
    if near and node.get("title") in {"Manifest", "Training", "DatasetSpec"}:
        return _suggestion(f"{CONFIG}.{CONFIG_ALIASES.get(near, near)}", is_override)
    # Similar enough for a hint, not for an error: too short, or like a name of another trainer.
    doubtful = (
        correct_spelling(key, _LOOSE_NAMES) if node.get("title") in _TAKES_LOOSE_KEYS else None
    )
    return _suggestion(canonical_path(doubtful) or doubtful, is_override) if doubtful else ""


def _suggestion(path: str, is_override: bool) -> str:
    """`did you mean …?`: a path for --set; in a file, the key and its section."""
    section, dot, key = path.rpartition(".")
    if is_override or not dot:
        return f"{_DID_YOU_MEAN} {path!r}?"
    return f"{_DID_YOU_MEAN} {key!r} under {section}?"


def _place(key: str, home: str, is_override: bool) -> str:
    """Where a key belongs: a path for --set; in a file, the section."""
    section, dot, name = home.rpartition(".")
    if is_override or not dot:
        return f"at {home!r}"
    where = f"in an entry of {section[:-2]}" if section.endswith("[]") else f"under {section}"
    return where if name == key else f"{where}, as {name!r}"


_DID_YOU_MEAN = "did you mean"
# Keys without effect on training: similar keys are metadata, not misspellings.
_DESCRIPTIVE = {
    *("description", "author", "capabilities", "constraints", "limitations", "routing", "runtime"),
    *("perf", "quality_metrics", "evaluation", "integrity", "license", "repository", "homepage"),
    *("tags", "purpose", "sha256", "scaling", "size_bytes", "checkpoint_step", "checkpoint"),
    "alternative_checkpoints",
}
# Sections that may hold settings of training.config and training.dataset.
_TAKES_LOOSE_KEYS = ("Manifest", "Training")
_LOOSE_NAMES = (
    *CONFIG_KEYS,
    *CONFIG_ALIASES,
    *SPECIAL_NAMES,
    *LOOSE_DATASET_KEYS,
    *BASE_MODEL_KEYS,
    *("dataset", "base_model", "adapters"),
)
# Without aliases. Aliases are similar to names that mean something else: `lora` is not `lora_r`,
# `local_rank` not `lora_rank`.
_LOOSE_KEYS = (
    *CONFIG_KEYS,
    *(name for name, key in LOOSE_DATASET_KEYS.items() if name == key),
    *BASE_MODEL_KEYS,
    *("dataset", "base_model", "adapters"),
)
_NAMES_TOO = {
    "TrainingConfig": (*CONFIG_ALIASES, *SPECIAL_NAMES),
    "DatasetSpec": tuple(DATASET_ALIASES),
    "CharGptShape": tuple(SHAPE_ALIASES),
}
# Names that are closer to the letters of another key than to the one that is meant.
_MEANT = {"FieldMapping": {"context": "input"}}
_SECTION_PATHS = {
    "DatasetSpec": "training.dataset",
    "Decoding": "training.decoding",
    "BaseModelSpec": "base_models[]",
    "Training": "training",
}
# Names too common to have one section, and names without effect anywhere.
_AMBIGUOUS = {
    *("name", "type", "path", "format", "validation", "version", "text", "input", "config"),
    *("sha256", "revision", "checkpoint", "alternative_checkpoints"),
}


@cache
def _every_name() -> frozenset[str]:
    """All keys and aliases: a key of another section is misplaced, not misspelt."""
    sections = [schema(), *schema()["$defs"].values()]
    own = {name for section in sections for name in section.get("properties", ())}
    return frozenset(
        own | {*_LOOSE_NAMES, *(name for more in _NAMES_TOO.values() for name in more)}
    )


def _other_home(key: str) -> str | None:
    if key in _AMBIGUOUS:
        return None
    home = canonical_path(key)
    if home:
        return home
    for title, place in _SECTION_PATHS.items():
        if key in schema()["$defs"][title]["properties"]:
            return f"{place}.{key}"
    return key if key in ("training", "base_models", "soft_prompts") else None


def _known_keys_text(node: Mapping[str, Any]) -> str:
    names = sorted(node["properties"])
    if len(names) > 12:
        return "see: expert manifest explain " + _SECTION_PATHS.get(str(node.get("title")), CONFIG)
    return f"known keys: {', '.join(names)}"

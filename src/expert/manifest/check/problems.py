"""Schema violations and unknown keys as problems: where, what, and how to fix it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import ValidationError

from expert.core.errors import Problem
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
from expert.manifest.schema.expectations import expected, resolve, schema, schema_at
from expert.manifest.schema.types import MAX_NUMBER
from expert.manifest.text.item import Item, Notice, join, shown

Steps = tuple[str | int, ...]
_KINDS = {int: "a whole number", float: "a number", str: "text"}


def schema_problems(error: ValidationError, root: Item) -> dict[Steps, Problem]:
    """The problem of every value that violates the schema, by the value's canonical path."""
    problems: dict[Steps, Problem] = {}
    for detail in error.errors(include_url=False, include_context=False):
        place, problem = _problem(detail, root)
        problems.setdefault(place, problem)
    # `[1]` is neither a list of text nor "auto": report the entry, not the list.
    outer = {place[:length] for place in problems for length in range(len(place))}
    return {place: problem for place, problem in problems.items() if place not in outer}


def _problem(detail: Mapping[str, Any], root: Item) -> tuple[Steps, Problem]:
    """The canonical path of a violation, and its problem."""
    item = root
    place: Steps = ()
    for step in detail["loc"]:  # its steps may also name branches of a union
        below = item.get(step)
        if below is not None:
            item, place = below, (*place, step)
    last = detail["loc"][-1]
    if detail["type"] == "missing" and isinstance(last, str):
        place = place if place[-1:] == (last,) else (*place, last)
        meaning = str((schema_at(place) or {}).get("description", "")).rstrip(".").split(";")[0]
        what = f"missing: {meaning[:1].lower()}{meaning[1:]}"
        return place, Problem(join(item.path, last), what, "add it", item.line)
    node = schema_at(place) or {}
    got = item.plain()
    if isinstance(item.value, dict) and not item.from_command_line:
        # A value that --set put below a key, such as `name.foo`, made `name` an object.
        override = next((inner for inner in item.walk() if inner.from_command_line), None)
        if override is not None:
            what = f"{item.path} is not an object, expected {expected(node)}"
            return place, Problem(override.path, what)
    what = f"got {_show(got)}, expected {expected(node)}"
    if isinstance(got, int | float) and got > MAX_NUMBER:
        what = f"got {shown(got)}, which is too large"
    elif got == "":
        what = f"is empty, expected {expected(node)}"
    return place, Problem(item.path, what, _fix(got, node, item.from_command_line), item.line)


def _show(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    kind = _KINDS.get(type(value))
    text = "an object" if isinstance(value, dict) else shown(value)
    return f"{text} ({kind})" if kind else text


def _fix(got: Any, node: Mapping[str, Any], is_override: bool) -> str:
    """What to write instead, where that is clear."""
    words = expected(node)
    if isinstance(got, str):
        text = got.strip()
        choices = [resolve(choice).get("enum", []) for choice in node.get("anyOf", [node])]
        near = closest(text, [str(value) for values in choices for value in values])
        if near:
            return f"did you mean {near!r}?"
        if words == _MODELS:
            return f"write base_model: {text}"
        if text.lower() in ("none", "null"):
            return "write null" if words.endswith("null") else "leave it out for the default"
        if "true or false" in words and text.lower() in _BOOLEANS:
            return "remove the quotes"
        if words.startswith("a list"):
            return f"write [{text}]" if "," in text else ""
        is_number = "number" in words and re.match(r"[-+]?\.?\d", text)
        return "write a plain number, without quotes" if is_number else ""
    if type(got) is int and got in (0, 1) and "true or false" in words:
        return f"write {'true' if got else 'false'}"
    if isinstance(got, int | float) and "memory size" in words:
        return f'write "{got}GB"'
    if isinstance(got, int | float) and "text" in words:
        return "put it in quotes"
    if isinstance(got, dict) and is_override and words.startswith("text"):
        return "put the value in quotes"
    return _FIXES.get((type(got), words), "")


_BOOLEANS = {"true", "false", "yes", "no", "on", "off"}
_MODELS = "a non-empty list of names or objects"
_DASH = "write a list: put '- ' before the first key"
# By what was given and what is expected.
_FIXES: Mapping[tuple[type, str], str] = {
    (list, "a name or an object"): "write one model, or several as base_models: [a, b]",
    (list, "a path or an object"): "several data sets are written under training.dataset.tasks",
    **dict.fromkeys(((dict, _MODELS), (dict, "a list of objects")), _DASH),
    (list, "an object"): "write its keys without dashes",
}


# --- unknown keys --------------------------------------------------------------------------------


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
    for number, (item, key, node) in enumerate(_unknown(root, schema())):
        given = next((inner for inner in item.walk() if inner.from_command_line), None)
        # A hint compares with every known key, 0.4 ms: 200 are enough for any file.
        hint, is_certain = _hint(key, node, given is not None) if number < 200 else ("", False)
        at, at_top = given or item, item.path == key
        settings = [name for name in item.fields() if canonical_path(name)]
        is_closed = node.get("additionalProperties") is False
        is_setting = (flat or top_level_only) and at_top and hint.startswith(_DID_YOU_MEAN)
        if top_level_only and not flat and at_top and settings and not is_certain:
            what = f"unknown section with settings: {', '.join(settings[:6])}"
            problems.append(Problem(at.path, what, "move its keys to the top level", at.line))
        elif is_closed or strict or given is not None or is_certain or is_setting:
            fix = "see expert manifest explain for every key" if given is not None else "remove it"
            fix = hint or (_known_keys_text(node) if is_closed else fix)
            problems.append(Problem(at.path, "unknown key", fix, at.line))
        elif hint or (flat and at_top):
            text = f"kept as metadata: {hint}" if hint else "no effect: Expert has no such key"
            notices.append(Notice("warning", item.path, text, item.line))
        elif key != "error_injection_ratio":  # a rule reports it
            section = item.path.removesuffix(key).removesuffix(".")
            kept.setdefault(section, []).append(item)
    for section, items in kept.items():  # one notice for all metadata: real manifests have a lot
        names = [item.path.removeprefix(f"{section}.") for item in items]
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        text = f"kept as metadata, without effect: {', '.join(names[:20])}{more}"
        notices.append(Notice("note", section or "top level", text, items[0].line))
    return problems, notices


def _unknown(item: Item, node: Mapping[str, Any]) -> Iterator[tuple[Item, str, Mapping[str, Any]]]:
    """Unknown keys: the item, its key, and the schema of its section."""
    node = resolve(node)
    choices = [resolve(choice) for choice in node.get("anyOf", [node])]
    inner = next((choice["items"] for choice in choices if "items" in choice), None)
    for entry in item.entries() if inner else []:
        yield from _unknown(entry, inner or {})
    section = next((choice for choice in choices if "properties" in choice), None)
    objects = [choice for choice in choices if choice.get("type") == "object"]
    extra = objects[0].get("additionalProperties") if objects else None
    for key, entry in item.fields().items():
        if section is not None and key in section["properties"]:
            yield from _unknown(entry, section["properties"][key])
        elif section is not None:
            yield entry, key, section
        elif isinstance(extra, Mapping):
            yield from _unknown(entry, extra)


def _hint(key: str, node: Mapping[str, Any], is_override: bool) -> tuple[str, bool]:
    """What was meant, in words, and whether it is certain. Where metadata is allowed, only a clear
    misspelling is: checkpoint_path is not a misspelt checkpoint_step."""
    title = str(node.get("title"))
    is_closed = node.get("additionalProperties") is False
    in_config, takes_settings = title == "TrainingConfig", title in ("Manifest", "Training")
    here = [name for name in node["properties"] if name not in _DESCRIPTIVE]
    meant = _misspelt(key, title, here) if key not in _every_name() else None
    if meant:
        return f"{_DID_YOU_MEAN} {meant!r}?", True
    near = _MEANT.get(title, {}).get(key)
    names = [*here, *(CONFIG_ALIASES if in_config else ())]
    near = near or closest(key, names, 0.72 if is_closed else 0.85)
    if near and key not in METADATA_WORDS:
        return f"{_DID_YOU_MEAN} {near!r}?", False
    home = _other_home(key)
    if home:
        return f"{key!r} belongs at {home!r}", False
    if in_config or key in METADATA_WORDS or not (takes_settings or title == "DatasetSpec"):
        return "", False
    name = key.replace("-", "_")
    near = closest(name, CONFIG_KEYS, 0.85 if title == "Manifest" and not is_override else 0.72)
    near = near or (closest(name, _LOOSE_NAMES, 0.85) if takes_settings else None)
    if near is None:
        return "", False
    return f"{_DID_YOU_MEAN} {canonical_path(near) or near!r}?", False


def _misspelt(key: str, title: str, here: list[str]) -> str | None:
    """The key that `key` is a clear misspelling of: one of this section, or a setting, which some
    sections may also hold."""
    section, dot, _ = key.partition(".")
    if title == "Manifest" and dot and section in ("base_models", "training"):
        # A path as for --set; as a key it would be metadata.
        last = key.rpartition(".")[2]
        return last if last in _LOOSE_KEYS else section
    if title == "Training" and f"{key}s" in CONFIG_KEYS and key not in METADATA_WORDS:
        return f"{CONFIG}.{key}s"
    near = correct_spelling(key, [*here, *_NAMES_TOO.get(title, ())])
    if near or title not in ("Manifest", "Training"):
        return near
    near = correct_spelling(key, _LOOSE_KEYS, elsewhere=True)
    return near and (canonical_path(near) or near)


_DID_YOU_MEAN = "did you mean"
# Keys without effect on training: similar keys are metadata, not misspellings.
_DESCRIPTIVE = {
    *("description", "author", "capabilities", "constraints", "limitations", "routing", "runtime"),
    *("perf", "quality_metrics", "evaluation", "integrity", "license", "repository", "homepage"),
    *("tags", "purpose", "sha256", "scaling", "size_bytes", "checkpoint_step", "checkpoint"),
    "alternative_checkpoints",
}
# Settings that may be outside their section. Without aliases, which are similar to names that mean
# something else: `lora` is not `lora_r`, `local_rank` not `lora_rank`.
_LOOSE_KEYS = (
    *CONFIG_KEYS,
    *(name for name, key in LOOSE_DATASET_KEYS.items() if name == key),
    *BASE_MODEL_KEYS,
    *("dataset", "base_model", "adapters"),
)
_LOOSE_NAMES = (*_LOOSE_KEYS, *CONFIG_ALIASES, *SPECIAL_NAMES, *LOOSE_DATASET_KEYS)
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
    return frozenset(own.union(_LOOSE_NAMES, *_NAMES_TOO.values()))


def _other_home(key: str) -> str | None:
    if key in _AMBIGUOUS:
        return None
    for title, place in _SECTION_PATHS.items():
        if key in schema()["$defs"][title]["properties"] and not canonical_path(key):
            return f"{place}.{key}"
    is_top = key in ("training", "base_models", "soft_prompts")
    return canonical_path(key) or (key if is_top else None)


def _known_keys_text(node: Mapping[str, Any]) -> str:
    names = sorted(node["properties"])
    if len(names) > 12:
        return "see: expert manifest explain " + _SECTION_PATHS.get(str(node.get("title")), CONFIG)
    return f"known keys: {', '.join(names)}"


# --- misspellings: so close to a known word that nothing else can be meant ---------------------

_LIKENESS = 0.83
_LIKENESS_ELSEWHERE = 0.9
_ENDINGS = ("s", "es", "d", "ed", "r", "er", "ing")
"""Endings that make another word: `paths`, `tokenizer`."""

# Words one or two letters away from a key, but common in metadata.
METADATA_WORDS = frozenset(
    (
        *("adapted", "beats", "compiled", "compiler", "complete", "completed", "datasets", "date"),
        *("devices", "methods", "models", "optimised", "optimized", "pacing", "packaging"),
        *("parking", "patch", "patients", "speed", "task", "tokenized", "tokenizer", "tracker"),
        *("tracking", "versions", "ranking", "service", "test", "text", "local_rank", "generator"),
        *("validator", "lora", "train_size", "test_size"),
    )
)


def correct_spelling(word: str, known: Iterable[str], *, elsewhere: bool = False) -> str | None:
    """The known word that `word` is a misspelling of; None if there is none.

    If the known words belong to another section (`elsewhere`), the user is less likely to mean
    them: they must be more alike.
    """
    wrong = _plain(word)
    if wrong in METADATA_WORDS:
        return None
    least = _LIKENESS_ELSEWHERE if elsewhere else _LIKENESS
    names = {_plain(name): name for name in known if _may_be_meant(wrong, _plain(name), elsewhere)}
    near = difflib.get_close_matches(wrong, names, 1, least)
    return names[near[0]] if near else None


def closest(word: str, choices: Iterable[str], likeness: float = 0.75) -> str | None:
    """The choice that is most like `word`, in any case of its letters: a hint for a word that is
    refused anyway; None if none is as similar."""
    lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), lower, 1, likeness)
    return lower[near[0]] if near else None


def _plain(word: str) -> str:
    return word.lower().replace("-", "_").replace(" ", "_")


def _may_be_meant(wrong: str, right: str, elsewhere: bool) -> bool:
    """Short words, other digits, and other forms of a word mean something else: `load_in_2bit`,
    `paths`. But `max_bad_row` is a misspelling."""
    digits = ["".join(filter(str.isdigit, text)) for text in (wrong, right)]
    if len(right) < 4 or len(wrong) < 3 or digits[0] != digits[1]:
        return False
    forms = [(wrong, right)]
    if elsewhere or "_" not in wrong:
        forms.append((right, wrong))
    return not any(
        longer.startswith(stem) and longer.removeprefix(stem) in _ENDINGS
        for longer, stem in forms
        if longer.removeprefix(stem) != stem[-1:]  # epochss is no form of epochs
    )

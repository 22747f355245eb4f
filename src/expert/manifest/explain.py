"""Help for manifest keys, from the schema's docstrings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from expert.core.errors import ExpertError
from expert.manifest.check.spelling import closest
from expert.manifest.migrate.aliases import (
    ADAM_BETAS,
    AMP_NAMES,
    CONFIG,
    CONFIG_ALIASES,
    DATASET,
    DATASET_ALIASES,
    DTYPE_NAMES,
    LOAD_IN_NAMES,
    LOOSE_CONSTRAINTS,
    MODEL_NAMES,
    SHAPE_ALIASES,
    canonical_path,
)
from expert.manifest.peers.keys import CONVERTED
from expert.manifest.peers.unused import answer_to
from expert.manifest.schema.expectations import expected, resolve, schema

MODEL = "base_models[]"
SHAPE = f"{MODEL}.architecture"


@dataclass(frozen=True)
class KeyHelp:
    path: str
    expected: str
    default: str
    meaning: str
    also_written: tuple[str, ...] = ()


@dataclass(frozen=True)
class SpecialName:
    """A name that is more than an alias: it sets several keys, or converts its value."""

    expected: str
    meaning: str
    becomes: tuple[str, ...]


class UnknownKey(ExpertError):
    def __init__(self, key: str, near: str | None) -> None:
        hint = f"  (did you mean {near!r}?)" if near else ""
        super().__init__(f"{key!r} is not a key of a manifest{hint}")


def explain(key: str | None = None) -> list[KeyHelp]:
    """Help for all keys (None), a section, or a key by any of its names."""
    if key is None:
        return list(_all_keys())
    wanted = key.strip()
    zone, _, name = wanted.rpartition(".")
    by_name = _ending_in(wanted)
    if zone in _CONFIG_ZONES:
        home = canonical_path(name)
        by_name = [*_special(wanted, name), *(_at(home) if home else []), *by_name]
    found = _at(wanted) or list(dict.fromkeys(by_name)) or _under_another_name(wanted, zone, name)
    if not found and zone in _CONFIG_ZONES:
        found = _of_another_trainer(wanted, name)
    if not found:
        raise UnknownKey(wanted, _nearest(wanted))
    return found


def special_names() -> dict[str, SpecialName]:
    """Names that set several keys, or convert their value."""
    precision = (f"{CONFIG}.bf16", f"{CONFIG}.fp16")
    words = '"bfloat16", "float16", "float32" or "auto"'
    names = dict.fromkeys(
        DTYPE_NAMES, SpecialName(words, "Read as bf16 and fp16 of training.config.", precision)
    )
    amp = "true: the plan chooses bf16 or fp16; false: neither; else as dtype."
    names |= dict.fromkeys(AMP_NAMES, SpecialName(f"true, false, {words}", amp, precision))
    for name in LOAD_IN_NAMES:
        bits = "int4" if "4bit" in name else "int8"
        meaning = f"true: read as quantization {bits} of the base models; false: as none."
        names[name] = SpecialName("true or false", meaning, (f"{MODEL}.quantization",))
    names |= dict.fromkeys(
        MODEL_NAMES, SpecialName("text", "Read as the name of the base model.", (f"{MODEL}.name",))
    )
    for number, name in enumerate(ADAM_BETAS):
        meaning = f"Read as training.config.betas[{number}]."
        names[name] = SpecialName("a number from 0 to below 1", meaning, (f"{CONFIG}.betas",))
    meaning = "true: read as adapter_type dora of training.config."
    names["use_dora"] = SpecialName("true or false", meaning, (f"{CONFIG}.adapter_type",))
    return names


@cache
def _all_keys() -> tuple[KeyHelp, ...]:
    return tuple(_walk(schema(), ""))


def _walk(node: Mapping[str, Any], path: str) -> Iterator[KeyHelp]:
    for key, entry in node["properties"].items():
        place = f"{path}.{key}" if path else key
        yield _help(place, entry, required=key in node.get("required", ()))
        section, suffix = _section_below(entry)
        if section is not None:
            yield from _walk(section, place + suffix)


def _section_below(node: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, str]:
    """The section under a key: directly, in a list, or under user-chosen names; and its suffix."""
    node = resolve(node)
    for choice in map(resolve, node.get("anyOf", [node])):
        inner, extra = choice.get("items"), choice.get("additionalProperties")
        if "properties" in choice:
            return choice, ""
        if inner and "properties" in resolve(inner):
            return resolve(inner), "[]"
        if isinstance(extra, Mapping) and "properties" in resolve(extra):
            return resolve(extra), ".<name>"
    return None, ""


def _help(path: str, node: Mapping[str, Any], *, required: bool) -> KeyHelp:
    node = resolve(node)
    default = "required" if required else ""
    if "default" in node and not isinstance(node["default"], dict):
        default = json.dumps(node["default"], ensure_ascii=False)
    meaning = " ".join(str(node.get("description", "")).split())  # joins wrapped lines
    return KeyHelp(path, expected(node), default, meaning, tuple(other_names(path)))


def other_names(path: str) -> list[str]:
    """The aliases of the key at a canonical path."""
    section, _, key = path.rpartition(".")
    table = {CONFIG: CONFIG_ALIASES, DATASET: DATASET_ALIASES, SHAPE: SHAPE_ALIASES}
    names = [name for name, home in table.get(section, {}).items() if home == key != name]
    names += [name for name, special in special_names().items() if path in special.becomes]
    names += _WHOLE_SECTIONS.get(path, ())
    return names


_WHOLE_SECTIONS = {
    "base_models": ("base_model", "model"),
    f"{MODEL}.adapters": ("adapters",),
    "training.dataset": ("dataset", "data"),
    "soft_prompts[].tokens": ("length",),
}


def _at(wanted: str) -> list[KeyHelp]:
    """The key at exactly this path, and all keys of it if it is a section."""
    steps = _steps(wanted)
    found = []
    for entry in _all_keys():
        pattern = _steps(entry.path)[: len(steps)]
        fits = all(part in (step, "<name>") for part, step in zip(pattern, steps, strict=False))
        if len(pattern) == len(steps) and fits:
            found.append(entry)
    # A single name such as `name` may be a key in several sections: see _ending_in.
    return found if len(found) > 1 or "." in wanted else []


def _steps(path: str) -> list[str]:
    return re.sub(r"\[\d*\]", "", path).split(".")


def _ending_in(wanted: str) -> list[KeyHelp]:
    """All keys with this name, and all keys of those that are sections."""
    heads = [entry.path for entry in _all_keys() if _steps(entry.path)[-1] == wanted]
    below = tuple(f"{head}{mark}" for head in heads for mark in ".[")
    return [e for e in _all_keys() if e.path in heads or (below and e.path.startswith(below))]


def _special(wanted: str, name: str) -> list[KeyHelp]:
    """Help for a special name, followed by the keys it sets."""
    special = special_names().get(name)
    if special is None:
        return []
    own = KeyHelp(wanted, special.expected, "", special.meaning)
    return [own, *(entry for path in special.becomes for entry in _at(path))]


def _of_another_trainer(wanted: str, name: str) -> list[KeyHelp]:
    """Help for a key that only other trainers have."""
    answer, meaning = answer_to(name), ""
    if answer is not None:
        kind = "Refused" if answer.refused else "Not used here"
        reason = f": {answer.reason}" if answer.reason else ""
        meaning = f"{kind}{reason}{f'; {answer.fix}' if answer.fix else ''}."
    elif name in CONVERTED:
        meaning = "Read as another key, depending on its value: see expert manifest check."
    return [KeyHelp(wanted, "a key of another trainer", "", meaning)] if meaning else []


_CONFIG_ZONES = ("", CONFIG, "training", "model")
_DATASET_ZONES = ("", DATASET, "dataset", "data", "training.data")


def _under_another_name(wanted: str, zone: str, name: str) -> list[KeyHelp]:
    found: list[KeyHelp] = []
    if zone in _DATASET_ZONES:
        found = _at(f"{DATASET}.{DATASET_ALIASES.get(name, name)}")
    if not found and zone in ("", "model") and name in SHAPE_ALIASES:
        found = _at(f"{SHAPE}.{SHAPE_ALIASES[name]}")
    if not found and wanted in LOOSE_CONSTRAINTS:
        found = _ending_in("constraints")
    return found or [entry for entry in _all_keys() if wanted in entry.also_written]


def _nearest(wanted: str) -> str | None:
    names = [
        name
        for entry in _all_keys()
        for name in (entry.path, _steps(entry.path)[-1], *entry.also_written)
    ]
    return closest(wanted, names)

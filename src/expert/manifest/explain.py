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
from expert.manifest.migrate import aliases
from expert.manifest.migrate.aliases import CONFIG, DATASET, canonical_path
from expert.manifest.peers.distributed import FSDP_DOES_IT
from expert.manifest.peers.keys import CONVERTED
from expert.manifest.peers.unused import answer_to
from expert.manifest.schema.expectations import expected, resolve, schema

MODEL = "base_models[]"
SHAPE = f"{MODEL}.architecture"
_CONFIG_ZONES = ("", CONFIG, "training", "model")
_ZONES = (*_CONFIG_ZONES, DATASET, "dataset", "data", "training.data")
_WHOLE_SECTIONS = {
    "base_models": ("base_model", "model"),
    f"{MODEL}.adapters": ("adapters",),
    "training.dataset": ("dataset", "data"),
    "soft_prompts[].tokens": ("length",),
    "constraints": aliases.LOOSE_CONSTRAINTS,
}


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
    found = _at(wanted)
    if len(found) == 1 and not zone:
        found = []  # a single name such as `name` may be a key in several sections
    if not found:
        found = _with_sections({e.path for e in _all_keys() if _steps(e.path)[-1] == wanted})
        if zone in _CONFIG_ZONES:
            found = [*_special(wanted, name), *_at(canonical_path(name) or ""), *found]
    if not found and zone in _ZONES:
        found = [entry for entry in _all_keys() if name in entry.also_written]
        found = found or _of_another_trainer(wanted, name)
    if not found:
        names = [(e.path, _steps(e.path)[-1], *e.also_written) for e in _all_keys()]
        raise UnknownKey(wanted, closest(wanted, [name for each in names for name in each]))
    return list(dict.fromkeys(found))


def special_names() -> dict[str, SpecialName]:
    """Names that set several keys, or convert their value."""
    precision = (f"{CONFIG}.bf16", f"{CONFIG}.fp16")
    words = '"bfloat16", "float16", "float32" or "auto"'
    dtype = SpecialName(words, "Read as bf16 and fp16 of training.config.", precision)
    text = "true: the plan chooses bf16 or fp16; false: neither; else as dtype."
    amp = SpecialName(f"true, false, {words}", text, precision)
    model = SpecialName("text", "Read as the name of the base model.", (f"{MODEL}.name",))
    names = {**dict.fromkeys(aliases.DTYPE_NAMES, dtype), **dict.fromkeys(aliases.AMP_NAMES, amp)}
    for name in aliases.LOAD_IN_NAMES:
        bits = "int4" if "4bit" in name else "int8"
        text = f"true: read as quantization {bits} of the base models; false: as none."
        names[name] = SpecialName("true or false", text, (f"{MODEL}.quantization",))
    names |= dict.fromkeys(aliases.MODEL_NAMES, model)
    for number, name in enumerate(aliases.ADAM_BETAS):
        text = f"Read as training.config.betas[{number}]."
        names[name] = SpecialName("a number from 0 to below 1", text, (f"{CONFIG}.betas",))
    text = "true: read as adapter_type dora of training.config."
    names["use_dora"] = SpecialName("true or false", text, (f"{CONFIG}.adapter_type",))
    return names


@cache
def _all_keys() -> tuple[KeyHelp, ...]:
    return tuple(_walk(schema(), ""))


def _walk(node: Mapping[str, Any], path: str) -> Iterator[KeyHelp]:
    for key, entry in node["properties"].items():
        place = f"{path}.{key}" if path else key
        about = resolve(entry)
        default = "required" if key in node.get("required", ()) else ""
        if "default" in about and not isinstance(about["default"], dict):
            default = json.dumps(about["default"], ensure_ascii=False)
        meaning = " ".join(str(about.get("description", "")).split())  # joins wrapped lines
        yield KeyHelp(place, expected(about), default, meaning, tuple(_other_names(place)))
        for choice in map(resolve, about.get("anyOf", [about])):
            # The section under a key: directly, in a list, or under names the user chooses.
            extra = choice.get("additionalProperties")
            named = extra if isinstance(extra, Mapping) else {}
            inner = {"": choice, "[]": choice.get("items", {}), ".<name>": named}
            for suffix, section in inner.items():
                if "properties" in resolve(section):
                    yield from _walk(resolve(section), place + suffix)


def _other_names(path: str) -> list[str]:
    """The aliases of the key at a canonical path."""
    section, _, key = path.rpartition(".")
    tables = {
        CONFIG: aliases.CONFIG_ALIASES,
        DATASET: aliases.DATASET_ALIASES,
        SHAPE: aliases.SHAPE_ALIASES,
    }
    names = [name for name, home in tables.get(section, {}).items() if home == key != name]
    names += [name for name, special in special_names().items() if path in special.becomes]
    return [*names, *_WHOLE_SECTIONS.get(path, ())]


def _steps(path: str) -> list[str]:
    return re.sub(r"\[\d*\]", "", path).split(".")


def _at(wanted: str) -> list[KeyHelp]:
    """The key at exactly this path, and all keys of it if it is a section."""
    steps = _steps(wanted)
    heads = set()
    for entry in _all_keys():
        own = _steps(entry.path)
        named = [a if b == "<name>" else b for a, b in zip(steps, own, strict=False)]
        if named == steps and len(own) == len(steps):
            heads.add(entry.path)
    return _with_sections(heads)


def _with_sections(heads: set[str]) -> list[KeyHelp]:
    """The keys at these paths, and all keys below them."""
    below = tuple(f"{head}{mark}" for head in heads for mark in ".[")
    return [e for e in _all_keys() if e.path in heads or e.path.startswith(below)]


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
        parts = [f"{kind}: {answer.reason}" if answer.reason else kind, answer.fix]
        meaning = f"{'; '.join(filter(None, parts))}."
    elif name in ("deepspeed", "deepspeed_config"):
        meaning = f"Read as training.config.distributed, by its ZeRO stage: {FSDP_DOES_IT}."
    elif name in CONVERTED:
        meaning = "Read as another key, depending on its value: see expert manifest check."
    return [KeyHelp(wanted, "a key of another trainer", "", meaning)] if meaning else []

"""Help for manifest keys, from the schema's docstrings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from expert.core.errors import ExpertError
from expert.manifest.check.problems import closest
from expert.manifest.migrate import aliases
from expert.manifest.migrate.aliases import CONFIG, DATASET, canonical_path
from expert.manifest.peers.distributed import FSDP_DOES_IT
from expert.manifest.peers.keys import CONVERTED
from expert.manifest.peers.unused import answer_to
from expert.manifest.schema.expectations import expected, resolve, schema

MODEL = "base_models[]"
SHAPE = f"{MODEL}.architecture"
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


_PRECISION = (f"{CONFIG}.bf16", f"{CONFIG}.fp16")
SPECIAL_HOMES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((*aliases.DTYPE_NAMES, *aliases.AMP_NAMES), _PRECISION),
    **dict.fromkeys(aliases.LOAD_IN_NAMES, (f"{MODEL}.quantization",)),
    **dict.fromkeys(aliases.MODEL_NAMES, (f"{MODEL}.name",)),
    **dict.fromkeys(aliases.ADAM_BETAS, (f"{CONFIG}.betas",)),
    "use_dora": (f"{CONFIG}.adapter_type",),
}
"""Names that are more than an alias, with the keys that they set."""


def explain(key: str | None = None) -> list[KeyHelp]:
    """Help for all keys (None), a section, or a key by any of its names, with or without its
    section."""
    keys = _all_keys()
    if key is None:
        return list(keys)
    wanted = key.strip()
    name = _steps(wanted)[-1]
    found = _below(entry.path for entry in keys if _is_at(entry.path, wanted))
    if len(found) == 1 and "." not in wanted:
        found = []  # a single name such as `name` may be a key in several sections
    if not found:
        homes = SPECIAL_HOMES.get(name, ())
        if homes:
            found = [KeyHelp(wanted, "as there", "", f"Read as {' and '.join(homes)}.")]
        direct = canonical_path(name)
        found += _below([*homes, *([direct] if direct else ())])
        found += _below(entry.path for entry in keys if _steps(entry.path)[-1] == name)
    found = found or [entry for entry in keys if name in entry.also_written]
    found = found or _of_another_trainer(wanted, name)
    if not found:
        names = [(e.path, _steps(e.path)[-1], *e.also_written) for e in keys]
        near = closest(wanted, [name for each in names for name in each])
        hint = f"  (did you mean {near!r}?)" if near else ""
        raise ExpertError(f"{wanted!r} is not a key of a manifest{hint}")
    return list(dict.fromkeys(found))


def _steps(path: str) -> list[str]:
    return re.sub(r"\[\d*\]", "", path).split(".")


def _is_at(path: str, wanted: str) -> bool:
    """Whether a path is the wanted one, whatever its positions and the names that users choose."""
    own, steps = _steps(path), _steps(wanted)
    return len(own) == len(steps) and all(
        a in (b, "<name>") for a, b in zip(own, steps, strict=True)
    )


def _below(paths: Iterable[str]) -> list[KeyHelp]:
    """The keys at these paths, and all keys below them."""
    heads = set(paths)
    below = tuple(f"{head}{mark}" for head in heads for mark in ".[")
    return [e for e in _all_keys() if e.path in heads or e.path.startswith(below)]


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
        tables = {
            CONFIG: aliases.CONFIG_ALIASES,
            DATASET: aliases.DATASET_ALIASES,
            SHAPE: aliases.SHAPE_ALIASES,
        }
        names = [name for name, home in tables.get(path, {}).items() if home == key != name]
        names += [name for name, homes in SPECIAL_HOMES.items() if place in homes]
        names += _WHOLE_SECTIONS.get(place, ())
        yield KeyHelp(place, expected(about), default, meaning, tuple(names))
        for choice in map(resolve, about.get("anyOf", [about])):
            # The section under a key: directly, in a list, or under names the user chooses.
            extra = choice.get("additionalProperties")
            named = extra if isinstance(extra, Mapping) else {}
            inner = {"": choice, "[]": choice.get("items", {}), ".<name>": named}
            for suffix, section in inner.items():
                if "properties" in resolve(section):
                    yield from _walk(resolve(section), place + suffix)


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

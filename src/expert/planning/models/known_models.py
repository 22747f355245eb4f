"""Shapes of common models by name, so that planning needs no network or download."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path

from expert.core.files import read_text
from expert.planning.models.shapes import ModelShape, shape_from_config


@dataclass(frozen=True)
class KnownModel:
    """A model on the Hugging Face hub and the shape its config.json gives."""

    hub_id: str
    parameters: int
    """As published."""
    shape: ModelShape


def find_known_model(name: str) -> KnownModel | None:
    """The model meant by a hub id, a bare name, or a path by its last part; else None.

    Sizes never match by similarity. Parts that distinguish variants of one shape are ignored step
    by step: file formats first, then -Instruct and the like, then dates and versions. If the
    remaining variants differ in context only, the shortest counts; if they differ in more, None.
    """
    key = re.split(r"[\\/]", name.strip().rstrip("\\/"))[-1].lower().removesuffix(".gguf")
    key = _NICKNAMES.get(key, key)
    for step, index in enumerate(_BY_KEY):
        models = index.get(_reduced(key, step))
        if models and len({replace(model.shape, context=0) for model in models}) == 1:
            return min(models, key=lambda model: model.shape.context)
        if models:
            return None
    return None


_FORMATS = r"gguf|awq|gptq|bnb|unsloth|mlx|onnx|qat|[48]bit|int[48]|fp8|fp16|bf16|q\d(_\w+)*"
_VARIANTS = r"instruct|base|chat|it|pt|hf|thinking|deduped|meta"
_EDITIONS = r"\d{4}|v\d+(\.\d+)*"
_IGNORED = ("", _FORMATS, f"{_FORMATS}|{_VARIANTS}", f"{_FORMATS}|{_VARIANTS}|{_EDITIONS}")
"""What each step of find_known_model ignores between the hyphens of a name."""

_NICKNAMES = {"phi-3-mini": "phi-3-mini-4k-instruct"}


def _reduced(key: str, step: int) -> str:
    ignored = re.compile(_IGNORED[step])
    return "-".join(part for part in key.split("-") if not ignored.fullmatch(part))


def _known(row: dict[str, str]) -> KnownModel:
    """A line of the table: the hub id, the parameters, and numbers as in a config.json; `more`
    has those of few models (KEY=NUMBER)."""
    hub_id, parameters, kind = (row.pop(key) for key in ("hub_id", "parameters", "model_type"))
    row |= dict(pair.split("=") for pair in row.pop("more").split())
    config = {"model_type": kind, **{name: int(size) for name, size in row.items()}}
    return KnownModel(hub_id, int(parameters), shape_from_config(config))


_TABLE = read_text(Path(__file__).with_name("known_models.csv"))
KNOWN_MODELS: tuple[KnownModel, ...] = tuple(
    map(_known, csv.DictReader(_TABLE.splitlines(), restval=""))
)


def _by_key(step: int) -> dict[str, list[KnownModel]]:
    index: dict[str, list[KnownModel]] = {}
    for model in KNOWN_MODELS:
        key = _reduced(model.hub_id.split("/")[-1].lower(), step)
        index.setdefault(key, []).append(model)
    return index


_BY_KEY = tuple(_by_key(step) for step in range(len(_IGNORED)))

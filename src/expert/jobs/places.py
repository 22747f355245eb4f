"""Whether what a manifest names is there: a doubt about it, since files may be made later."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from expert.core.errors import ExpertError

if TYPE_CHECKING:
    from expert.manifest.reader import ReadManifest
    from expert.manifest.schema import BaseModelSpec


@dataclass(frozen=True)
class Doubt:
    """A key whose file, folder or model is not found now or tells too little, and what to do."""

    path: str
    text: str


def doubts_about(
    read: ReadManifest, *, model: str | None = None, environ: Mapping[str, str] = os.environ
) -> list[Doubt]:
    """What is not there of the rows and of the base models; nothing is read or fetched."""
    from expert.planning.plan import choose_model

    specs = [choose_model(read.manifest, model)] if model else read.manifest.base_models
    found = [_about_model(number, spec, read, environ) for number, spec in enumerate(specs)]
    return [*(doubt for doubt in found if doubt is not None), *_about_rows(read)]


def _about_model(
    number: int, spec: BaseModelSpec, read: ReadManifest, environ: Mapping[str, str]
) -> Doubt | None:
    from expert.planning.resolve import is_hub_id, near_model, resolve_model

    path = f"base_models[{number}].name"
    try:
        model = resolve_model(spec, read.folder, environ)
    except ExpertError as error:
        return Doubt(path, str(error))
    if model.place != "hub" or model.shape is not None:
        return None
    near = near_model(spec.name, read.folder, environ)
    if near is None and is_hub_id(spec.name):
        return None  # nobody here can know whether the hub has it
    where = "is not on this machine, and is no model that is known by name"
    fix = f"did you mean {near!r}?" if near else "put its folder into models/, or name owner/model"
    return Doubt(path, f"{spec.name}: {where}  ({fix})")


def _about_rows(read: ReadManifest) -> Iterator[Doubt]:
    """Of every path by itself, so that all that are wrong are told at once."""
    from expert.data.records import DataError
    from expert.data.sources import resolve_sources
    from expert.manifest.rules import read_paths

    spec = read.manifest.training.dataset
    alone = {"tasks": None, "validation_path": None, "test_path": None}
    for path, value in read_paths(read.manifest):
        if not path.startswith("training.dataset."):
            continue
        try:
            resolve_sources(spec.model_copy(update={**alone, "path": value}), read.folder)
        except DataError as error:
            yield Doubt(path, str(error))

"""What a manifest names but is missing here: warnings, since files may be created later."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from expert.core.errors import ExpertError, Problem
from expert.data.examples.column_survey import survey_rows
from expert.data.examples.columns import detect_source_columns
from expert.data.read.sources import SourceFinder, iterate
from expert.data.records import DataError
from expert.manifest.check.rules import read_paths
from expert.manifest.schema.manifest import CHAR_GPT, BaseModelSpec
from expert.planning.decisions import Remark
from expert.planning.models.resolve import NotATextModel, is_hub_id, near_model, resolve_model
from expert.planning.plan import choose_model

if TYPE_CHECKING:
    from expert.data.read.folders import Split
    from expert.manifest.reader import ReadManifest

FIRST_ROWS = 1000
"""Rows read from a file to know its columns."""
_SPLITS: dict[str, Split] = {
    "validation_path": "validation",
    "valid": "validation",
    "test_path": "test",
    "test": "test",
}
"""Split by the last part of the key that names the rows; all others are train."""


def find_missing(
    read: ReadManifest, *, model: str | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[list[Remark], list[Problem]]:
    """Check the base models, and the rows and columns by the first rows of every file; fetches
    nothing. Returns warnings, since files may be created later, and what no later file can fix."""
    specs = [choose_model(read.manifest, model)] if model else read.manifest.base_models
    about_models = [_about_model(number, spec, read, environ) for number, spec in enumerate(specs)]
    of_characters = all(spec.name == CHAR_GPT for spec in specs)
    about_rows = _about_rows(read, of_characters=of_characters)
    remarks = [entry for entry in about_models if isinstance(entry, Remark)]
    problems = [entry for entry in about_models if isinstance(entry, Problem)]
    return [*remarks, *about_rows], problems


def _about_model(
    number: int, spec: BaseModelSpec, read: ReadManifest, environ: Mapping[str, str]
) -> Remark | Problem | None:
    path = f"base_models[{number}].name"
    try:
        model = resolve_model(spec, read.folder, environ)
    except NotATextModel as error:
        return Problem(path, str(error).partition(": ")[2])
    except ExpertError as error:
        return Remark.warning(path, str(error))
    if model.place != "hub" or model.shape is not None:
        return None
    near = near_model(spec.name, read.folder, environ)
    if near is None and is_hub_id(spec.name):
        return None  # only the hub knows whether it exists
    where = "is not on this machine, and is not a known model name"
    fix = f"did you mean {near!r}?" if near else "put its folder into models/, or name owner/model"
    return Remark.warning(path, f"{spec.name}: {where}  ({fix})")


def _about_rows(read: ReadManifest, *, of_characters: bool) -> Iterator[Remark]:
    """Check every path separately, so that all problems are reported."""
    spec = read.manifest.training.dataset
    for path, value in read_paths(read.manifest):
        if not path.startswith("training.dataset."):
            continue
        split = _SPLITS.get(path.rpartition(".")[2], "train")
        try:
            source = SourceFinder(spec, read.folder).find(value, split)
            if of_characters or source.kind in ("hub", "corpus"):
                continue
            # For plain text one character shows the columns as well as all of it. If there are no
            # rows, reading the data will report why.
            seen = survey_rows(iterate(replace(source, max_chars=1)), FIRST_ROWS)
            if seen.rows and not (spec.use_pretokenized and "input_ids" in seen.names):
                detect_source_columns(seen, spec)
        except DataError as error:
            yield Remark.warning(path, str(error))

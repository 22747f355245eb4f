"""What a manifest names and is not here: a warning, since files may be made later."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from expert.core.errors import ExpertError, Problem
from expert.data.examples.column_survey import ColumnSurvey, survey_rows
from expert.data.examples.columns import columns_of
from expert.data.read.sources import Source, find_source, iterate
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
"""Read of a file to know its columns."""
_SPLITS: dict[str, Split] = {
    "validation_path": "validation",
    "valid": "validation",
    "test_path": "test",
    "test": "test",
}
"""By the last part of the key that names the rows; the others are trained on."""


@dataclass(frozen=True)
class Missing:
    """What a manifest names and is not here, or cannot be read as it is asked to."""

    remarks: tuple[Remark, ...]
    """Warnings: files may be made later."""
    problems: tuple[Problem, ...]
    """No run can start with these, whatever is made later."""


def missing_things(
    read: ReadManifest, *, model: str | None = None, environ: Mapping[str, str] = os.environ
) -> Missing:
    """What is not here of the rows, their columns and the base models, by the first rows of every
    file; nothing is fetched."""
    specs = [choose_model(read.manifest, model)] if model else read.manifest.base_models
    found = [_about_model(number, spec, read, environ) for number, spec in enumerate(specs)]
    of_characters = all(spec.name == CHAR_GPT for spec in specs)
    rows = _about_rows(read, of_characters=of_characters)
    warned = [each for each in found if isinstance(each, Remark)]
    problems = tuple(each for each in found if isinstance(each, Problem))
    return Missing((*warned, *rows), problems)


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
        return None  # nobody here can know whether the hub has it
    where = "is not on this machine, and is no model that is known by name"
    fix = f"did you mean {near!r}?" if near else "put its folder into models/, or name owner/model"
    return Remark.warning(path, f"{spec.name}: {where}  ({fix})")


def _about_rows(read: ReadManifest, *, of_characters: bool) -> Iterator[Remark]:
    """Of every path by itself, so that all that are wrong are told at once."""
    spec = read.manifest.training.dataset
    for path, value in read_paths(read.manifest):
        if not path.startswith("training.dataset."):
            continue
        split = _SPLITS.get(path.rpartition(".")[2], "train")
        try:
            source = find_source(value, split, spec, read.folder)
            seen = None if of_characters else _rows_at_the_start(source)
            if seen is not None and not (spec.use_pretokenized and "input_ids" in seen.names):
                columns_of(seen, spec)
        except DataError as error:
            yield Remark.warning(path, str(error))


def _rows_at_the_start(source: Source) -> ColumnSurvey | None:
    """The columns of the first rows, without reading a file whole or fetching one; None where there
    is none at hand: who reads the data tells what is wrong with it."""
    if source.kind in ("hub", "corpus"):
        return None
    # One character of a text is a row as good as all of it.
    seen = survey_rows(iterate(replace(source, max_chars=1)), FIRST_ROWS)
    return seen if seen.rows else None

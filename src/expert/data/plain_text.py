"""Whether rows are plain text or conversations: whether a prompt is continued or answered."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from expert.core.errors import ExpertError
from expert.data.examples.column_survey import survey_rows
from expert.data.examples.columns import Columns, detect_source_columns
from expert.data.examples.formats import example_of
from expert.data.named_sources import NamedSources
from expert.data.read.rows import file_format
from expert.data.read.sources import Source, iterate, resolve_sources
from expert.data.records import BadRow, DataError, Dropped, Example, Row
from expert.data.tokens.token_rows import token_rows_in
from expert.manifest.migrate.aliases import CORPORA
from expert.manifest.schema.dataset import DatasetSpec
from expert.manifest.schema.file_formats import COMPRESSED, ENDINGS
from expert.manifest.schema.manifest import CHAR_GPT
from expert.planning.run_plan import RunPlan
from expert.planning.survey import local_path

_TEXT_SUFFIXES = tuple(kind + packed for kind in ENDINGS["txt"] for packed in ("", *COMPRESSED))
FIRST_ROWS = 256
"""Rows read to detect the columns; few, since a row may be a whole text."""


class FirstRow:
    """The first training row of a run, if its file still exists. Read on demand and only once,
    since a row may be a whole text."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan

    @cached_property
    def _first_parsed(self) -> tuple[Columns, Example | BadRow | Dropped] | None:
        try:
            spec = DatasetSpec.model_validate(self._plan.data.dataset)
            folder = folder_of_paths(self._plan, spec)
            sources = resolve_sources(spec, folder).trains if folder is not None else ()
            every = (row for source in sources if source.kind != "hub" for row in iterate(source))
            return _first_parsed((row for row in every if isinstance(row, Row)), spec)
        except (ValidationError, DataError, OSError):  # another version, moved or changed since
            return None

    @property
    def is_text(self) -> bool | None:
        """Whether it is a text without answers; None if it cannot be read."""
        return _is_plain_text(*self._first_parsed) if self._first_parsed is not None else None

    @property
    def example(self) -> Example | None:
        """Its content; None if it cannot be read or is left out."""
        example = self._first_parsed[1] if self._first_parsed is not None else None
        return example if isinstance(example, Example) else None

    @property
    def tools(self) -> str:
        """The tools offered in it, as JSON; "" if there are none."""
        return self.example.tools if self.example is not None else ""


def trained_on_text(plan: RunPlan, first: FirstRow | None = None) -> bool:
    """Whether the data was plain text, so that a prompt is continued rather than answered.

    Decided by the first row if its file exists, else by the manifest alone. Nothing is downloaded.
    `first`: avoids reading the row again.
    """
    data = plan.data.dataset
    path = str(data.get("path") or "")
    is_text = data.get("format") in ("txt", "text") or path.lower().endswith(_TEXT_SUFFIXES)
    if plan.model.name == CHAR_GPT or path in CORPORA or is_text:
        return True
    try:
        spec = DatasetSpec.model_validate(data)
    except ValidationError:  # from another version
        return False
    known = (first or FirstRow(plan)).is_text
    if known is not None:
        return known
    return bool(spec.text_field or (spec.field_mapping and spec.field_mapping.text))


def are_plain_text(spec: DatasetSpec, named: NamedSources, *, fetch: bool = False) -> bool | None:
    """Whether the training rows are texts without answers, by the first row of each source; None if
    they are not on this machine. `fetch`: rows may be downloaded from the hub."""

    def is_text(source: Source) -> bool:
        """Text files are recognised by name: they may be large or not downloaded yet."""
        by_name = source.files and file_format(source.files[0], source.format) == "txt"
        if source.kind == "corpus" or by_name:
            return True
        tokens = token_rows_in(source) if named.key else None
        if tokens:
            return tokens.is_text
        found = _first_parsed(iterate(source), spec)
        return found is not None and _is_plain_text(*found)

    trains = named.sources.trains
    if not fetch and any(source.kind == "hub" for source in trains):
        return None
    try:
        return all(map(is_text, trains))
    except (ExpertError, OSError):  # raised again when the data is read
        return None


def _first_parsed(
    rows: Iterable[Row | BadRow], spec: DatasetSpec
) -> tuple[Columns, Example | BadRow | Dropped] | None:
    """The columns according to the first rows, and the first row parsed; None without rows."""
    looked_at = list(islice(rows, FIRST_ROWS))
    first = next((row for row in looked_at if isinstance(row, Row)), None)
    if first is None:
        return None
    columns = detect_source_columns(survey_rows(looked_at), spec)
    return columns, example_of(first, columns)


def _is_plain_text(columns: Columns, example: Example | BadRow | Dropped) -> bool:
    return not example.turns if isinstance(example, Example) else columns.kind == "text"


def folder_of_paths(plan: RunPlan, spec: DatasetSpec, *others: Path) -> Path | None:
    """The folder that the paths of a manifest are relative to: above the cache, beside the runs, or
    one of the others; None if no folder has the training data."""
    named = [task.train for task in (spec.tasks or {}).values()] or [spec.path or ""]
    above_cache = Path(plan.data.cache).parents[1:2] if plan.data.cache else ()
    for place in dict.fromkeys([*above_cache, Path(plan.watch.output_dir).parent, *others]):
        if all(name in CORPORA or local_path(name, place).exists() for name in named):
            return place
    return None

"""The rows a run held out of its training rows, and whether another run was trained on them.

They can be found only in exactly the rows that the run saw: with one more row, the split differs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from expert.core.errors import ExpertError
from expert.core.events import read_events
from expert.core.rundir import RunFolder, checkpoints_in
from expert.data.examples.column_survey import survey_rows
from expert.data.examples.columns import Columns, detect_source_columns
from expert.data.read.sources import Source, iterate
from expert.data.records import BadRow, Example, Row, Segment
from expert.data.template.templates import TemplateError
from expert.judging.cases import Case
from expert.manifest.reader import ReadManifest
from expert.manifest.schema.dataset import DatasetSpec
from expert.manifest.schema.manifest import CHAR_GPT
from expert.planning.run_plan import RunPlan
from expert.run.stored.load import manifest_of_run

if TYPE_CHECKING:
    from expert.data.pipeline import DataPipeline
    from expert.data.prepared import PreparedData, PreparedSplit


ROW_DIFFERENCES = ("data.tokens", "data.index")
"""Prefixes of differences about the rows, which --allow-changed accepted."""


@dataclass(frozen=True)
class TrainedRows:
    """All rows a run was trained on, over all its starts."""

    tokens: frozenset[str]
    """Short keys of the prepared rows, as in the names of their folders; a key depends on the
    content of the rows and on their formatting."""
    indexes: frozenset[str]
    """Names of the pack indexes, which depend on the keys and the rows drawn."""
    mixed: bool
    """It continued with other rows than it started with."""

    def same_as(self, other: TrainedRows) -> bool:
        """Whether two runs surely drew the same rows from the same data."""
        known = bool(self.tokens and self.indexes) and not (self.mixed or other.mixed)
        return known and (self.tokens, self.indexes) == (other.tokens, other.indexes)


def trained_rows(folder: RunFolder) -> TrainedRows:
    """Collected from events and checkpoints, of which some may be gone."""
    from expert.data.tokens.prepare import short_key
    from expert.training.checkpoint import CheckpointError, read_state

    tokens: set[str] = set()
    indexes: set[str] = set()
    mixed = False
    for event in read_events(folder.events):
        if event["event"] == "data" and event.get("split") == "train":
            tokens.update([short_key(str(event["key"]))] if event.get("key") else ())
            indexes.update([str(event["index"])] if event.get("index") else ())
        elif event["event"] == "resumed":
            lines = event.get("changed") or ()
            mixed = mixed or any(str(line).startswith(ROW_DIFFERENCES) for line in lines)
    for _, checkpoint in checkpoints_in(folder.checkpoints):
        try:
            data = read_state(checkpoint)["identity"]["data"]
            tokens.update(short_key(key) for key in data["tokens"])
            indexes.add(data["index"])
        except (CheckpointError, KeyError, TypeError):
            continue
    return TrainedRows(frozenset(tokens), frozenset(indexes), mixed)


TOKENS_ONLY = (
    "{}: its rows are tokens, without questions and answers to judge by  (name rows of text with "
    "--test-set FILE)"
)


class TrainedRowsUnknown(Exception):
    """It is unknown which rows a run was trained on; the message says why."""


@dataclass(frozen=True)
class Run:
    """A run, and the folder its manifest's paths are relative to; None if its data is gone."""

    folder: RunFolder
    plan: RunPlan
    place: Path | None


class RestoredSplit(NamedTuple):
    """The rows of a run, split again as the run split them."""

    line: DataPipeline
    sources: Sequence[Source]
    made: PreparedData

    def rows_of(self, split: PreparedSplit) -> Iterator[tuple[Iterable[Row | BadRow], Columns]]:
        """Rows and columns of a split drawn from the training rows, source by source."""
        import numpy as np

        from expert.data.pipeline import reader_for
        from expert.data.tokens.documents import DocumentStore

        first = 0
        documents = np.unique(split.index.piece_document)
        for prepared, source in zip(split.folders, self.sources, strict=True):
            count, store = prepared.statistics.documents, DocumentStore(prepared.folder)
            own = documents[(documents >= first) & (documents < first + count)] - first
            numbers = {store.row(int(document)) for document in own}
            reading = reader_for(self.line, source)
            if source in self.line.chosen.tokens:
                raise ExpertError(TOKENS_ONLY.format(source.name))
            columns = reading.columns  # None for characters
            if columns is None:
                columns = detect_source_columns(survey_rows(iterate(source)), self.line.spec)
            rows = enumerate(reading.rows())
            yield [row for number, row in rows if number in numbers], columns
            first += count


def restore_split(run: Run, *, make: bool = True) -> RestoredSplit:
    """The rows of a run, from the present data; TrainedRowsUnknown if that has changed, or if its
    tokens are gone and must not be made again."""
    from expert.data.named_sources import named_sources
    from expert.data.pipeline import open_pipeline, recipe_of
    from expert.data.splits import prepare_splits
    from expert.data.tokens.prepare import look, short_key

    folder, plan, place = run.folder, run.plan, run.place
    if place is None:
        raise TrainedRowsUnknown("its data was moved or deleted")
    spec = DatasetSpec.model_validate(plan.data.dataset)
    read = ReadManifest(manifest_of_run(folder), str(folder.manifest), place)
    trained = trained_rows(folder)
    named = named_sources(read, spec=spec)
    line = open_pipeline(plan, read, named)
    trains = line.sources_of("train")
    recipes = [recipe_of(line, source) for source in trains]
    if not trained.tokens:
        raise TrainedRowsUnknown("the run folder does not record which rows it was trained on")
    if trained.mixed or len(trained.indexes) > 1:
        raise TrainedRowsUnknown("the run was resumed with other rows than it started with")
    if trained.tokens != {short_key(recipe.key()) for recipe, _ in recipes}:
        raise TrainedRowsUnknown("the data, or how its rows are read, changed since the run")
    if not make and any(look(tokens, recipe) for recipe, tokens in recipes):
        raise TrainedRowsUnknown("the prepared rows are gone")
    prepared = prepare_splits(line)
    assert prepared is not None
    # If no index is known the recipes decide.
    if trained.indexes and trained.indexes != {prepared.train.index_file.name}:
        raise TrainedRowsUnknown("other rows would be held out now than in the run")
    return RestoredSplit(line, trains, prepared)


def trained_among(rows: Sequence[Example], run: Run, *, make: bool) -> list[bool]:
    """Whether a run was trained on each row; TrainedRowsUnknown if that is not known. Without
    `make`, missing tokens are not made again.

    Rows are written and tokenised as the run's were, and recognised by their tokens: what the model
    really saw is compared.
    """
    import numpy as np

    from expert.data.tokens.row_keys import RowKeys, keys_of_batch

    if DatasetSpec.model_validate(run.plan.data.dataset).streaming:
        raise TrainedRowsUnknown("its rows were streamed")
    drawn = restore_split(run, make=make)
    train, template = drawn.made.train, drawn.line.template
    known = RowKeys.of(train.open())
    written: list[list[Segment]] = []
    for row in rows:
        try:
            learn = run.plan.data.train_on_prompt
            segments = template.segments(row, learn_prompt=learn) if template else None
            written.append(list(segments or [Segment(row.text, learn=True)]))
        except TemplateError:  # what a template cannot write was never trained on
            written.append([Segment("", False)])
    keys = keys_of_batch(drawn.line.encoder.encode(written)).whole
    return list(np.isin(keys, known.whole[np.unique(train.index.piece_document)]))


def refuse_rows_baseline_trained_on(
    judged: Sequence[Example], name: str, run: Run, other: Run
) -> None:
    """Raise ExpertError if the baseline may have been trained on rows that the run held out."""
    if trained_rows(other.folder).same_as(trained_rows(run.folder)):
        return
    where = f"{other.folder.path}: the baseline"
    remedy = "name rows that neither run was trained on with --test-set FILE"
    try:
        known = trained_among(judged, other, make=True)
    except (TrainedRowsUnknown, ExpertError, OSError) as error:
        raise ExpertError(
            f"{where} may have been trained on the rows it would be judged by ({name}): "
            f"{error}  ({remedy}, or restore the data as it was)"
        ) from error
    # A row that occurs twice may be both trained on and held out; that applies to the run, too.
    ours = trained_among(judged, run, make=True) if any(known) else known
    if count := sum(map(operator.gt, known, ours)):
        raise ExpertError(
            f"{where} was trained on {count} of the {len(judged)} rows it would be judged by "
            f"({name})  ({remedy}, or compare with a run that held out the same ones)"
        )


def trained_cases(
    rows: Iterable[tuple[tuple[Case, ...], Example]], run: Run, *, make: bool
) -> tuple[frozenset[str], str]:
    """The ids of the cases trained on, and a note with the reason if that is unknown."""
    asked = [row for row in rows if row[0]]
    if not asked or run.plan.model.name == CHAR_GPT:
        return frozenset(), ""
    try:
        found = trained_among([example for _, example in asked], run, make=make)
    except (TrainedRowsUnknown, ExpertError, OSError) as why:
        return frozenset(), f"unknown whether the run was trained on these cases: {why}"
    trained = (cases for (cases, _), known in zip(asked, found, strict=True) if known)
    return frozenset(case.id for cases in trained for case in cases), ""

"""Row and token counts for a plan before a run: from prepared tokens if there are any, else
estimated from a sample.

No file is tokenised completely, and nothing is written except remembered hashes of data files.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from expert.core.errors import ExpertError
from expert.core.text import counted
from expert.data.named_sources import NamedSources, TokenMismatch
from expert.data.pack.overlong_rows import MAX_LENGTH, NoRowsLeft, remark_on_left_out
from expert.data.pack.packing import count_untrainable
from expert.data.pipeline import (
    FIRST_ROWS,
    STREAM_WINDOW_ROWS,
    DataPipeline,
    open_pipeline,
    reader_for,
    row_remarks,
)
from expert.data.prepared import PreparedData, PreparedSplit
from expert.data.read.sources import Source, Sources, iterate
from expert.data.records import BadRow, Row
from expert.data.splits import all_tokens, prepare_splits
from expert.data.tokens.documents import DocumentStore, FlatDocuments, shard_of
from expert.data.tokens.prepare import Prepared
from expert.data.tokens.token_rows import IDS, MASK
from expert.data.tokens.tokenise import tokenise_rows
from expert.manifest.reader import ReadManifest
from expert.manifest.schema.file_formats import PACKED
from expert.manifest.schema.manifest import CHAR_GPT
from expert.planning.decisions import Remark
from expert.planning.models.model_files import InvalidModelFolder
from expert.planning.run_plan import RunPlan
from expert.planning.survey import FILE_BYTES_PER_TOKEN, PackedRows, Survey, survey_file

MAX_COUNTED_ROWS = 50_000
"""Rows of a source that are read; takes about a second. A source with more is estimated from them,
by its lines or metadata."""
SAMPLED_ROWS = 300
"""Rows of them that are tokenised."""
ROWS_FOR_COLUMNS = 20_000
"""Rows read to detect the columns of files that are not prepared yet: 0.15 s."""


@dataclass(frozen=True)
class Counts:
    """Rows and tokens of the training files, and their packing if there is one."""

    survey: Survey | None
    """None: only the sizes of the files are known."""
    packed: PreparedSplit | None = None
    remarks: tuple[Remark, ...] = ()


def count_rows(read: ReadManifest, plan: RunPlan, named: NamedSources) -> Counts | None:
    """What is known about the rows; None if only the file sizes are."""
    if plan.model.name == CHAR_GPT:
        return None
    streaming = read.manifest.training.dataset.streaming
    try:
        if any(source.kind == "hub" for source in named.sources.trains):
            return None
        # Whether text can be tokenised without downloading anything.
        location = Path(plan.model.location)
        if plan.model.place == "hub" or not (location / "tokenizer.json").is_file():
            known = streaming or plan.length.rows is not None
            counts = None if known else _estimated(named.sources, None)
            if named.key:
                return counts
            line = open_pipeline(plan, read, named, writes=False, has_tokenizer=False)
            line = replace(line, most_rows=STREAM_WINDOW_ROWS)
            return replace(counts or Counts(None), remarks=_doubts(line))
        line = open_pipeline(plan, read, named, writes=False)
        if streaming:
            return Counts(None, remarks=_doubts(line))
        counts = _prepared(line) or _estimated(named.sources, line) or Counts(None)
        doubts = _doubts(line) if counts.packed is None else ()
        remarks = dict.fromkeys((*line.chosen.remarks, *counts.remarks, *doubts))
        return replace(counts, remarks=tuple(remarks))
    except (TokenMismatch, InvalidModelFolder):
        raise
    except (ExpertError, OSError):  # raised again when the data is read
        return None


def _doubts(line: DataPipeline) -> tuple[Remark, ...]:
    """What would stop a run or be warned of, by the columns and the first training rows."""
    line = replace(line, most_rows=line.most_rows or ROWS_FOR_COLUMNS)
    doubts = []
    for source in line.sources_of("train"):
        reading = reader_for(line, source)
        made = (reading.segments_of(r) if isinstance(r, Row) else r for r in reading.rows())
        looked_at = list(islice(made, FIRST_ROWS))
        bad = [each for each in looked_at if isinstance(each, BadRow)]
        if len(bad) > line.spec.max_bad_rows:
            what = f"{len(bad)} of the first {counted(len(looked_at), 'row')} cannot be used"
            tolerated = f"training.dataset.max_bad_rows tolerates {line.spec.max_bad_rows}"
            text = f"{what}, and {tolerated}: {bad[0]}  ({line.list_command})"
            doubts.append(Remark.warning("training.dataset", text))
    return (*doubts, *row_remarks(line))


def _prepared(line: DataPipeline) -> Counts | None:
    """Exact counts if all tokens are prepared, with the packing if that exists too."""
    tokens = all_tokens(line, "train")
    if tokens is None:
        return None
    survey = _survey(line, tokens)
    try:
        prepared_data = prepare_splits(line)
    except NoRowsLeft as error:
        return Counts(survey, remarks=(Remark.warning(MAX_LENGTH, str(error)),))
    if prepared_data is not None:
        return replace(counts_of(line, prepared_data), remarks=prepared_data.doubts)
    store = DocumentStore(*(prepared.folder for prepared in tokens))
    unlearnt = count_untrainable(line.plan, store)
    longest = survey.longest_tokens or 0
    left_out = remark_on_left_out(line.plan, unlearnt, len(store), longest=longest)
    return Counts(survey, remarks=tuple(left_out))


def counts_of(line: DataPipeline, prepared: PreparedData) -> Counts:
    train, index = prepared.train, prepared.train.index
    seen = index.statistics()
    held_out = max((split.index.bins for split in prepared.splits()[1:]), default=None)
    shape = (index.examples, index.bins, index.length, seen.fill, seen.tokens)
    packed = PackedRows(*shape, held_out=held_out)
    return Counts(replace(_survey(line, train.folders), packed=packed), train)


def _survey(line: DataPipeline, tokens: Sequence[Prepared]) -> Survey:
    """Prepared rows and tokens, including those that will be held out."""
    pairs = [
        (each.statistics, weight)
        for each, weight in zip(tokens, line.chosen.sources.weights, strict=True)
    ]
    rows = sum(int(each.documents * weight) for each, weight in pairs)
    return Survey(
        rows if line.is_text else None,  # one text of characters is cut into rows later
        sum(int(each.tokens * weight) for each, weight in pairs),
        "prepared rows",
        "prepared",
        max((each.longest for each, _ in pairs), default=None),
    )


def _estimated(sources: Sources, line: DataPipeline | None) -> Counts | None:
    """Counts by reading the first rows of every source. Tokens come from a sample of them, or from
    bytes without a tokenizer."""
    if line is not None and (check := line.chosen.checks.get(sources.trains[0])):
        rows = check.rows - check.bad_rows  # all token rows were read when they were checked
        return Counts(Survey(rows, check.tokens, "token rows", "counted", check.longest))
    parts = [_read_source(source, line) for source in sources.trains]
    known = [(part.survey, part.remarks) for part in parts if part and part.survey]
    if len(known) < len(parts):
        return None
    weighted = list(zip([survey for survey, _ in known], sources.weights, strict=True))
    whole = replace(
        known[0][0],
        rows=sum(int((survey.rows or 0) * weight) for survey, weight in weighted),
        tokens=round(sum((survey.tokens or 0) * weight for survey, weight in weighted)),
    )
    return Counts(whole, remarks=tuple(remark for _, remarks in known for remark in remarks))


def _read_source(source: Source, line: DataPipeline | None) -> Counts | None:
    """Usable rows of a source and their tokens; None if there are none, or too many to count."""
    chance, read, rows, size = random.Random(0), 0, 0, 0.0
    kept: list[Row] = []
    for row in islice(iterate(source), MAX_COUNTED_ROWS):
        read += 1
        if isinstance(row, Row):
            rows += 1
            # The size as JSON; of a row of tokens, that of the text they stand for.
            ids, mask = row.values.get(IDS), row.values.get(MASK)
            if isinstance(ids, list):
                kept_ids = mask.count(1) if isinstance(mask, list) else len(ids)
                size += FILE_BYTES_PER_TOKEN * kept_ids
            else:
                size += len(json.dumps(dict(row.values), ensure_ascii=False, default=str))
            # Reservoir sampling: each row is equally likely to be kept.
            place = rows - 1 if rows <= SAMPLED_ROWS else chance.randrange(rows)
            if place < SAMPLED_ROWS:
                kept[place : place + 1] = [row]
    if not rows:
        return None
    times, because = 1.0, "rows counted"
    if read == MAX_COUNTED_ROWS:
        known = _rows_of_files(source, read / size)
        if known is None:
            return None
        times, because = max(1.0, known[0] / read), known[1]
        times = min(times, (source.max_samples or math.inf) / rows)
    if line is None:
        how = f"from the row size: {FILE_BYTES_PER_TOKEN} bytes per token"
        tokens = round(size * times / FILE_BYTES_PER_TOKEN)
        return Counts(Survey(round(rows * times), tokens, because, how))
    lengths, remarks = _tokenised(line, source, kept)
    used = [length for length in lengths if length]
    if not used:
        return None
    times *= rows / len(lengths)
    how = "counted" if times == 1 else f"counted on a sample of {counted(len(used), 'row')}"
    survey = Survey(round(times * len(used)), round(times * sum(used)), because, how)
    return Counts(survey, remarks=tuple(remarks))


def _rows_of_files(source: Source, rows_per_byte: float) -> tuple[float, str] | None:
    """The rows of the files of a source and how they were counted: by metadata, lines or bytes;
    None if none of them says it."""
    if all(path.suffix.lower() == ".parquet" for path in source.files):
        from pyarrow.parquet import read_metadata

        recorded = sum(int(read_metadata(path).num_rows) for path in source.files)
        return recorded, "rows according to the files' metadata"
    surveys = [survey_file(path) for path in source.files]
    counts = [each.rows for each in surveys if each.rows is not None]
    if len(counts) == len(surveys) > 0:
        return sum(counts), surveys[0].because
    if not source.files or any(path.suffix.lower() in PACKED for path in source.files):
        return None
    whole = sum(path.stat().st_size for path in source.files)
    return whole * rows_per_byte, f"estimated from the first {MAX_COUNTED_ROWS:,} rows"


def _tokenised(
    line: DataPipeline, source: Source, rows: Sequence[Row]
) -> tuple[list[int], list[Remark]]:
    """Tokens of each row, 0 if it is unusable; and a warning if some have nothing to train on."""
    line = replace(line, most_rows=ROWS_FOR_COLUMNS)
    made = tokenise_rows(rows, reader_for(line, source).formatter(), line.encoder)
    lengths, count = np.zeros(len(rows), np.int64), len(made.numbers)
    if not count:
        return lengths.tolist(), []
    lengths[made.numbers] = made.batch.lengths
    unlearnt = count_untrainable(line.plan, FlatDocuments([shard_of(made.batch)]))
    tried = counted(count, "sampled row")
    return lengths.tolist(), remark_on_left_out(line.plan, unlearnt, count, of=tried)

"""The data pipeline: source → rows → examples → segments → tokens; splits.py continues it.

A `DataPipeline` holds its inputs: plan, sources, tokenizer, template, cache. Everything else is a
function of it. With a read-only cache, the same functions return None where something would have
to be written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from expert.core.links import refuse_links, refuse_links_inside
from expert.core.text import counted, shell_quoted
from expert.data.examples.cached_results import cached, cached_content_hash, cached_survey
from expert.data.examples.checks import RowFilter
from expert.data.examples.column_survey import ColumnSurvey
from expert.data.examples.columns import Columns, detect_source_columns
from expert.data.examples.formats import answers_of, example_of, first_example
from expert.data.examples.text_warnings import TextWarnings, overruled_system
from expert.data.named_sources import NamedSources, checked_sources
from expert.data.read.sources import Source, first_row, iterate
from expert.data.read.streams import data_error
from expert.data.records import BadRow, Branched, Dropped, Example, Row, RowOutcome, Segment
from expert.data.template.templates import Template, TemplateError, named_template
from expert.data.template.text_tools import text_tools
from expert.data.tokens.encoder import CharacterEncoder, Encoder, tokenizer_folder
from expert.data.tokens.prepare import (
    Prepared,
    Recipe,
    is_prepared,
    look,
    prepare,
    read_statistics,
    short_key,
)
from expert.data.tokens.tokenise import TokeniseJob
from expert.manifest.reader import ReadManifest
from expert.manifest.schema.dataset import DatasetSpec
from expert.manifest.schema.kinds import is_jinja
from expert.manifest.schema.manifest import CHAR_GPT
from expert.planning.decisions import Remark
from expert.planning.plan import folder_name
from expert.planning.run_plan import RunPlan

Tell = Callable[[str, int, int], None]
"""Progress: name of what is tokenised, rows and tokens so far. May also have `expect(name, rows)`
for the total number of rows, and `waits(sentence)`."""
LATE_COLUMN = (
    "column {!r} first appears here; none of the first {:,} rows of the stream has it  "
    "(set training.dataset.streaming: false, or fill it in an earlier row)"
)
TEXTS_FILE = ".texts.json"
"""In the cache: the warnings about texts."""
FEW_PAIRS, MOSTLY_LONGER = 20, 0.9
FIRST_ROWS = 300
"""Training rows whose text is looked at before every run: about 10 ms."""
STREAM_WINDOW_ROWS = 4096
"""Rows of a stream that are tokenised and packed together; the first window decides the columns."""
LONG_TEXT = 4000
"""Characters from which the end of a single text is held out; of a shorter text it would be too
short to be conclusive."""


@dataclass(frozen=True, eq=False)
class RowReader:
    """How the rows of one source become segments."""

    rows: Callable[[], Iterator[Row | BadRow]]
    """Start a new pass over the rows. A single text whose end is held out comes as two rows."""
    segments_of: Callable[[Row], RowOutcome]
    """The outcome of a row, without the manifest's checks."""
    formatter: Callable[[], Callable[[Row], RowOutcome]]
    """The same with the checks; one per pass, since the duplicate check remembers rows."""
    cache_key_text: str
    """Everything that determines the segments, as text; part of the cache key."""
    columns: Columns | None = None
    """None for characters and tokens."""
    seen: ColumnSurvey | None = None
    end_held_out: bool = False
    """A single text, whose end is held out as a second row."""
    in_order: bool = False
    """The outcome of a row depends on the rows before it."""

    def formatted(self) -> Iterator[tuple[Row | BadRow, RowOutcome]]:
        segments_of = self.formatter()
        for row in self.rows():
            yield row, row if isinstance(row, BadRow) else segments_of(row)


@dataclass(frozen=True, kw_only=True, eq=False)
class DataPipeline:
    """The inputs of the data pipeline."""

    plan: RunPlan
    spec: DatasetSpec
    chosen: NamedSources
    """With the tokens in it checked."""
    encoder: Encoder
    template: Template | None
    """None for the character model."""
    cache: Path
    """Where token folders and indexes are kept, named by what determines them."""
    folder: Path
    """Folder of the manifest."""
    writes: bool = True
    """False: the cache is only read."""
    manifest_file: str = ""
    has_tokenizer: bool = True
    """False: the model's tokenizer is not on this machine, so rows can only be shown as text."""
    tell: Tell = lambda name, rows, tokens: None
    most_rows: int | None = None
    """Rows read to detect the columns; None: all."""
    readings: dict[Source, RowReader] = field(default_factory=dict, repr=False)
    """Cached by source, so that rows are surveyed once."""
    damaged: list[str] = field(default_factory=list, repr=False)
    """Messages about damaged parts of the cache that were rebuilt."""

    @property
    def waits(self) -> Callable[[str], None]:
        """Shows what this process is waiting for."""
        shows: Callable[[str], None] = getattr(self.tell, "waits", lambda sentence: None)
        return shows

    @property
    def is_text(self) -> bool:
        """Rows of text rather than one text of characters."""
        return self.template is not None

    @property
    def list_command(self) -> str:
        return f"expert dataset check --manifest {shell_quoted(self.manifest_file)} lists them"

    def sources_of(self, split: str) -> list[Source]:
        """The sources of a split: one per task, or just one."""
        return self.chosen.sources.of(split)


def open_pipeline(
    plan: RunPlan,
    read: ReadManifest,
    named: NamedSources,
    *,
    tell: Tell = lambda name, rows, tokens: None,
    writes: bool = True,
    has_tokenizer: bool = True,
) -> DataPipeline:
    """Open the pipeline of a manifest; downloads a tokenizer from the hub if needed. With
    `has_tokenizer=False` nothing is downloaded and rows can only be rendered as text."""
    spec = read.manifest.training.dataset
    cache = _cache(plan, read)
    sources = named.sources
    encoder: Any = None
    template: Template | None = None
    if not has_tokenizer:
        # By name, without the tokenizer; ChatML in place of the tokenizer's.
        asked = plan.model.prompt_template or "tokenizer"
        asked = "chatml" if asked == "tokenizer" or is_jinja(asked) else asked
        template = named_template(asked, eos="<eos>", bos="<bos>")
    elif plan.model.name == CHAR_GPT:
        assert sources.train is not None, "the character model has one text"
        rows = iterate(sources.train)
        encoder = CharacterEncoder(
            "".join(str(getattr(row, "values", {}).get("text", "")) for row in rows)
        )
    else:
        tokenizer = tokenizer_folder(plan, read.folder)
        encoder, template = text_tools(tokenizer, plan.model.prompt_template)

    return DataPipeline(
        plan=plan,
        spec=spec,
        chosen=checked_sources(named, encoder, spec, cache, keep=writes),
        encoder=encoder,
        template=template,
        cache=cache,
        writes=writes,
        folder=read.folder,
        manifest_file=read.source,
        has_tokenizer=has_tokenizer,
        tell=tell,
    )


def _cache(plan: RunPlan, read: ReadManifest) -> Path:
    """The folder of prepared data: the one that the manifest names, unless it is read-only or
    another tool saved a data set there."""
    own = read.folder / "datasets_optimized" / folder_name(plan.expert)
    folder = Path(plan.data.cache or own)
    if read.manifest.training.config.pretokenized_cache is not None:
        # There may be other people's files in it, which are not checked.
        refuse_links(folder, below=read.folder)
        folder = folder.parent if is_prepared(folder) else folder
        saved = any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
        if not saved and (not folder.exists() or os.access(folder, os.W_OK)):
            return folder
        folder = own
    # The cache in an expert's folder may come from someone else.
    refuse_links(folder, below=read.folder)
    refuse_links_inside(folder)
    return folder


# --- rows to segments ----------------------------------------------------------------------------


def reader_for(line: DataPipeline, source: Source) -> RowReader:
    """How the rows of a source become segments; cached."""
    if source not in line.readings:
        line.readings[source] = _make_reader(line, source)
    return line.readings[source]


def _make_reader(line: DataPipeline, source: Source) -> RowReader:
    tokens = line.chosen.tokens.get(source)
    if tokens is not None:
        segments: Any = tokens.segments_of
        return RowReader(lambda: iterate(source), segments, lambda: segments, str(tokens))
    if line.template is None:
        apart = _is_one_text(line, source, None)
        share = line.spec.validation_split if apart else 0

        assert isinstance(line.encoder, CharacterEncoder)
        trained = source is line.chosen.sources.train  # whose characters are the vocabulary
        known = frozenset(line.encoder.characters)

        def characters(row: Row) -> RowOutcome:
            unknown = [] if trained else sorted(set(row.values["text"]) - known)
            if unknown:
                what = f"the character {unknown[0]!r} is not in the training text"
                raise data_error(row.place, what, "add it there, or remove it here")
            return [Segment(row.values["text"], True)]

        return RowReader(
            lambda: _rows(line, source, "text" if apart else ""),
            characters,
            lambda: characters,
            f"characters, {share:g} at the end apart",
            end_held_out=apart,
        )
    # The columns and their survey, over all rows or the first window of a stream.
    streamed = line.spec.streaming and source is line.chosen.sources.train
    most = STREAM_WINDOW_ROWS if streamed else line.most_rows
    keep = line.writes and not streamed
    seen = cached_survey(source, line.cache, most, keep=keep, waits=line.waits)
    if not seen.rows:
        first_row(source)  # raises with the reason
    columns = detect_source_columns(seen, line.spec)
    apart = _is_one_text(line, source, columns)
    end = f", {line.spec.validation_split:g} at the end apart" if apart else ""
    return RowReader(
        lambda: _rows(line, source, columns.text if apart else ""),
        _formatter(line, columns, seen, None),
        lambda: _formatter(line, columns, seen, RowFilter(line.spec.validation)),
        str(columns) + end,
        columns,
        seen,
        apart,
        in_order=bool(line.spec.validation and line.spec.validation.deduplicate),
    )


def _formatter(
    line: DataPipeline, columns: Columns, seen: ColumnSurvey, checks: RowFilter | None
) -> Callable[[Row], RowOutcome]:
    used = set(columns.used().values())
    template, learn_prompt = line.template, line.plan.data.train_on_prompt
    assert template is not None
    watched = line.spec.streaming and not seen.whole

    def segments_of(row: Row) -> RowOutcome:
        late = seen.late_column(row.values) if watched else ""
        if late and late not in used:  # columns named in the manifest may appear late
            return BadRow(row.file, row.line, LATE_COLUMN.format(late, seen.rows))
        answers = answers_of(row, columns)
        if not isinstance(answers, list):
            return answers
        example = next(filter(None, answers))
        reason = checks.reason(example) if checks is not None else ""
        if reason:
            return Dropped(reason)
        try:
            if columns.rejected or columns.judged:
                segments = [template.segments(each) if each else [] for each in answers]
                return Branched(segments, mismatched=columns.judged)
            return template.segments(example, learn_prompt=learn_prompt)
        except TemplateError as error:
            return BadRow(row.file, row.line, str(error))

    return segments_of


def _rows(line: DataPipeline, source: Source, divided: str) -> Iterator[Row | BadRow]:
    """The rows of a source; `divided`: the column of a text that is split in two."""
    if not divided:
        yield from iterate(source)
        return
    for row in iterate(source):
        if not isinstance(row, Row):
            yield row
            continue
        text = str(row.values.get(divided, ""))
        cut = int(len(text) * (1 - line.spec.validation_split))
        if line.is_text:  # between lines or words, not inside one
            cut = max(text.rfind("\n", cut // 2, cut), text.rfind(" ", cut // 2, cut)) + 1
        yield Row({divided: text[:cut]}, row.file, row.line)
        yield Row({divided: text[cut:]}, row.file, row.line)


def _is_one_text(line: DataPipeline, source: Source, columns: Columns | None) -> bool:
    """Whether the source is one text without a validation text. Such a text is validated on its
    end, since there are no rows to hold out."""
    sources, spec = line.chosen.sources, line.spec
    own = sources.validation is not None or source is not sources.train
    if own or not spec.validation_split or spec.streaming:
        return False
    if columns is not None and (columns.kind != "text" or line.plan.data.overlong != "split"):
        return False
    rows = list(islice(iterate(source), 2))
    if len(rows) != 1 or columns is None:
        return len(rows) == 1
    if not isinstance(rows[0], Row):
        return False
    example = example_of(rows[0], columns)  # an example with turns is a conversation
    return isinstance(example, Example) and len(example.text) >= LONG_TEXT


def row_remarks(line: DataPipeline) -> list[Remark]:
    """Warnings about the columns and the first texts of the training rows."""
    about_columns, about_texts = [], []
    for source, columns, seen in _text_sources(line):
        reading = reader_for(line, source)
        read_as = f"{reading.cache_key_text} {line.template.fingerprint if line.template else ''}"
        make = partial(_warnings_about, reading, source.name, columns)
        texts = cached(source, line.cache / TEXTS_FILE, read_as, make, keep=line.writes)
        about_columns += source_column_remarks(line, source, columns, seen)
        about_texts += [Remark.warning("training.dataset", text) for text in texts]
    return [*about_columns, *about_texts]


def source_column_remarks(
    line: DataPipeline, source: Source, columns: Columns, seen: ColumnSurvey
) -> list[Remark]:
    """Warnings about unused columns with content, and about preferences that no column has."""
    found = {
        "field_mapping": columns.unused_warning(seen),
        "preference_rows": columns.preference_warning(line.spec.preference_rows),
    }
    return [
        Remark.warning(f"training.dataset.{key}", f"{source.name}: {text}")
        for key, text in found.items()
        if text
    ]


def _warnings_about(reading: RowReader, name: str, columns: Columns) -> list[str]:
    found, alike, longer = TextWarnings(), list[str](), 0
    for row in islice(reading.rows(), FIRST_ROWS):
        made = reading.segments_of(row) if isinstance(row, Row) else None
        if not isinstance(row, Row) or not isinstance(made, list):
            continue
        if isinstance(made, Branched) and all(made.conversations[:2]):
            sizes = [sum(len(each.text) for each in its) for its in made.conversations]
            longer += sizes[0] > sizes[1]
            if made.conversations[0] == made.conversations[1]:
                alike.append(row.place)
        example = first_example(row, columns)
        assert isinstance(example, Example), "the row was good when it was formatted"
        found.note(example, made, row.place, overruled_system(row.values, columns))
    lines = found.lines(name, found.examples)
    if alike:
        what = f"{counted(len(alike), 'row')} of the first {found.examples:,} prefer an answer to"
        lines.append(f"{name}: {what} itself, such as {alike[0]}: nothing is learnt from them")
    if found.examples >= FEW_PAIRS and longer >= MOSTLY_LONGER * found.examples:
        what = f"{longer:,} of the first {found.examples:,} preferred answers are the longer ones"
        lines.append(f"{name}: {what}: the model may learn to write long answers")
    return lines


def columns_read(line: DataPipeline) -> tuple[str, ...]:
    """For each source of training rows: which columns are used and which are not."""
    return tuple(
        f"{source.name}: {columns.as_text(seen)}" for source, columns, seen in _text_sources(line)
    )


def _text_sources(line: DataPipeline) -> Iterator[tuple[Source, Columns, ColumnSurvey]]:
    """Training sources with columns, that is neither characters nor tokens."""
    for source in line.sources_of("train"):
        reading = reader_for(line, source)
        if reading.columns is not None and reading.seen is not None:
            yield source, reading.columns, reading.seen


# --- segments to tokens --------------------------------------------------------------------------


def tokens_of(line: DataPipeline, source: Source, split: str) -> Prepared | None:
    """The tokens of a source, prepared if missing; None if missing and the cache is read-only."""
    if not line.writes and not line.cache.exists():
        return None
    recipe, folder = recipe_of(line, source)
    if not line.writes:
        if look(folder, recipe) is not None:
            return None
        return Prepared(folder, True, "prepared", read_statistics(folder), recipe.key())
    checked, reading = line.chosen.checks.get(source), reader_for(line, source)
    name = f"{split} {source.name}"
    expect: Callable[[str, int], None] = getattr(line.tell, "expect", lambda name, rows: None)
    is_rendered = line.is_text and source not in line.chosen.tokens
    processes = 1 if reading.in_order else len(os.sched_getaffinity(0))
    job = TokeniseJob(
        rows=reading.rows,
        formatter=reading.formatter,
        encoder=line.encoder,
        processes=processes if is_rendered else 0,
        row_count=reading.seen.rows if reading.seen else checked.rows if checked else None,
        made_for=name,
        max_bad_rows=line.spec.max_bad_rows,
        list_command=line.list_command,
        tell=lambda rows, tokens: line.tell(name, rows, tokens),
        expect=lambda rows: expect(name, rows),
        waits=line.waits,
        expected_bytes=line.plan.disk.cache_bytes if split == "train" else None,
    )
    made = prepare(job, recipe, folder)
    if made.damaged:
        line.damaged.append(f"{folder}: {made.because}, and made again")
    if checked is None:
        return made
    return replace(made, because=f"tokens of {source.name}, made elsewhere; {made.because}")


def recipe_of(line: DataPipeline, source: Source) -> tuple[Recipe, Path]:
    """What determines the tokens of a source, and their folder, whether it exists or not."""
    # Before the hash: reading rows reports a file that cannot be used without reading all of it.
    reading = reader_for(line, source)
    elsewhere, checks = source in line.chosen.tokens, line.spec.validation
    template = line.template.fingerprint if line.template else "characters"
    recipe = Recipe(
        data=cached_content_hash(source, line.cache, keep=line.writes, waits=line.waits),
        tokenizer=line.encoder.fingerprint,
        # Tokens made elsewhere depend on neither template nor checks.
        template="tokens made elsewhere" if elsewhere else template,
        columns=reading.cache_key_text,
        learn_prompt=line.plan.data.train_on_prompt and not elsewhere,
        checks=checks.model_dump_json() if checks and not elsewhere else "",
        max_samples=source.max_samples,
    )
    return recipe, line.cache / f"tokens-{short_key(recipe.key())}"

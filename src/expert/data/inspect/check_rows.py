"""`expert dataset check`: reads the rows of all splits the way preparing does, and reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from expert.core.text import counted, some_of
from expert.data.examples.columns import Columns
from expert.data.examples.formats import first_example
from expert.data.examples.messages import messages_in, unused_fields
from expert.data.examples.text_warnings import overruled_system
from expert.data.inspect.audit import (
    ExampleTable,
    SplitReport,
    duplicates,
    joined_tables,
    leaks,
    length_summary,
    near_key,
    table_of,
)
from expert.data.inspect.shown_rows import RowPicker, RowsToShow, ShownRow
from expert.data.pack.overlong_rows import left_out_warning
from expert.data.pipeline import DataPipeline, RowReader, Tell, reader_for, source_column_remarks
from expert.data.read.folders import unread_files
from expert.data.read.sources import Source
from expert.data.records import BadRow, Example, Row, RowOutcome
from expert.data.splits import drawn_rows
from expert.data.tokens.encoder import EncodedBatch
from expert.data.tokens.tokenise import in_portions, tokenise_rows
from expert.planning.survey import local_path

# Limits for tokenising together, which bound memory.
_BATCH_EXAMPLES = 1024
_BATCH_CHARACTERS = 8_000_000
FIELD_SEARCH_ROWS = 1000
"""Rows searched for unused fields of messages."""


@dataclass
class DatasetReport:
    """`problems` would stop preparing."""

    name: str
    template: str
    max_seq_length: int
    splits: list[SplitReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Which columns and files are used and which are not, and how."""
    doubts: list[str] = field(default_factory=list)
    """Warnings that do not belong to one split."""
    rows: list[ShownRow] = field(default_factory=list)
    """Some rows as the model sees them."""

    def warnings(self) -> list[str]:
        return [*self.doubts, *(line for split in self.splits for line in split.warnings())]

    def verdict(self) -> str:
        """The summary if nothing prevents preparing."""
        count = sum(not line.startswith(" ") for line in self.warnings())
        if not count:
            return "✓ no problems found in the data"
        words = "1 warning: look at it" if count == 1 else f"{count} warnings: look at them"
        return f"✓ usable, {words} before training"


def check_rows(line: DataPipeline, name: str, show: RowsToShow, tell: Tell) -> DatasetReport:
    """Read the training rows, hold some out as preparing does, then read the other splits."""
    spec = line.spec
    template = line.template.name if line.template else "characters"
    report = DatasetReport(name, template, line.plan.data.max_seq_length)
    report.notes += line.chosen.notes()
    report.doubts += [remark.text for remark in line.chosen.remarks]
    checker = _Checker(line, report, show, tell)
    split, every, counts = checker.read("train")
    keys = every.keys if len(every) else None
    others = [name for name in ("validation", "test") if line.sources_of(name)]
    chosen, held_out, repeats = drawn_rows(line, counts, keys)
    # A weight above 1 repeats rows, which is not a duplicate in the data.
    train = every.take(np.unique(chosen))
    checker.sum_up(split, train)
    if line.is_text and spec.validation_split and not len(held_out) and not others:
        few = f"train: {counted(len(every), 'example')}, too few to hold any out"
        fix = "add rows, or set training.dataset.test_path"
        report.doubts.append(f"{few}: overfitting would go unnoticed  ({fix})")
    if len(held_out):
        report.doubts += [repeats] if repeats else []
        checker.sum_up(SplitReport("validation", split_off=True), every.take(held_out), train)
    for name in others:
        split, examples, _ = checker.read(name)
        checker.sum_up(split, examples, train)
    report.rows = checker.picker.shown(line, held_out.tolist())
    return report


class _Checker:
    def __init__(self, line: DataPipeline, report: DatasetReport, show: RowsToShow, tell: Tell):
        self.line, self.report, self.picker, self.tell = line, report, RowPicker(show), tell
        data = line.plan.data
        whole = line.template is None or data.packing == "concat"
        self.room = None if whole else data.max_seq_length - line.plan.soft_tokens

    def read(self, name: str) -> tuple[SplitReport, ExampleTable, list[int]]:
        """The report and the examples of a split, and how many of them each source has."""
        split = SplitReport(name)
        files: dict[str, int] = {}
        nothing = EncodedBatch(*[np.zeros(0, np.int32)] * 4)
        tables, counts = [table_of((), (), nothing, files)], []
        for source in self.line.sources_of(name):
            before, bad_rows = len(tables), split.bad_rows
            tables += self._tables_of(split, source, files)
            counts.append(sum(map(len, tables[before:])))
            trained = sum(int(table.trained.sum()) for table in tables[before:])
            self._judge(f"{name} {source.name}", split.bad_rows - bad_rows, counts[-1], trained)
        return split, joined_tables(tables), counts

    def _tables_of(
        self, split: SplitReport, source: Source, files: dict[str, int]
    ) -> Iterator[ExampleTable]:
        """Read the rows of a source, and encode so many at a time."""
        reading, is_cut = reader_for(self.line, source), self.line.plan.data.overlong == "cut"
        self._note(split.name, source, reading)
        segments_of, outcomes, tokens = reading.formatter(), list[RowOutcome](), 0
        near = list[int]()

        def looked_at(row: Row) -> RowOutcome:
            outcome = segments_of(row)
            outcomes.append(outcome)
            if isinstance(outcome, list):
                example = self._example(row, source, reading.columns)
                near.append(near_key(example) if example else 0)
                if example is not None:
                    more = overruled_system(row.values, reading.columns) if reading.columns else []
                    split.texts.note(example, outcome, row.place, more)
            return outcome

        for portion in in_portions(reading.rows(), _BATCH_EXAMPLES, _BATCH_CHARACTERS):
            outcomes.clear()
            near.clear()
            made = tokenise_rows(portion, looked_at, self.line.encoder)
            split.rows += made.rows
            for bad in made.bad:
                split.note_bad(bad)
            split.dropped = dict(made.dropped + Counter(split.dropped))
            rows = [row for row in (portion[n] for n in made.numbers) if isinstance(row, Row)]
            coming, lengths = iter(outcomes), iter(made.batch.lengths.tolist())
            for row in portion:
                outcome = row if isinstance(row, BadRow) else next(coming)
                length = next(lengths) if isinstance(outcome, list) else 0
                self.picker.add(split.name, row, outcome, length)
            tokens += len(made.batch.ids)
            self.tell(split.name, split.rows, tokens)
            yield table_of(rows, near, made.batch, files, self.room if is_cut else None)

    def _example(self, row: Row, source: Source, columns: Columns | None) -> Example | None:
        """The example in a good row; None for tokens without text."""
        if source in self.line.chosen.tokens:
            return None
        if columns is None:
            return Example(text=str(row.values.get("text", "")))
        example = first_example(row, columns)
        assert isinstance(example, Example), "the row was good when it was formatted"
        return example

    def _note(self, split: str, source: Source, reading: RowReader) -> None:
        """Note which columns, message fields and files of a folder are used and which are not."""
        notes = []
        columns, seen = reading.columns, reading.seen
        if columns is not None and seen is not None:
            doubts = source_column_remarks(self.line, source, columns, seen)
            self.report.doubts += [remark.text for remark in doubts]
            notes.append(f"{source.name}: {columns.as_text(seen)}")
            has_messages = bool(columns.messages) or columns.has_messages
            talking = (columns.messages, columns.instruction, columns.response)
            fields: dict[str, None] = {}
            for row in islice(reading.rows(), FIELD_SEARCH_ROWS if has_messages else 0):
                values = row.values if isinstance(row, Row) else {}
                for column in talking:
                    fields |= dict.fromkeys(unused_fields(messages_in(values.get(column))))
            if fields:
                notes.append(f"{source.name}: unused message fields: {', '.join(fields)}")
        folder = local_path(source.name, self.line.folder)
        if source.kind == "files" and folder.is_dir():
            read = [str(file.relative_to(folder)) for file in source.files]
            notes.append(f"{source.name}: {split}: {counted(len(read), 'file')}: {some_of(read)}")
        if source.kind in ("files", "saved") and folder.is_dir() and "::" not in source.name:
            unread = unread_files(folder, source.format)
            notes += [f"{source.name}: not read: {some_of(unread)}"] if unread else []
        self.report.notes += [each for each in notes if each not in self.report.notes]

    def _judge(self, where: str, bad_rows: int, examples: int, trained: int) -> None:
        allowed = self.line.spec.max_bad_rows
        if bad_rows > allowed:
            what = f"training.dataset.max_bad_rows tolerates {allowed}"
            fix = f"fix the data, or --set training.dataset.max_bad_rows={bad_rows}"
            bad = counted(bad_rows, "bad row")
            self.report.problems.append(f"{where}: {bad}, and {what}  ({fix})")
        if not trained:
            what = f"there is nothing to train on: {counted(examples, 'example')}, no answers"
            fix = "check training.dataset.field_mapping and training.dataset.validation"
            self.report.problems.append(f"{where}: {what}  ({fix})")

    def sum_up(
        self, split: SplitReport, examples: ExampleTable, train: ExampleTable | None = None
    ) -> None:
        """Add the counts and findings of a split to the report."""
        plan = self.line.plan
        summary = split.lengths = length_summary(examples, self.room, plan.data.overlong)
        numbers = (summary["unlearnt"], summary["examples"], summary["longest"])
        too_long = left_out_warning(plan, split.name, *numbers)
        if summary["left"] or not len(examples):
            split.not_learnt = too_long
        elif examples.trained.any():  # otherwise the reason is already among the problems
            self.report.problems.append(
                too_long
                or f"{split.name}: {counted(len(examples), 'example')}, each longer than "
                f"max_seq_length {plan.data.max_seq_length}, and overlong: drop leaves none  "
                "(training.config.overlong: cut, or a larger max_seq_length)"
            )
        split.duplicates = duplicates(examples)
        split.leaks = leaks(train, examples) if train is not None else {}
        self.report.splits.append(split)

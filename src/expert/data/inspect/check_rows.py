"""`expert dataset check`: reads the rows of all splits the way preparing does, and reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from expert.core.text import counted, some_of
from expert.data.examples.columns import Columns
from expert.data.examples.formats import example_of
from expert.data.examples.messages import messages_in, unused_fields
from expert.data.examples.text_warnings import overruled_system
from expert.data.inspect.audit import (
    ExampleCollector,
    ExampleTable,
    SplitReport,
    duplicates,
    leaks,
    length_summary,
)
from expert.data.inspect.shown_rows import RowPicker, RowsToShow, ShownRow
from expert.data.pack.drawing import draw_documents, held_out_warning
from expert.data.pack.overlong_rows import left_out_warning
from expert.data.pipeline import (
    DataPipeline,
    RowReader,
    Tell,
    reader_for,
    source_column_remarks,
)
from expert.data.read.folders import unread_files
from expert.data.read.sources import Source
from expert.data.records import BadRow, Dropped, Example, Row
from expert.data.tokens.row_keys import RowKeys, keys_of_batch
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
    template = line.template.name if line.template else "characters"
    report = DatasetReport(name, template, line.plan.data.max_seq_length)
    report.notes += line.chosen.notes()
    report.doubts += [remark.text for remark in line.chosen.remarks]
    _Checker(line, report, show, tell).check()
    return report


class _Checker:
    def __init__(self, line: DataPipeline, report: DatasetReport, show: RowsToShow, tell: Tell):
        self.line, self.report, self.picker, self.tell = line, report, RowPicker(show), tell
        data = line.plan.data
        whole = line.template is None or data.packing == "concat"
        self.room = None if whole else data.max_seq_length - line.plan.soft_tokens
        self.keys: list[RowKeys] = []
        """Keys of the examples read so far, in batches."""
        self.tokens: Counter[str] = Counter()
        """Tokens read so far, by split."""

    def check(self) -> None:
        line, spec = self.line, self.line.spec
        split, every, counts = self._read("train")
        keys = RowKeys.joined(self.keys) if self.keys else None
        others = [name for name in ("validation", "test") if line.sources_of(name)]
        chosen, held_out = draw_documents(
            counts,
            line.weights,
            held_out_share=0.0 if "validation" in others else spec.validation_split,
            seed=line.plan.optim.seed,
            keys=keys,
        )
        if reader_for(line, line.sources_of("train")[0]).end_held_out:
            chosen, held_out = np.array([0], np.int32), np.array([1], np.int32)
        # A weight above 1 repeats rows, which is not a duplicate in the data.
        train = every.take(np.unique(chosen))
        self._sum_up(split, train)
        if line.is_text and spec.validation_split and not len(held_out) and not others:
            self.report.doubts.append(
                f"train: {counted(len(every), 'example')}, too few to hold any out: overfitting "
                "would go unnoticed  (add rows, or set training.dataset.test_path)"
            )
        if len(held_out):
            doubt = held_out_warning(keys, chosen, held_out) if keys is not None else ""
            self.report.doubts += [doubt] if doubt else []
            self._sum_up(SplitReport("validation", split_off=True), every.take(held_out), train)
        for name in others:
            split, examples, _ = self._read(name)
            self._sum_up(split, examples, train)
        self.report.rows = self.picker.shown(line, held_out.tolist())

    def _sum_up(
        self, split: SplitReport, examples: ExampleTable, train: ExampleTable | None = None
    ) -> None:
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

    def _read(self, name: str) -> tuple[SplitReport, ExampleTable, list[int]]:
        """The report and the examples of a split, and how many of them each source has."""
        split, collector = SplitReport(name), ExampleCollector()
        sources = self.line.sources_of(name)
        counts = [self._read_source(split, source, collector) for source in sources]
        return split, collector.examples(), counts

    def _read_source(self, split: SplitReport, source: Source, collector: ExampleCollector) -> int:
        reading = reader_for(self.line, source)
        self._note(split.name, source, reading)
        columns = reading.columns
        response = columns.response if columns else ""
        waiting: list[tuple[Row, Any]] = []
        characters = bad_rows = examples = trained = 0
        for row, outcome in reading.formatted():
            split.rows += 1
            self.picker.look_at(split.name, row, outcome)
            if isinstance(outcome, BadRow):
                bad_rows += 1
                split.note_bad(outcome, response)
            elif isinstance(outcome, Dropped):
                split.dropped[outcome.reason] = split.dropped.get(outcome.reason, 0) + 1
            else:
                assert isinstance(row, Row), "only a row has segments"
                example = self._example(row, source, columns)
                collector.add(example, row.file, row.line)
                examples += 1
                if example is not None:
                    more = overruled_system(row.values, columns) if columns else []
                    split.texts.note(example, outcome, row.place, more)
                waiting.append((row, outcome))
                characters += sum(len(segment.text) for segment in outcome)
            if len(waiting) >= _BATCH_EXAMPLES or characters >= _BATCH_CHARACTERS:
                trained += self._encode(split, waiting, collector)
                waiting, characters = [], 0
        if waiting:
            trained += self._encode(split, waiting, collector)
        self._judge(f"{split.name} {source.name}", bad_rows, examples, trained)
        return examples

    def _example(self, row: Row, source: Source, columns: Columns | None) -> Example | None:
        """The example in a good row; None for tokens without text."""
        if source in self.line.chosen.tokens:
            return None
        if columns is None:
            return Example(text=str(row.values.get("text", "")))
        example = example_of(row, columns)
        assert isinstance(example, Example), "the row was good when it was formatted"
        return example

    def _encode(
        self, split: SplitReport, rows: Sequence[tuple[Row, Any]], collector: ExampleCollector
    ) -> int:
        """Count the tokens of some examples, and keep the keys that preparing uses; returns how
        many of the tokens are trained on."""
        batch = self.line.encoder.encode([segments for _, segments in rows])
        keys = keys_of_batch(batch)
        if split.name == "train":
            for (row, segments), tokens in zip(rows, batch.lengths.tolist(), strict=True):
                self.picker.add(row, segments, tokens)
        cut = self.line.plan.data.overlong == "cut"
        trained = collector.add_tokens(batch, keys, self.room if cut else None)
        self.keys.append(keys)
        self.tokens[split.name] += int(batch.lengths.sum())
        self.tell(split.name, split.rows, self.tokens[split.name])
        return trained

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
            self.report.problems.append(
                f"{where}: {counted(bad_rows, 'bad row')}, and training.dataset.max_bad_rows "
                f"tolerates {allowed}  (fix the data, or --set "
                f"training.dataset.max_bad_rows={bad_rows})"
            )
        if not trained:
            self.report.problems.append(
                f"{where}: there is nothing to train on: {counted(examples, 'example')}, "
                "none of their tokens belongs to an answer  (check training.dataset.field_mapping "
                "and training.dataset.validation)"
            )

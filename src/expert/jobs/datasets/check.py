"""The job behind `expert dataset check`: rows read as preparing reads them; nothing is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from expert.data.examples.column_survey import ColumnSurvey
    from expert.data.examples.columns import Columns
    from expert.data.inspect.audit import DocumentCollector, Documents, SplitReport
    from expert.data.inspect.shown_rows import ShownRow
    from expert.data.read.sources import Source
    from expert.data.records import Row
    from expert.data.tokens.row_keys import RowKeys
    from expert.jobs.datasets.show import RowPicker, RowsToShow
    from expert.run.prepare import Builder

# Examples, or characters, that are tokenised together: what is in memory at a time.
_BATCH_EXAMPLES = 1024
_BATCH_CHARACTERS = 8_000_000
FIELDS_LOOKED_AT = 1000
"""Rows in which fields of messages are looked for that nothing is read from."""
TOO_FEW = (
    "train: {}, too few to hold any out: nothing will show whether the expert has learnt more than "
    "its rows by heart  (add rows, or name rows to judge it by in training.dataset.test_path)"
)


@dataclass
class DatasetReport:
    """Everything `expert dataset check` tells; `problems` are what preparing would refuse."""

    name: str
    template: str
    max_seq_length: int
    splits: list[SplitReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Which columns and files are read and which are not, and how."""
    doubts: list[str] = field(default_factory=list)
    """Warnings that are of no single split."""
    rows: list[ShownRow] = field(default_factory=list)
    """Some rows as the model sees them."""

    def warnings(self) -> list[str]:
        return [*self.doubts, *(line for split in self.splits for line in split.warnings())]

    def verdict(self) -> str:
        """In one line, where nothing stands in the way of preparing."""
        count = sum(not line.startswith(" ") for line in self.warnings())
        if not count:
            return "✓ nothing is wrong with the data"
        words = "1 warning: look at it" if count == 1 else f"{count} warnings: look at them"
        return f"✓ usable, {words} before training"


def check_dataset(
    manifest: str | Path,
    *,
    model: str | None = None,
    overrides: tuple[str, ...] = (),
    show: RowsToShow | None = None,
) -> DatasetReport:
    """Read every row as preparing would, and tell what is in it; nothing is written.

    `show`: which rows come back as the model sees them; none by default.
    """
    from expert.data.records import DataNotHere
    from expert.jobs.datasets.show import RowPicker, RowsToShow, TextOnly, rows_as_text
    from expert.manifest.reader import read_manifest
    from expert.run.plan import plan as plan_job
    from expert.run.prepare import Builder
    from expert.run.token_folders import named_sources

    read = read_manifest(manifest, overrides=overrides)
    plan = plan_job(read, model=model, look=False)
    named = named_sources(read)
    show = show or RowsToShow(count=0)
    picker = RowPicker(show)
    try:
        builder = Builder(plan, read, named, lambda name, rows, tokens: None)
    except DataNotHere as error:
        if plan.model.place != "hub":
            raise
        textual = TextOnly(plan, read, named, lambda name, rows, tokens: None)
        report = DatasetReport(read.manifest.name, "unknown", plan.data.max_seq_length)
        report.problems.append(str(error))
        report.rows = rows_as_text(textual, show)
        return report
    template = builder.template.name if builder.template else "characters"
    report = DatasetReport(read.manifest.name, template, plan.data.max_seq_length)
    report.notes += builder.chosen.notes()
    report.doubts += builder.doubts
    _Checker(builder, report, picker).check()
    return report


class _Checker:
    """Reads the splits of one manifest, one source after the other."""

    def __init__(self, builder: Builder, report: DatasetReport, picker: RowPicker) -> None:
        self.builder = builder
        self.report = report
        self.picker = picker
        data = builder.plan.data
        soft = sum(prompt["tokens"] for prompt in builder.plan.adapter.soft_prompts)
        whole = builder.template is None or data.packing == "concat"
        self.room = None if whole else data.max_seq_length - soft
        self.keys: list[RowKeys] = []
        """Of the examples of the split that is being read, batch by batch."""

    def check(self) -> None:
        import numpy as np

        from expert.core.text import counted
        from expert.data.feed.drawing import doubt_of_repeats, draw_documents
        from expert.data.inspect.audit import SplitReport, joined
        from expert.data.tokens.row_keys import RowKeys

        sources, tasks = self.builder.sources, self.builder.sources.tasks
        trains: list[Source | None] = [task.train for task in tasks]
        trains = trains or [sources.train]
        split, parts = self._read("train", trains)
        every = joined(parts)
        others = {
            name: [getattr(task, name) for task in tasks] or [getattr(sources, name)]
            for name in ("validation", "test")
        }
        spec = self.builder.spec
        keys = RowKeys.joined(self.keys) if self.keys else None
        chosen, held_out = draw_documents(
            [len(part) for part in parts],
            [task.weight for task in tasks] or [1.0],
            held_out_share=0.0 if any(others["validation"]) else spec.validation_split,
            seed=self.builder.plan.optim.seed,
            keys=keys,
        )
        if self.builder.holds_out_the_end(cast("Source", trains[0])):
            chosen, held_out = np.array([0], np.int32), np.array([1], np.int32)
        # A weight above 1 takes rows several times: that is no duplicate in the data.
        train = every.take(np.unique(chosen))
        self._sum_up(split, train)
        is_text = self.builder.template is None  # the end of one text may be held out
        if spec.validation_split and not len(held_out) and not any(map(any, others.values())):
            self.report.doubts += (
                [] if is_text else [TOO_FEW.format(counted(len(every), "example"))]
            )
        if len(held_out):
            drawn = SplitReport("validation", split_off=True)
            doubt = doubt_of_repeats(keys, chosen, held_out) if keys is not None else ""
            self.report.doubts += [doubt] if doubt else []
            self._sum_up(drawn, every.take(held_out), train)
        for name, given in others.items():
            if any(given):
                split, parts = self._read(name, given)
                self._sum_up(split, joined(parts), train)
        self.picker.refuse_missing()
        self.report.rows = self.picker.shown(self.builder, held_out.tolist())

    def _sum_up(
        self, split: SplitReport, documents: Documents, train: Documents | None = None
    ) -> None:
        from expert.core.text import counted
        from expert.data.inspect.audit import duplicates, leaks, length_summary

        plan = self.builder.plan
        lengths = split.lengths = length_summary(documents, self.room, plan.data.overlong)
        if lengths["left"] or not len(documents):
            split.not_learnt = self._too_long(split)
        elif documents.learnt.any():  # else it has been told why
            told = self._too_long(split) or (
                f"{split.name}: {counted(len(documents), 'example')}, each longer than "
                f"max_seq_length {plan.data.max_seq_length}, and overlong: drop leaves none  "
                "(training.config.overlong: cut, or a larger max_seq_length)"
            )
            self.report.problems.append(told)
        split.duplicates = duplicates(documents)
        split.leaks = leaks(train, documents) if train is not None else {}
        self.report.splits.append(split)

    def _too_long(self, split: SplitReport) -> str:
        from expert.run.left_out import too_long_to_learn

        found, plan = split.lengths, self.builder.plan
        return too_long_to_learn(
            plan, split.name, found["unlearnt"], found["examples"], found["longest"]
        )

    def _read(
        self, name: str, sources: Sequence[Source | None]
    ) -> tuple[SplitReport, list[Documents]]:
        from expert.data.inspect.audit import SplitReport

        split = SplitReport(name)
        return split, [self._read_source(split, source) for source in sources if source]

    def _read_source(self, split: SplitReport, source: Source) -> Documents:
        from expert.data.inspect.audit import DocumentCollector
        from expert.data.records import BadRow, Dropped

        self._note_separators(source)
        segments_of, _ = self.builder.formatter(source)
        example_in, response = self._understood(source)
        collector = DocumentCollector()
        waiting: list[Any] = []
        places: list[Row] = []
        characters = bad_rows = 0
        for row in self.builder.rows_of(source):
            split.rows += 1
            made = row if isinstance(row, BadRow) else segments_of(row)
            self.picker.look_at(split.name, row, made)
            if isinstance(row, BadRow) or isinstance(made, BadRow):
                bad_rows += 1
                split.note_bad(made, response)
            elif isinstance(made, Dropped):
                split.dropped[made.reason] = split.dropped.get(made.reason, 0) + 1
            else:
                example = example_in(row)
                collector.add(example, row.file, row.line)
                split.note_remnants(example, row.place)
                split.note_silent_calls(example, made, row.place)
                waiting.append(made)
                places.append(row)
                characters += sum(len(segment.text) for segment in made)
            if len(waiting) >= _BATCH_EXAMPLES or characters >= _BATCH_CHARACTERS:
                self._encode(split, places, waiting, collector)
                places, waiting, characters = [], [], 0
        if waiting:
            self._encode(split, places, waiting, collector)
        documents = collector.documents()
        self._judge(f"{split.name} {source.name}", bad_rows, documents)
        return documents

    def _encode(
        self,
        split: SplitReport,
        rows: Sequence[Row],
        examples: Sequence[Any],
        collector: DocumentCollector,
    ) -> None:
        """Count the tokens of some examples, and keep what preparing recognises them by."""
        from expert.data.tokens.row_keys import keys_of_batch

        batch = self.builder.encoder.encode(examples)
        if split.name == "train":
            self.picker.add(rows, examples, batch.lengths.tolist())
        cut = self.builder.plan.data.overlong == "cut"
        collector.add_tokens(batch, self.room if cut else None)
        self.keys.append(keys_of_batch(batch))

    def _note_separators(self, source: Source) -> None:
        from expert.data.read.rows import unusual_separator

        for file in source.files if source.kind == "files" else ():
            found = unusual_separator(file, source.format)
            if found:
                self.report.notes.append(f"{file.name}: {found} separate its columns")

    def _note_columns(self, source: Source, columns: Columns, seen: ColumnSurvey) -> None:
        """Which columns are read and which are not, and so of messages and of the files of a
        folder."""
        from expert.data.read.folders import unread_files
        from expert.planning.survey import local_path

        doubt = columns.worth_a_warning(seen)
        self.report.doubts += [f"{source.name}: {doubt}"] if doubt else []
        folder = local_path(source.name, self.builder.folder)
        notes = [f"{source.name}: {columns.told(seen)}"]
        fields = self._fields_not_used(source, columns)
        notes += [f"{source.name}: not used of messages: {', '.join(fields)}"] if fields else []
        if source.kind == "files" and folder.is_dir():
            unread = unread_files(folder, source.format)
            notes += [f"{source.name}: not read: {', '.join(unread)}"] if unread else []
        self.report.notes += [each for each in notes if each not in self.report.notes]

    def _fields_not_used(self, source: Source, columns: Columns) -> list[str]:
        """Fields of messages that nothing is read from, in the first rows."""
        from expert.data.examples.messages import unused_fields
        from expert.data.records import Row

        if not columns.messages:
            return []
        rows = islice(self.builder.rows_of(source), FIELDS_LOOKED_AT)
        messages = (row.values.get(columns.messages) for row in rows if isinstance(row, Row))
        return list(dict.fromkeys(name for each in messages for name in unused_fields(each)))

    def _judge(self, where: str, bad_rows: int, documents: Documents) -> None:
        from expert.core.text import counted

        allowed = self.builder.spec.max_bad_rows
        if bad_rows > allowed:
            self.report.problems.append(
                f"{where}: {counted(bad_rows, 'bad row')}, and training.dataset.max_bad_rows "
                f"tolerates {allowed}  (mend the data, or --set "
                f"training.dataset.max_bad_rows={bad_rows})"
            )
        if not documents.learnt.any():
            self.report.problems.append(
                f"{where}: there is nothing to learn: {counted(len(documents), 'example')}, "
                "no token of them is an answer  (check training.dataset.field_mapping and "
                "training.dataset.validation)"
            )

    def _understood(self, source: Source) -> tuple[Any, str]:
        """How the example in a good row is found, and the column with the answers."""
        from expert.data.examples.formats import example_of
        from expert.data.records import Example
        from expert.data.tokens.tokenised import digest_of

        tokens = self.builder.chosen.tokens.get(source)
        if tokens is not None:
            return lambda row: Example(text=digest_of(tokens.segments_of(row))), ""
        if self.builder.template is None:
            return lambda row: Example(text=str(row.values.get("text", ""))), ""
        columns, seen = self.builder.columns_in(source)
        self._note_columns(source, columns, seen)
        return lambda row: example_of(row, columns), columns.response

"""Rows understood for tests: the example in them, its turns, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from expert.data.examples.column_survey import ColumnSurvey, survey_rows
from expert.data.examples.columns import Columns, detect_columns
from expert.data.examples.formats import example_of
from expert.data.records import BadRow, Dropped, Example, Row
from expert.manifest.schema.dataset import DatasetSpec


def understand(names: list[str], values: Mapping[str, Any], **asked: Any) -> Columns:
    """The columns of rows that have these names and are filled like this one."""
    rows = surveyed([{**dict.fromkeys(names), **values}])
    return detect_columns(rows, DatasetSpec(**asked))


def surveyed(rows: list[dict[str, Any]]) -> ColumnSurvey:
    return survey_rows(Row(values, "", number) for number, values in enumerate(rows, 1))


def understood(values: dict[str, Any], **asked: Any) -> Example | BadRow | Dropped:
    columns = understand(list(values), values, **asked)
    return example_of(Row(values, "rows.jsonl", 7), columns)


def example_in(values: dict[str, Any], **asked: Any) -> Example:
    example = understood(values, **asked)
    assert isinstance(example, Example), example
    return example


def turns_of(values: dict[str, Any], **asked: Any) -> list[tuple[str, str]]:
    example = example_in(values, **asked)
    assert example.text == ""
    return [(turn.role, turn.text) for turn in example.turns]


def reason_of(values: dict[str, Any], columns: Columns | None = None) -> str:
    if columns is None:
        columns = understand(list(values), values)
    bad = example_of(Row(values, "rows.jsonl", 7), columns)
    assert isinstance(bad, BadRow), bad
    assert (bad.file, bad.line) == ("rows.jsonl", 7)
    assert bad.raw[:500] == bad.raw != ""
    return bad.reason


INSTRUCTION = Columns("instruction", instruction="instruction", input="input", response="output")
TEXT = Columns("text", text="text")
MESSAGES = Columns("messages", messages="messages")
TASKS = Columns("multi_task", input="input", response="output")

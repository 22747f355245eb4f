"""Which columns the rows of a source fill, how many rows fill each, and with which kind of value.

Every row counts: a column that the first row lacks, or fills with another kind of value than later
rows do, is seen all the same. Of a stream the first window is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Self

from expert.data.examples.messages import decoded_messages, is_message, is_messages, is_text_part
from expert.data.records import BadRow, Row

TEXT, NUMBER, TRUTH = "text", "number", "truth"
PART, MESSAGE, MESSAGES, CONVERSATION = "part", "message", "messages", "conversation"
MEDIA, LIST, OBJECT = "media", "list", "object"
READABLE = frozenset({TEXT, NUMBER, TRUTH, PART, MESSAGE, MESSAGES})
"""Kinds of values that hold what somebody says."""
_MEDIA_FIELDS = ({"bytes", "path"}, {"array", "sampling_rate"})


def shape_of(value: Any) -> str:
    """The kind of a value that decides how it is read; "" for an empty one."""
    if isinstance(value, str):
        if len(value) <= 5 and value.lower() in ("true", "false"):
            return TRUTH
        return value and (MESSAGES if decoded_messages(value) is not None else TEXT)
    if isinstance(value, bool):
        return TRUTH
    if isinstance(value, int | float):
        return NUMBER
    if value is None or (isinstance(value, Mapping | list | tuple) and not value):
        return ""
    if isinstance(value, Mapping):
        return _shape_of_object(value)
    if not isinstance(value, list | tuple):
        return OBJECT
    if is_messages(value):
        return MESSAGES
    if all(map(is_text_part, value)):
        return PART
    shapes = {shape_of(part) for part in value if isinstance(part, Mapping)}
    return MEDIA if MEDIA in shapes else LIST


def _shape_of_object(value: Mapping[str, Any]) -> str:
    if is_message(value):
        return MESSAGE
    if is_text_part(value):
        return PART
    if is_messages(value.get("messages")):
        return CONVERSATION
    return MEDIA if any(fields <= value.keys() for fields in _MEDIA_FIELDS) else OBJECT


@dataclass(frozen=True)
class ColumnSurvey:
    """What was seen of the columns."""

    shapes: dict[str, dict[str, int]] = field(default_factory=dict)
    """For each column, in the order of its first appearance: how many rows fill it with what."""
    rows: int = 0
    whole: bool = True
    """False where more rows follow that were not looked at."""
    file: str = ""
    """The file of the first row, for messages."""

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], *, whole: bool = True) -> Self:
        """Of rows that are in memory."""
        shapes: dict[str, dict[str, int]] = {}
        count = 0
        for values in rows:
            count += 1
            for name, value in values.items():
                counts = shapes.get(name)
                if counts is None:
                    counts = shapes[name] = {}
                if shape := shape_of(value):
                    counts[shape] = counts.get(shape, 0) + 1
        return cls(shapes, count, whole)

    @property
    def names(self) -> list[str]:
        return list(self.shapes)

    def filled(self, name: str) -> int:
        """Rows that have a value in a column."""
        return sum(self.shapes.get(name, {}).values())

    def holds(self, name: str, *shapes: str) -> bool:
        """Whether a row fills the column with one of these kinds."""
        return any(shape in self.shapes.get(name, {}) for shape in shapes)

    def holds_only(self, name: str, *shapes: str) -> bool:
        """Whether rows fill the column, and with nothing else."""
        found = self.shapes.get(name, {})
        return bool(found) and found.keys() <= set(shapes)

    def readable(self, name: str) -> bool:
        """Whether a row has something said in the column; an empty column may get it later."""
        found = self.shapes.get(name)
        return not found or not READABLE.isdisjoint(found)

    def surprise(self, values: Mapping[str, Any]) -> str:
        """A column that a row fills and no row that was looked at did; "" where there is none."""
        new = (n for n, value in values.items() if not self.shapes.get(n) and shape_of(value))
        return next(new, "")


def survey_rows(rows: Iterable[Row | BadRow], most: int | None = None) -> ColumnSurvey:
    """The survey of rows as they are read, of at most so many of them."""
    left = iter(rows)
    file = ""

    def good() -> Iterator[Mapping[str, Any]]:
        nonlocal file
        for row in islice(left, most):
            if isinstance(row, Row):
                file = file or row.file
                yield row.values

    survey = ColumnSurvey.of(good())
    whole = most is None or next(left, None) is None
    return ColumnSurvey(survey.shapes, survey.rows, whole, file)

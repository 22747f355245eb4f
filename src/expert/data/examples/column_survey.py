"""Which columns the rows of a source have, how many rows fill each, and with what type of value.

All rows are read, since later rows may have other columns or types than the first. Of a stream,
only the first window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from expert.data.examples.messages import decoded_messages, is_message, is_messages, is_text_part
from expert.data.records import BadRow, Row

TEXT, NUMBER, BOOLEAN = "text", "number", "truth"
PART, MESSAGE, MESSAGES, CONVERSATION = "part", "message", "messages", "conversation"
MEDIA, LIST, OBJECT = "media", "list", "object"
READABLE = frozenset({TEXT, NUMBER, BOOLEAN, PART, MESSAGE, MESSAGES})
"""Types of values that may hold text of a request or an answer."""
_MEDIA_FIELDS = ({"bytes", "path"}, {"array", "sampling_rate"})


def shape_of(value: Any) -> str:
    """The type of a value, which decides how it is read; "" if empty."""
    if isinstance(value, str):
        if len(value) <= 5 and value.lower() in ("true", "false"):
            return BOOLEAN
        if value in ("0", "1"):  # in CSV, every value is text
            return NUMBER
        return value and (MESSAGES if decoded_messages(value) is not None else TEXT)
    if isinstance(value, bool):
        return BOOLEAN
    if isinstance(value, int | float):
        return NUMBER
    if value is None or (isinstance(value, Mapping | list | tuple) and not value):
        return ""
    if isinstance(value, Mapping):
        if is_message(value):
            return MESSAGE
        if is_text_part(value):
            return PART
        if is_messages(value.get("messages")):
            return CONVERSATION
        return MEDIA if any(fields <= value.keys() for fields in _MEDIA_FIELDS) else OBJECT
    if not isinstance(value, list | tuple):
        return OBJECT
    if is_messages(value):
        return MESSAGES
    if all(map(is_text_part, value)):
        return PART
    shapes = {shape_of(part) for part in value if isinstance(part, Mapping)}
    return MEDIA if MEDIA in shapes else LIST


@dataclass(frozen=True)
class ColumnSurvey:
    shapes: dict[str, dict[str, int]] = field(default_factory=dict)
    """For each column, in order of first appearance: rows by type of value."""
    rows: int = 0
    whole: bool = True
    """False if there are more rows that were not read."""
    file: str = ""
    """The file of the first row, for messages."""

    @property
    def names(self) -> list[str]:
        return list(self.shapes)

    def filled(self, name: str) -> int:
        """Rows that have a value in a column."""
        return sum(self.shapes.get(name, {}).values())

    def holds(self, name: str, *shapes: str) -> bool:
        """Whether any row has one of these types in the column."""
        return any(shape in self.shapes.get(name, {}) for shape in shapes)

    def holds_only(self, name: str, *shapes: str) -> bool:
        """Whether the column is filled, and only with these types."""
        counts = self.shapes.get(name, {})
        return bool(counts) and counts.keys() <= set(shapes)

    def readable(self, name: str) -> bool:
        """Whether some row has text in the column; an empty column counts, as text may come
        later."""
        counts = self.shapes.get(name)
        return not counts or not READABLE.isdisjoint(counts)

    def late_column(self, values: Mapping[str, Any]) -> str:
        """A column that this row fills and no surveyed row did; "" if there is none."""
        new = (n for n, value in values.items() if not self.shapes.get(n) and shape_of(value))
        return next(new, "")


def survey_rows(rows: Iterable[Row | BadRow], most: int | None = None) -> ColumnSurvey:
    """Survey rows while reading them, at most `most`."""
    shapes: dict[str, dict[str, int]] = {}
    count, file, left = 0, "", iter(rows)
    for row in islice(left, most):
        if isinstance(row, BadRow):
            continue
        count, file = count + 1, file or row.file
        for name, value in row.values.items():
            counts = shapes.get(name)
            if counts is None:
                counts = shapes[name] = {}
            if shape := shape_of(value):
                counts[shape] = counts.get(shape, 0) + 1
    whole = most is None or next(left, None) is None
    return ColumnSurvey(shapes, count, whole, file)

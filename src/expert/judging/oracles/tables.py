"""Compares two query results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from expert.judging.answers import short

DIGITS = 9
"""Significant digits that are compared: sums in a different order differ in about the 15th."""
HIDDEN = frozenset({"_ID", "_SRC", "_DST", "_id", "_src", "_dst"})
"""Internal ids of a graph database."""

Table = Sequence[Sequence[Any]]


def difference(expected: Table, found: Table, *, ordered: bool) -> str | None:
    """How two results differ, in words; None if they are the same.

    Column names do not matter, column order does. Row order matters if `ordered`.
    """
    if len(expected) != len(found):
        return f"{len(found)} rows instead of {len(expected)}"
    widths = {len(row) for row in expected}, {len(row) for row in found}
    if widths[0] != widths[1]:
        return f"{min(widths[1], default=0)} columns instead of {min(widths[0], default=0)}"
    ours, theirs = [_row(row) for row in expected], [_row(row) for row in found]
    if ours == theirs:
        return None
    more = Counter(theirs) - Counter(ours)
    if more:
        place = theirs.index(next(iter(more)))
        row = ", ".join(str(value) for value in found[place])
        return f"it returns an unexpected row {short(f'({row})', 80)}"
    return "the same rows in another order" if ordered else None


def _row(row: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(_key(value) for value in row)


def _key(value: Any) -> tuple[str, Any]:
    """A value as something comparable and hashable; the kind distinguishes '1' from 1."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, int):
        return ("number", value if abs(value) < 10**DIGITS else f"{value}")
    if isinstance(value, float | Decimal):
        if value == value and abs(value) < 10**DIGITS and value == int(value):
            return ("number", int(value))
        return ("number", f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        kept = [(str(name), _key(part)) for name, part in value.items() if name not in HIDDEN]
        # A node matched from several tables has the columns of all of them, None where not its own.
        return ("object", tuple(sorted(part for part in kept if part[1][1] is not None)))
    if isinstance(value, list | tuple):
        return ("list", tuple(_key(part) for part in value))
    return (type(value).__name__, value)

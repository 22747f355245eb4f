"""Synthetic rows for tables that a case leaves empty: data sets often have CREATE TABLE statements
without any rows.

Rows are made around the values in the expected query: some meet all of its conditions, some miss
one of them, some are unrelated. Equivalent queries return the same on any rows the tables could
hold; others are told apart if these rows differ in what they ask for. So the rows look like usual
table contents: keys are unique, dates are dates, no value is NULL (COUNT(*) and COUNT(column) are
the same here, as they are in most tables).
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from expert.judging.oracles.oracle import import_optional
from expert.judging.oracles.sqlite_sandbox import Column

MEETING = 4
"""Rows that meet every condition."""
MISSING_ONE = 3
"""Rows that miss one condition, for each condition."""
MIXED = 16
KEYS = MEETING + MIXED
"""The least number of rows of any table, so that every reference finds a row."""
NEARBY_RANGE = 60
"""Range around a value in which others are drawn: wide enough that sorting has few ties."""
TRIES = 20
"""Draws before a duplicate value is accepted."""
NUMBERS = ("INT", "REAL", "NUM", "DEC", "FLOAT", "DOUBLE")

Rows = dict[str, list[tuple[Any, ...]]]
ValueGenerator = Callable[[random.Random], Any]


class _NearbyInt(int):
    """An integer that was drawn near another one."""

    of: int


@dataclass
class _ColumnConditions:
    """What the conditions of a query say about a column."""

    meets: list[ValueGenerator] = field(default_factory=list)
    misses: list[ValueGenerator] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    """Values in the conditions."""


@dataclass(frozen=True)
class _QueryColumns:
    """What a query says about columns, whichever table they belong to."""

    clues: Mapping[str, _ColumnConditions]
    joined: set[str]
    """Columns that are compared with other columns, as in joins."""
    aggregated: set[str]
    """Columns that are aggregated or sorted: they get numbers, whatever their type."""


def rows_for_query(query: Any, tables: Mapping[str, Sequence[Column]], *, seed: int = 0) -> Rows:
    """Rows for every table; deterministic."""
    exp = import_optional("sqlglot").exp
    kinds = (exp.Sum, exp.Avg, exp.Min, exp.Max, exp.Ordered)
    found = (column for node in query.find_all(*kinds) for column in node.find_all(exp.Column))
    about = _QueryColumns(
        _conditions(query), _joined_columns(query), {column.name.lower() for column in found}
    )
    draw = random.Random(f"{seed} {query.sql()}")
    return {name: _rows(name, columns, about, draw) for name, columns in tables.items()}


def _rows(
    table: str, columns: Sequence[Column], about: _QueryColumns, draw: random.Random
) -> list[tuple[Any, ...]]:
    names = [column.name.lower() for column in columns]
    clues = {name: about.clues[name] for name in names if name in about.clues}
    ways: list[tuple[str | None, bool]] = [(None, False)] * MEETING
    ways += [(name, False) for name in clues for _ in range(MISSING_ONE)]
    ways += [(None, True)] * MIXED
    draw.shuffle(ways)
    keys = _keys(table, columns, about)
    used: dict[str, set[Any]] = {name: set() for name in about.aggregated}
    made = []
    for number, (missed, mixed) in enumerate(ways, 1):
        row = []
        for column, name in zip(columns, names, strict=True):
            anything: ValueGenerator = partial(_unrelated_value, column, about)
            clue, makes = clues.get(name), [anything]
            if clue is not None:
                makes = clue.misses if name == missed else clue.meets
                makes = [*clue.meets, *clue.misses, anything] if mixed else makes
            row.append(number if name in keys else _draw_value(makes, column, used.get(name), draw))
        made.append(tuple(row))
    return made


def _draw_value(
    makes: Sequence[ValueGenerator], column: Column, used: set[Any] | None, draw: random.Random
) -> Any:
    """A value; for sorted columns one that no row has yet, if possible."""
    for _ in range(TRIES):
        value = _fitting(draw.choice(makes)(draw), column)
        if used is None or value not in used:
            break
    if used is not None:
        used.add(value)
    return value


def _fitting(value: Any, column: Column) -> Any:
    """The value; a text column gets a number near another one with as many digits, to sort
    alike."""
    if not isinstance(value, _NearbyInt) or any(word in column.kind.upper() for word in NUMBERS):
        return int(value) if isinstance(value, _NearbyInt) else value
    if value.of <= 0:
        return int(value)
    digits = len(str(value.of))
    if value > value.of:
        return min(10**digits - 1, int(value)) if value.of < 10**digits - 1 else 10 * value.of + 1
    return max(10 ** (digits - 1), int(value)) if value.of > 10 ** (digits - 1) else value.of // 10


def _keys(table: str, columns: Sequence[Column], about: _QueryColumns) -> set[str]:
    """Columns that number the rows of their table: declared keys, or named like one and joined
    on."""
    own = table.lower().rstrip("s")
    found = set()
    for column in columns:
        name = column.name.lower()
        named = name == "id" or name in (f"{own}_id", f"{own}id", f"{table.lower()}_id")
        if name not in about.clues and (column.is_key or named):
            found.add(name)
    # A composite key is unique by one of its columns; the others refer to other tables.
    return found if len(found) == 1 else found & ({"id"} | found - about.joined)


def _unrelated_value(column: Column, about: _QueryColumns, draw: random.Random) -> Any:
    """A value that names its column, as far as its type and use allow."""
    name, kind = column.name.lower(), column.kind.upper()
    clue = about.clues.get(name)
    if name in about.joined:
        return draw.randint(1, KEYS)
    if "BOOL" in kind or (clue is not None and all(value in (0, 1) for value in clue.values)):
        return draw.randint(0, 1)
    if clue is not None and all(isinstance(value, int) for value in clue.values):
        # As many digits as the value it is compared with, so that both sort alike as text.
        digits = max(len(str(abs(value))) for value in clue.values)
        return draw.randint(10 ** (digits - 1), 10**digits - 1)
    if "DATE" in kind or "TIMESTAMP" in kind:
        day = datetime.date(2000, 1, 1) + datetime.timedelta(days=draw.randint(0, 9000))
        return f"{day} 10:00:00" if "TIME" in kind else f"{day}"
    if name in about.aggregated or any(word in kind for word in NUMBERS):
        return draw.randint(100, 999)
    return f"{column.name} {draw.randint(10, 99)}"


def _joined_columns(query: Any) -> set[str]:
    exp = import_optional("sqlglot").exp
    found: set[str] = set()
    for node in query.find_all(exp.EQ):
        if isinstance(node.this, exp.Column) and isinstance(node.expression, exp.Column):
            found |= {node.this.name.lower(), node.expression.name.lower()}
    return found


# --- conditions -----------------------------------------------------------------------------------


def _conditions(query: Any) -> dict[str, _ColumnConditions]:
    """By column: what meets its conditions, and what does not."""
    exp = import_optional("sqlglot").exp
    turned = {exp.GT: exp.LT, exp.LT: exp.GT, exp.GTE: exp.LTE, exp.LTE: exp.GTE}
    kinds = (exp.EQ, exp.NEQ, *turned, exp.Like, exp.In, exp.Between)
    found: dict[str, _ColumnConditions] = {}
    for node in query.find_all(*kinds):
        kind, column = type(node), _column(node.this, exp)
        if column is None and node.expression is not None:  # 9 < age
            kind, column = turned.get(kind, kind), _column(node.expression, exp)
        if column is None:
            continue
        clue = found.setdefault(column.name.lower(), _ColumnConditions())
        for value in _literals(node, exp):
            clue.values.append(value)
            meets, misses = _generators(kind.__name__, value)
            clue.meets += meets
            clue.misses += misses
    return {name: clue for name, clue in found.items() if clue.meets and clue.misses}


def _column(side: Any, exp: Any) -> Any | None:
    """The column that is compared directly; a function of it is not its value."""
    while isinstance(side, exp.Lower | exp.Upper | exp.Paren | exp.Trim):
        side = side.this
    return side if isinstance(side, exp.Column) else None


def _generators(kind: str, value: Any) -> tuple[list[ValueGenerator], list[ValueGenerator]]:
    """Generators of values that meet a comparison with this one, and of values that do not."""

    def same(draw: random.Random) -> Any:
        return value

    def other(draw: random.Random) -> Any:
        return _other(value, draw)

    def like(draw: random.Random) -> Any:
        return _like(value)

    def moved(first: int, last: int) -> ValueGenerator:
        return lambda draw: _moved(value, draw.randint(first, last))

    more, less, next_to, before = (
        moved(1, NEARBY_RANGE),
        moved(-NEARBY_RANGE, -1),
        moved(1, 1),
        moved(-1, -1),
    )
    ways: dict[str, tuple[list[ValueGenerator], list[ValueGenerator]]] = {
        "EQ": ([same], [other]),
        "NEQ": ([other], [same]),
        "GT": ([more, next_to], [same, less]),
        "GTE": ([same, more], [before, less]),
        "LT": ([less, before], [same, more]),
        "LTE": ([same, less], [next_to, more]),
        "Like": ([like], [other]),
    }
    return ways.get(kind, ([same], [other]))


def _literals(node: Any, exp: Any) -> list[Any]:
    """The values in a comparison, without those of a subquery."""
    inner = {id(one) for query in node.find_all(exp.Select) for one in query.find_all(exp.Literal)}
    found: list[Any] = []
    for literal in node.find_all(exp.Literal):
        if id(literal) in inner:
            continue
        text = str(literal.this)
        if literal.is_string:
            found.append(text)
            continue
        value = float(text) if any(sign in text.lower() for sign in ".e") else int(text)
        found.append(-value if isinstance(literal.parent, exp.Neg) else value)
    return found


def _moved(value: Any, by: int) -> Any:
    """A value this far above or below; for text, one that sorts there."""
    if isinstance(value, int):
        near = _NearbyInt(value + by)
        near.of = value
        return near
    if not isinstance(value, str):
        return value + by
    try:
        return str(datetime.date.fromisoformat(value) + datetime.timedelta(days=by))
    except (ValueError, OverflowError):
        return f"{value}{'z' * by}" if by > 0 else value[: max(0, len(value) + by)]


def _other(value: Any, draw: random.Random) -> Any:
    if value in (0, 1):
        return 1 - value
    if not isinstance(value, str):
        return _moved(value, draw.randint(1, NEARBY_RANGE))
    moved = _moved(value, draw.randint(1, NEARBY_RANGE))
    return moved if len(moved) == len(value) else f"not {value}"


def _like(value: Any) -> Any:
    return value.replace("%", "").replace("_", "x") if isinstance(value, str) else value

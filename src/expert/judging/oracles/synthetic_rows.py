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
from collections.abc import Mapping, Sequence
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
NUMBERS = ("INT", "REAL", "NUM", "DEC", "FLOAT", "DOUBLE")
_WAYS = {
    "EQ": (("same",), ("other",)),
    "NEQ": (("other",), ("same",)),
    "GT": (("more", "next"), ("same", "less")),
    "GTE": (("same", "more"), ("before", "less")),
    "LT": (("less", "before"), ("same", "more")),
    "LTE": (("same", "less"), ("next", "more")),
    "Like": (("like",), ("other",)),
}
"""For each comparison: how values that meet it are made from its literal, and values that miss."""

Rows = dict[str, list[tuple[Any, ...]]]
Way = tuple[str, Any]
"""How a value is made, and from which literal; ("unrelated", None): from its column alone."""


def rows_for_query(query: Any, tables: Mapping[str, Sequence[Column]], *, seed: int = 0) -> Rows:
    """Rows for every table; deterministic."""
    draw = random.Random(f"{seed} {query.sql()}")
    maker = _RowMaker(query, draw)
    return {name: maker.rows(name, columns) for name, columns in tables.items()}


class _RowMaker:
    """What a query says about columns, whichever table they belong to, and rows that fit it."""

    def __init__(self, query: Any, draw: random.Random) -> None:
        exp = import_optional("sqlglot").exp
        self._draw = draw
        pairs = [(node.this, node.expression) for node in query.find_all(exp.EQ)]
        joins = [pair for pair in pairs if all(isinstance(side, exp.Column) for side in pair)]
        self._joined = {side.name.lower() for pair in joins for side in pair}
        """Columns that are compared with other columns, as in joins."""
        kinds = (exp.Sum, exp.Avg, exp.Min, exp.Max, exp.Ordered)
        found = (column for node in query.find_all(*kinds) for column in node.find_all(exp.Column))
        self._aggregated = {column.name.lower() for column in found}
        """Columns that are aggregated or sorted: they get numbers, whatever their type."""
        self._meets: dict[str, list[Way]] = {}
        self._misses: dict[str, list[Way]] = {}
        turned = {exp.GT: exp.LT, exp.LT: exp.GT, exp.GTE: exp.LTE, exp.LTE: exp.GTE}
        for node in query.find_all(exp.EQ, exp.NEQ, *turned, exp.Like, exp.In, exp.Between):
            kind, column = type(node), _column(node.this, exp)
            if column is None and node.expression is not None:  # 9 < age
                kind, column = turned.get(kind, kind), _column(node.expression, exp)
            if column is None:
                continue
            meets, misses = _WAYS.get(kind.__name__, _WAYS["EQ"])
            name = column.name.lower()
            for value in _literals(node, exp):
                self._meets.setdefault(name, []).extend((way, value) for way in meets)
                self._misses.setdefault(name, []).extend((way, value) for way in misses)

    def rows(self, table: str, columns: Sequence[Column]) -> list[tuple[Any, ...]]:
        """Rows of one table. A row misses the condition of one column, or of none, or is mixed."""
        conditions = [c.name.lower() for c in columns if c.name.lower() in self._meets]
        plans: list[tuple[str | None, bool]] = [(None, False)] * MEETING
        plans += [(name, False) for name in conditions for _ in range(MISSING_ONE)]
        plans += [(None, True)] * MIXED
        self._draw.shuffle(plans)
        keys = self._keys(table, columns)
        made = []
        for number, (missed, mixed) in enumerate(plans, 1):
            row = []
            for column in columns:
                name = column.name.lower()
                ways: list[Way] = [("unrelated", None)]
                if name in self._meets:
                    own = self._misses[name] if name == missed else self._meets[name]
                    ways = [*self._meets[name], *self._misses[name], *ways] if mixed else own
                is_key = name in keys
                row.append(number if is_key else self._value(self._draw.choice(ways), column))
            made.append(tuple(row))
        return made

    def _keys(self, table: str, columns: Sequence[Column]) -> set[str]:
        """Columns that number the rows of their table: declared keys, or named like one."""
        own = table.lower().rstrip("s")
        usual = ("id", f"{own}_id", f"{own}id", f"{table.lower()}_id")
        names = {c.name.lower() for c in columns if c.is_key or c.name.lower() in usual}
        found = names - self._meets.keys()
        # A composite key is unique by one of its columns; the others refer to other tables.
        return found if len(found) == 1 else found & ({"id"} | found - self._joined)

    def _value(self, way: Way, column: Column) -> Any:
        how, value = way
        if how == "unrelated":
            # A value that names its column, as far as its type and use allow.
            name, kind, draw = column.name.lower(), column.kind.upper(), self._draw
            values = [value for _, value in self._meets.get(name, ())]
            if name in self._joined:
                return draw.randint(1, KEYS)
            if "BOOL" in kind or (values and all(value in (0, 1) for value in values)):
                return draw.randint(0, 1)
            if "DATE" in kind or "TIMESTAMP" in kind:
                day = datetime.date(2000, 1, 1) + datetime.timedelta(days=draw.randint(0, 9000))
                return f"{day} 10:00:00" if "TIME" in kind else f"{day}"
            if values and all(isinstance(value, int) for value in values):
                # As many digits as the value it is compared with, so that both sort alike as text.
                digits = max(len(str(abs(value))) for value in values)
                return draw.randint(10 ** (digits - 1), 10**digits - 1)
            if name in self._aggregated or any(word in kind for word in NUMBERS):
                return draw.randint(100, 999)
            return f"{column.name} {draw.randint(10, 99)}"
        if how == "same":
            return value
        if how == "like":
            return str(value).replace("%", "").replace("_", "x")
        if how == "other" and value in (0, 1):
            return 1 - value
        far = self._draw.randint(1, NEARBY_RANGE)
        by = {"next": 1, "before": -1, "less": -far}.get(how, far)
        if not isinstance(value, str):
            return value + by
        try:
            return str(datetime.date.fromisoformat(value) + datetime.timedelta(days=by))
        except (ValueError, OverflowError):  # a text that sorts above or below
            longer = f"{value}{'z' * by}" if by > 0 else value[: max(0, len(value) + by)]
            return f"not {value}" if how == "other" else longer


def _column(side: Any, exp: Any) -> Any | None:
    """The column that is compared directly; a function of it is not its value."""
    while isinstance(side, exp.Lower | exp.Upper | exp.Paren | exp.Trim):
        side = side.this
    return side if isinstance(side, exp.Column) else None


def _literals(node: Any, exp: Any) -> list[Any]:
    """The values in a comparison, without those of a subquery."""
    inner = {id(one) for query in node.find_all(exp.Select) for one in query.find_all(exp.Literal)}
    found: list[Any] = []
    for literal in node.find_all(exp.Literal):
        if id(literal) in inner:
            continue
        value: Any = str(literal.this)
        if not literal.is_string:
            value = float(value) if any(sign in value.lower() for sign in ".e") else int(value)
            value = -value if isinstance(literal.parent, exp.Neg) else value
        found.append(value)
    return found

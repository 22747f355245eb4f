"""Rows for tables that a case leaves empty: data sets often give the statements that make tables,
and nothing to put into them.

They are made around the values of the expected query: some rows meet all of its conditions, some
miss one of them, some are like nothing in it. Two queries that mean the same return the same on any
rows; two that do not are told apart where these rows differ in what they ask for. No value is NULL,
so that COUNT(*) and COUNT(column) are the same here, as they are in most tables.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from expert.judging.oracle import needed

MEETING = 4
"""Rows that meet every condition."""
MISSING_ONE = 3
"""Rows that miss one condition, for each of them."""
MIXED = 16
LINKED = 5
"""Different values of columns that are compared with each other: few, so that rows meet."""

NUMBERS = ("INT", "REAL", "NUM", "DEC", "FLOAT", "DOUBLE")

Columns = Mapping[str, Sequence[tuple[str, str]]]
"""Names and declared types of the columns of each table."""
Rows = dict[str, list[tuple[Any, ...]]]


@dataclass
class _Clue:
    """What the conditions of a query say about a column."""

    meets: list[Any] = field(default_factory=list)
    misses: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class _Maker:
    """Makes values for the columns that a query is about, and for others."""

    clues: Mapping[str, _Clue]
    linked: set[str]
    """Columns that are compared with other columns, as joins do."""
    reckoned: set[str]
    """Columns that are added up or put in order: of whatever type, they get numbers."""
    draw: random.Random

    def anything(self, name: str, kind: str) -> Any:
        """A value that says which column it is of, unless it has to meet one of another."""
        if name.lower() in self.linked:
            return self.draw.randint(1, LINKED)
        if name.lower() in self.reckoned or any(word in kind.upper() for word in NUMBERS):
            return self.draw.randint(1, 999)
        return f"{name} {self.draw.randint(1, 99)}"


def rows_around(query: Any, tables: Columns, *, seed: int = 0) -> Rows:
    """Rows for every table, the same ones whenever they are asked for."""
    exp = needed("sqlglot").exp
    kinds = (exp.Sum, exp.Avg, exp.Min, exp.Max, exp.Ordered)
    reckoned = {
        c.name.lower() for node in query.find_all(*kinds) for c in node.find_all(exp.Column)
    }
    draw = random.Random(f"{seed} {query.sql()}")
    maker = _Maker(_clues(query), _linked(query), reckoned, draw)
    return {name: _rows(columns, maker) for name, columns in tables.items()}


def _rows(columns: Sequence[tuple[str, str]], maker: _Maker) -> list[tuple[Any, ...]]:
    clues, draw = maker.clues, maker.draw
    known = [name.lower() for name, _ in columns if name.lower() in clues]

    def row(missed: str | None, *, mixed: bool = False) -> tuple[Any, ...]:
        values = []
        for name, kind in columns:
            clue = clues.get(name.lower())
            if clue is None:
                values.append(maker.anything(name, kind))
            elif mixed:
                other = maker.anything(name, kind)
                values.append(draw.choice([*clue.meets, *clue.misses, other]))
            else:
                values.append(draw.choice(clue.misses if name.lower() == missed else clue.meets))
        return tuple(values)

    made = [row(None) for _ in range(MEETING)]
    made += [row(name) for name in known for _ in range(MISSING_ONE)]
    made += [row(None, mixed=True) for _ in range(MIXED)]
    draw.shuffle(made)
    return made


def _linked(query: Any) -> set[str]:
    exp = needed("sqlglot").exp
    found: set[str] = set()
    for node in query.find_all(exp.EQ):
        if isinstance(node.this, exp.Column) and isinstance(node.expression, exp.Column):
            found |= {node.this.name.lower(), node.expression.name.lower()}
    return found


def _clues(query: Any) -> dict[str, _Clue]:
    """By column, whatever table it is of: what meets the conditions on it, and what does not."""
    exp = needed("sqlglot").exp
    rules: dict[Any, Any] = {
        exp.EQ: lambda v: ([v], [_other(v)]),
        exp.NEQ: lambda v: ([_other(v)], [v]),
        exp.GT: lambda v: ([_more(v)], [v, _less(v)]),
        exp.GTE: lambda v: ([v, _more(v)], [_less(v)]),
        exp.LT: lambda v: ([_less(v)], [v, _more(v)]),
        exp.LTE: lambda v: ([v, _less(v)], [_more(v)]),
        exp.Like: lambda v: ([_like(v)], [_other(v)]),
        exp.In: lambda v: ([v], [_other(v)]),
        exp.Between: lambda v: ([v], [_other(v)]),
    }
    turned = {exp.GT: exp.LT, exp.LT: exp.GT, exp.GTE: exp.LTE, exp.LTE: exp.GTE}
    found: dict[str, _Clue] = {}
    for node in query.find_all(*rules):
        column = node.this.find(exp.Column)
        kind, values = type(node), _literals(node, exp)
        if column is None and node.expression is not None:  # 9 < age
            column, kind = node.expression.find(exp.Column), turned.get(kind, kind)
        if column is None:
            continue
        clue = found.setdefault(column.name.lower(), _Clue())
        for value in values:
            meets, misses = rules[kind](value)
            clue.meets += meets
            clue.misses += misses
    return {name: clue for name, clue in found.items() if clue.meets and clue.misses}


def _literals(node: Any, exp: Any) -> list[Any]:
    """The values that a comparison names; those of a query inside it are its own."""
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


def _more(value: Any) -> Any:
    return f"{value}z" if isinstance(value, str) else value + 1


def _less(value: Any) -> Any:
    return value[:-1] if isinstance(value, str) else value - 1


def _other(value: Any) -> Any:
    return f"not {value}" if isinstance(value, str) else value + 7


def _like(value: Any) -> Any:
    return value.replace("%", "").replace("_", "x") if isinstance(value, str) else value

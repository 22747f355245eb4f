"""Makes the rows of expert-sql: questions over random tables with queries that run in SQLite.

    python experts/expert-sql/make_data.py --rows 8000 --seed 7 --out datasets

Tables and columns are drawn for every row. Each row carries the statements that make its tables and
fill them. The expected query returns at least one row, and queries that are nearly right (without
the condition, with another column, comparison or value) return something else. The query without
its values is the skeleton: one like a test row's occurs in no training row.
"""

from __future__ import annotations

import random
import re
import sqlite3
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from data_making.files import main
from data_making.rows import Made, Wanted

TABLES = (
    "users players books songs films cities shops orders teams games cars trains hotels rooms "
    "schools courses plants birds stars lakes roads farms banks clubs ships tools"
).split()
TEXTS = (
    "name city country color status type category owner title language region brand style level"
).split()
NUMBERS = (
    "age price year score size weight height speed points rank pages seats stock rating".split()
)
WORDS = (
    "anna ben carla david emma paris london berlin rome madrid red green blue black white open "
    "closed new old small large north south east west gold silver iron first second"
).split()
ROWS = 7
TRIES = 12
"""Fillings of the tables that are tried before another question is drawn."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table: its name and its columns, those with text and those with numbers."""

    name: str
    texts: tuple[str, ...]
    numbers: tuple[str, ...]
    columns: tuple[str, ...]
    """All of them in the order of the table."""

    def create(self) -> str:
        kinds = (f"{c} {'TEXT' if c in self.texts else 'INTEGER'}" for c in self.columns)
        return f"CREATE TABLE {self.name} ({', '.join(kinds)})"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question, its query, and queries that a wrong reading of it would give."""

    task: str
    text: str
    query: str
    wrong: tuple[str, ...]
    joined: tuple[Table, ...] = ()
    """Tables besides the one it began with."""


def draw(source: random.Random, wanted: Wanted) -> Made | None:
    """One row; None where no filling of the tables tells right from wrong."""
    table = some_table(source)
    question = source.choice(QUESTIONS)(source, table)
    tables = question.joined or (table,)
    skeleton = "sql " + without_values(question.query)
    for _ in range(TRIES if wanted(skeleton) else 0):
        setup = [
            statement
            for one in tables
            for statement in (one.create(), fill(source, one, question.query))
        ]
        if tells(setup, question):
            return Made(
                task=question.task,
                instruction=question.text,
                input="; ".join(one.create() for one in tables),
                output=question.query,
                skeleton=skeleton,
                check={"setup": setup},
            )
    return None


def some_table(source: random.Random, name: str = "") -> Table:
    texts = tuple(source.sample(TEXTS, source.randint(2, 3)))
    numbers = tuple(source.sample(NUMBERS, source.randint(1, 2)))
    columns = source.sample([*texts, *numbers], len(texts) + len(numbers))
    return Table(
        name=name or source.choice(TABLES), texts=texts, numbers=numbers, columns=tuple(columns)
    )


def fill(source: random.Random, table: Table, query: str) -> str:
    """Rows for a table, many of them with values that the query speaks of."""
    words = [*re.findall(r"'(\w+)'", query), *source.sample(WORDS, 3)]
    columns = (column_of(source, table, column, words, query) for column in table.columns)
    rows = (", ".join(row) for row in zip(*columns, strict=True))
    return f"INSERT INTO {table.name} VALUES ({'), ('.join(rows)})"


def column_of(
    source: random.Random, table: Table, column: str, words: list[str], query: str
) -> list[str]:
    """The values of a column. Numbers differ from row to row: an order has no ties."""
    if column == "id":
        return [str(number) for number in range(1, ROWS + 1)]
    if column.endswith("_id"):
        return [str(source.randint(1, ROWS)) for _ in range(ROWS)]
    if column in table.texts:
        return [f"'{source.choice(words)}'" for _ in range(ROWS)]
    spoken = [int(number) for number in re.findall(r"\b\d+\b", query)]
    near = {number + step for number in spoken[:2] for step in (-1, 0, 1)}
    others = source.sample(sorted(set(range(1, 100)) - near), ROWS)
    return [str(number) for number in source.sample(sorted(near) + others, ROWS)]


def tells(setup: Sequence[str], question: Question) -> bool:
    """Whether the expected query returns something, and every wrong one something else."""
    with closing(sqlite3.connect(":memory:")) as database:
        for statement in setup:
            database.execute(statement)

        def result(query: str) -> list[Any]:
            return sorted(database.execute(query).fetchall(), key=repr)

        expected = result(question.query)
        if not expected or expected == [(None,)] or expected == [(0,)]:
            return False
        return all(result(query) != expected for query in question.wrong)


def without_values(query: str) -> str:
    return re.sub(r"'\w+'|\b\d+\b", "?", query)


# --- conditions -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Part of a question, as words and as SQL, and as SQL that is not quite it."""

    words: str
    sql: str
    wrong: tuple[str, ...]


SIGNS = {"above": ">", "below": "<", "at least": ">=", "at most": "<="}


def some_condition(source: random.Random, table: Table, besides: str = "") -> Condition:
    """A condition on a column other than `besides`."""
    texts = [column for column in table.texts if column != besides]
    numbers = [column for column in table.numbers if column != besides]
    if texts and (not numbers or source.random() < 0.5):
        column, word = source.choice(texts), source.choice(WORDS)
        others = [other for other in table.texts if other != column]
        return Condition(
            words=f"{column} {word}",
            sql=f"{column} = '{word}'",
            wrong=(f"{column} <> '{word}'", *(f"{other} = '{word}'" for other in others)),
        )
    column, number = source.choice(numbers), source.randint(2, 98)
    said = source.choice(list(SIGNS))
    sign = SIGNS[said]
    return Condition(
        words=f"{column} {said} {number}",
        sql=f"{column} {sign} {number}",
        wrong=tuple(f"{column} {other} {number}" for other in SIGNS.values() if other != sign),
    )


# --- questions ------------------------------------------------------------------------------------


def filtered(source: random.Random, table: Table) -> Question:
    """A column of the rows that fulfil a condition."""
    shown = source.choice(table.columns)
    where = some_condition(source, table, besides=shown)
    begin = f"SELECT {shown} FROM {table.name}"
    wrong = [f"{begin} WHERE {other}" for other in where.wrong]
    return Question(
        task="filter",
        text=f"Show the {shown} of {table.name} with {where.words}.",
        query=f"{begin} WHERE {where.sql}",
        wrong=(begin, *wrong),
    )


def twice_filtered(source: random.Random, table: Table) -> Question:
    """A column of the rows that fulfil two conditions, or one of two."""
    shown = source.choice(table.texts)
    first = some_condition(source, table, besides=shown)
    used = first.sql.split()[0]
    rest = [c for c in table.columns if c not in (shown, used)]
    left = Table(
        name=table.name,
        texts=tuple(c for c in rest if c in table.texts),
        numbers=tuple(c for c in rest if c in table.numbers),
        columns=tuple(rest),
    )
    second = some_condition(source, left)
    word = source.choice(("and", "or"))
    begin = f"SELECT {shown} FROM {table.name}"
    other = "OR" if word == "and" else "AND"
    return Question(
        task="two-conditions",
        text=f"Show the {shown} of {table.name} with {first.words} {word} {second.words}.",
        query=f"{begin} WHERE {first.sql} {word.upper()} {second.sql}",
        wrong=(
            f"{begin} WHERE {first.sql}",
            f"{begin} WHERE {second.sql}",
            f"{begin} WHERE {first.sql} {other} {second.sql}",
        ),
    )


def counted(source: random.Random, table: Table) -> Question:
    where = some_condition(source, table)
    begin = f"SELECT COUNT(*) FROM {table.name}"
    return Question(
        task="count",
        text=f"How many {table.name} have {where.words}?",
        query=f"{begin} WHERE {where.sql}",
        wrong=(begin, *(f"{begin} WHERE {other}" for other in where.wrong)),
    )


AGGREGATES = {"highest": "MAX", "lowest": "MIN", "average": "AVG", "total": "SUM"}


def aggregated(source: random.Random, table: Table) -> Question:
    """One number of all rows."""
    said, column = source.choice(list(AGGREGATES)), source.choice(table.numbers)
    name = AGGREGATES[said]
    others = [other for other in AGGREGATES.values() if other != name]
    return Question(
        task="aggregate",
        text=f"What is the {said} {column} of the {table.name}?",
        query=f"SELECT {name}({column}) FROM {table.name}",
        wrong=tuple(f"SELECT {other}({column}) FROM {table.name}" for other in others),
    )


def sorted_first(source: random.Random, table: Table) -> Question:
    """A column of the rows at one end of an order."""
    shown, by = source.choice(table.texts), source.choice(table.numbers)
    said, count = source.choice(("highest", "lowest")), source.randint(2, 4)
    way, other = ("DESC", "ASC") if said == "highest" else ("ASC", "DESC")
    query = f"SELECT {shown} FROM {table.name} ORDER BY {by} {way} LIMIT {count}"
    return Question(
        task="order",
        text=f"Show the {shown} of the {count} {table.name} with the {said} {by}.",
        query=query,
        wrong=(query.replace(way, other), query[: query.index(" ORDER")]),
    )


def grouped(source: random.Random, table: Table) -> Question:
    """A number for each value of a column."""
    by = source.choice(table.texts)
    if source.random() < 0.4:
        said, number = f"how many {table.name} there are", "COUNT(*)"
    else:
        word, column = source.choice(list(AGGREGATES)), source.choice(table.numbers)
        said, number = f"the {word} {column} of the {table.name}", f"{AGGREGATES[word]}({column})"
    return Question(
        task="group",
        text=f"For each {by}, show {said}.",
        query=f"SELECT {by}, {number} FROM {table.name} GROUP BY {by}",
        wrong=(f"SELECT {by}, {number} FROM {table.name}",),
    )


def joined(source: random.Random, table: Table) -> Question:
    """A column of each of two tables that belong together."""
    other = some_table(source, source.choice([name for name in TABLES if name != table.name]))
    one = other.name[:-1] if not other.name.endswith("ies") else other.name[:-3] + "y"
    link = f"{one}_id"
    left = replace(table, columns=(*table.columns, link), numbers=(*table.numbers, link))
    right = replace(other, columns=("id", *other.columns), numbers=(*other.numbers, "id"))
    ours, theirs = source.choice(table.texts), source.choice(other.texts)
    where = some_condition(source, other, besides=theirs)
    begin = f"SELECT {table.name}.{ours}, {other.name}.{theirs} FROM {table.name} JOIN {other.name}"
    on = f"{begin} ON {table.name}.{link} = {other.name}.id"
    return Question(
        task="join",
        text=f"Show the {ours} of {table.name} and the {theirs} of their {one} with {where.words}.",
        query=f"{on} WHERE {other.name}.{where.sql}",
        wrong=(on, *(f"{on} WHERE {other.name}.{wrong}" for wrong in where.wrong)),
        joined=(left, right),
    )


QUESTIONS: tuple[Callable[[random.Random, Table], Question], ...] = (
    filtered,
    twice_filtered,
    counted,
    aggregated,
    sorted_first,
    grouped,
    joined,
)

if __name__ == "__main__":
    main(draw, "sql", Path(__file__).parent)

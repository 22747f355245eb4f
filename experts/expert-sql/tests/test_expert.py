"""The rows of expert-sql: queries run, return something, and nearly right ones something else."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path

from data_making.loading import generator_of
from data_making.rows import make_rows

MAKE = generator_of(Path(__file__).parents[1])


def test_every_query_runs_on_its_tables_and_returns_rows():
    for row in make_rows(MAKE.draw, 60, "train", 1):
        with closing(sqlite3.connect(":memory:")) as database:
            for statement in row.check["setup"]:
                database.execute(statement)
            assert database.execute(row.output).fetchall(), row
        assert row.input == "; ".join(row.check["setup"][::2])  # as many tables as are shown


def test_a_filling_that_does_not_tell_right_from_wrong_is_refused():
    table = ["CREATE TABLE cars (age INTEGER)", "INSERT INTO cars VALUES (3), (4)"]
    asked = MAKE.Question(
        task="t",
        text="",
        query="SELECT age FROM cars WHERE age > 2",
        wrong=("SELECT age FROM cars WHERE age >= 2",),
    )
    assert not MAKE.tells(table, asked)
    told = [table[0], "INSERT INTO cars VALUES (2), (3)"]
    assert MAKE.tells(told, asked)
    assert not MAKE.tells([table[0], "INSERT INTO cars VALUES (1)"], asked)  # returns nothing


def test_numbers_of_a_column_differ_so_that_an_order_has_no_ties():
    source = random.Random(4)
    table = MAKE.Table(name="cars", texts=("city",), numbers=("age",), columns=("city", "age"))
    for _ in range(50):
        found = MAKE.column_of(source, table, "age", [], "SELECT city FROM cars WHERE age > 9")
        assert len(set(found)) == MAKE.ROWS


def test_the_skeleton_of_a_query_has_no_values():
    query = "SELECT name FROM cars WHERE city = 'rome' AND age > 12 LIMIT 3"
    assert MAKE.without_values(query) == "SELECT name FROM cars WHERE city = ? AND age > ? LIMIT ?"

"""SQL answers on tables that a case leaves empty: rows are generated from the expected query."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlglot
from sqlglot import exp

from expert.judging.oracles.sqlite_sandbox import Column
from expert.judging.oracles.synthetic_rows import rows_for_query
from tests.each import each
from tests.judging.judged import judged

CARS = "CREATE TABLE cars (id INTEGER PRIMARY KEY, name TEXT, color TEXT, age INT, school_id INT)"
SCHOOLS = "CREATE TABLE schools (id INTEGER PRIMARY KEY, city TEXT, rank INT)"
TWO = "SELECT name FROM cars WHERE color = 'red' AND age > 3"
JOIN = "SELECT cars.name, city FROM cars JOIN schools ON school_id = schools.id WHERE rank >= 48"


def asked(expected: str, answer: str):
    return judged("sql", expected, answer, prompt=f"Which?\n{CARS};\n{SCHOOLS};")


@each(
    ("expected", "answer"),
    [
        (TWO, "SELECT c.name FROM cars AS c WHERE c.age >= 4 AND c.color = 'red'"),
        (TWO, "SELECT name FROM cars WHERE NOT (color <> 'red' OR age <= 3)"),
        ("SELECT max(age) FROM cars", "SELECT age FROM cars ORDER BY age DESC LIMIT 1"),
        ("SELECT count(*) FROM cars WHERE age < 9", "SELECT count(id) FROM cars WHERE 9 > age"),
        (JOIN, "SELECT name, city FROM schools s, cars c WHERE c.school_id = s.id AND s.rank > 47"),
        (
            "SELECT name FROM cars WHERE name LIKE 'b%'",
            "SELECT name FROM cars WHERE name GLOB 'b*'",
        ),
        (
            "SELECT id FROM cars WHERE age BETWEEN 3 AND 5",
            "SELECT id FROM cars WHERE age IN (3,4,5)",
        ),
    ],
)
def test_a_query_that_means_the_same_is_right(expected, answer):
    found = asked(expected, answer)
    assert (found.passed, found.kind) == (True, "made rows"), found.reason


@each(
    ("expected", "answer"),
    [
        (TWO, "SELECT name FROM cars WHERE color = 'red'"),
        (TWO, "SELECT name FROM cars WHERE color = 'red' OR age > 3"),
        (TWO, "SELECT name FROM cars WHERE color = 'blue' AND age > 3"),
        (TWO, "SELECT name FROM cars WHERE color = 'red' AND age >= 3"),
        (TWO, "SELECT id FROM cars WHERE color = 'red' AND age > 3"),
        ("SELECT max(age) FROM cars WHERE color = 'red'", "SELECT max(age) FROM cars"),
        ("SELECT avg(age) FROM cars", "SELECT sum(age) FROM cars"),
        (JOIN, JOIN.replace("48", "49")),
        (JOIN, "SELECT name, city FROM cars, schools WHERE rank >= 48"),
        ("SELECT name FROM cars ORDER BY age", "SELECT name FROM cars ORDER BY age DESC"),
    ],
)
def test_a_query_that_means_something_else_is_wrong(expected, answer):
    assert asked(expected, answer).passed is False


HEADS = """CREATE TABLE head (head_id INT, name TEXT, age REAL, PRIMARY KEY (head_id));
CREATE TABLE management (department_id INT, head_id INT, year TEXT, active BOOLEAN, began DATE,
    points VARCHAR(9), PRIMARY KEY (department_id, head_id));"""
BOTH = "head T1 JOIN management T2 ON T1.head_id = T2.head_id"
TURNED = "management T2 JOIN head T1 ON T1.head_id = T2.head_id"


@each(
    ("expected", "answer"),
    [
        (
            f"SELECT T1.name FROM {BOTH} ORDER BY T2.year",
            f"SELECT T1.name FROM {TURNED} ORDER BY T2.year",
        ),
        (
            f"SELECT T1.name, COUNT(*) FROM {BOTH} GROUP BY T2.head_id",
            f"SELECT T1.name, COUNT(*) FROM {BOTH} GROUP BY T1.head_id",
        ),
        (
            "SELECT name FROM head WHERE age > 56 ORDER BY age",
            "SELECT name FROM head WHERE age > 56 ORDER BY age, name",
        ),
        (
            "SELECT head_id FROM management WHERE began > '2014-12-31'",
            "SELECT head_id FROM management WHERE began >= '2015-01-01'",
        ),
        (
            "SELECT head_id FROM management WHERE active = 1",
            "SELECT head_id FROM management WHERE active <> 0",
        ),
        (
            "SELECT head_id FROM management WHERE points > 30",
            "SELECT head_id FROM management WHERE CAST(points AS INTEGER) > 30",
        ),
        (
            "SELECT head_id FROM management WHERE strftime('%Y', began) = '2014'",
            "SELECT head_id FROM management WHERE began LIKE '2014%'",
        ),
        ("SELECT name, MAX(age) FROM head", "SELECT name, age FROM head ORDER BY age DESC LIMIT 1"),
    ],
)
def test_rows_are_such_as_tables_hold(expected, answer):
    """Repeated keys, invalid dates or flags of 8 would distinguish queries that are equivalent on
    real tables."""
    assert judged("sql", expected, answer, prompt=HEADS).passed is not False


@each(
    ("table", "condition"),
    [
        ("CREATE TABLE t (id INTEGER PRIMARY KEY, n TEXT)", "id = '5'"),
        ("CREATE TABLE t (id INTEGER PRIMARY KEY, n TEXT)", "id LIKE '1%'"),
        ("CREATE TABLE t (id INT, n TEXT)", "id = 99999999999999999999"),
        ("CREATE TABLE t (id INT, n TEXT) STRICT", "id = 'five'"),
        ("CREATE TABLE t (id INT CHECK (id < 3), n TEXT)", "id > 7"),
    ],
)
def test_rows_that_a_table_does_not_take_harm_nobody(table, condition):
    query = f"SELECT n FROM t WHERE {condition}"
    assert judged("sql", query, f"{query} ", prompt=table).passed is True
    assert judged("sql", query, f"{query} AND 1 = 1", prompt=table).passed is not False


def test_the_same_rows_are_made_and_only_where_there_are_none():
    columns = (("color", "TEXT"), ("age", "INT"))
    tables = {"cars": [Column(*each, False) for each in columns]}
    query = sqlglot.parse_one(TWO, read="sqlite")
    rows = rows_for_query(query, tables)
    assert rows == rows_for_query(query, tables) != rows_for_query(query, tables, seed=1)
    # Some meet every condition, and some miss each of them.
    met = {(color == "red", isinstance(age, int) and age > 3) for color, age in rows["cars"]}
    assert met >= {(True, True), (True, False), (False, True)}
    setup = [f"{CARS}; {SCHOOLS}", "INSERT INTO cars VALUES (1, 'a', 'red', 9, 1)"]
    found = judged("sql", TWO, "SELECT name FROM cars WHERE id = 1", setup=setup)
    assert (found.passed, found.kind) == (True, "rows")
    nobody = "SELECT name FROM cars WHERE age > 3 AND age < 2"
    found = asked(nobody, "SELECT name FROM cars WHERE 1 = 2")
    assert found.passed is None
    assert "returns no rows" in found.reason


# --- real questions ------------------------------------------------------------------------------

WIKISQL = Path(__file__).parents[3] / "shared" / "data" / "sql" / "test.jsonl"
QUESTIONS = 300


def changed(query: str) -> Iterator[str]:
    """The query without its conditions, with another value, and with the opposite sign."""
    where = sqlglot.parse_one(query, read="sqlite").find(exp.Where)
    if where is not None:
        yield query.partition(" WHERE ")[0]
        literal = where.find(exp.Literal)
        assert literal is not None
        value = "'zzz'" if literal.is_string else str(float(literal.this) + 3)
        yield query.replace(literal.sql(), value, 1)
    if " > " in query:
        yield query.replace(" > ", " < ", 1)


@pytest.mark.slow
@pytest.mark.skipif(not WIKISQL.exists(), reason="the rows of WikiSQL are not here")
def test_real_questions_of_wikisql():
    """Measured: 299 of 300 right and one without an oracle; 3 in 1,000 of the changed queries
    passed, such as a minimum that happens not to depend on a condition."""
    lines = WIKISQL.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in random.Random(1).sample(lines, QUESTIONS)]
    same: Counter[bool | None] = Counter()
    other: Counter[bool | None] = Counter()
    for row in rows:
        prompt = f"{row['instruction']}\n{row['input']}"
        text = row["output"].replace(" FROM t", " FROM t AS t", 1)
        said = text.replace("WHERE", "WHERE 1 = 1 AND") if "WHERE" in text else f"{text} WHERE 1=1"
        same[judged("sql", row["output"], said, prompt=prompt).passed] += 1
        for query in changed(row["output"]):
            other[judged("sql", row["output"], query, prompt=prompt).passed] += 1
    assert same[False] == 0
    assert same[True] >= 0.99 * QUESTIONS
    assert other[False] >= 0.99 * other.total()

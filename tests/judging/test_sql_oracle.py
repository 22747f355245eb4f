"""SQL answers: parsed by sqlglot, run in SQLite, and kept from doing harm."""

from __future__ import annotations

from tests.each import each
from tests.judging.asking import judged
from tests.wording import wording

SETUP = [
    "CREATE TABLE t(id INTEGER, name TEXT, age REAL)",
    "INSERT INTO t VALUES (1, 'a', 1.5), (2, 'b', 2.5), (3, 'a', 3)",
]
OLD = "SELECT name FROM t WHERE age > 2"


def asked(expected: str, answer: str, **check):
    return judged("sql", expected, answer, **{"setup": SETUP, **check})


@each(
    ("expected", "answer"),
    [
        (OLD, "SELECT t.name FROM t WHERE NOT t.age <= 2"),
        (OLD, "select name from t where age>2"),
        (OLD, "SELECT name FROM t WHERE age > 2 ORDER BY id DESC"),
        (OLD, f"```sql\n{OLD};\n```"),
        ("SELECT count(*) FROM t", "SELECT sum(1.0) FROM t"),
        ("SELECT avg(age) FROM t", "SELECT sum(age) / count(*) FROM t"),
        ("SELECT name AS n FROM t", "SELECT name AS other FROM t"),
        ("UPDATE t SET age = 0 WHERE id = 1", "UPDATE t SET age = 0 WHERE name = 'a' AND id < 2"),
    ],
)
def test_a_query_with_the_same_effect_is_right(expected, answer):
    assert asked(expected, answer).passed is True


@each(
    ("expected", "answer", "kind", "reason"),
    [
        (OLD, "SELECT name FROM t", "rows", wording("rows-instead")),
        (OLD, "SELECT name, id FROM t WHERE age > 2", "rows", wording("columns-instead-of")),
        (OLD, "SELECT id FROM t WHERE age > 2", "rows", wording("that-is-not-expected")),
        (OLD, "SELECT nope FROM t", "run", wording("no-such-column-nope")),
        (OLD, "Here is your query", "parse", wording("does-not-parse")),
        (OLD, "", "parse", wording("the-answer-is-empty")),
        (OLD, f"{OLD}; DROP TABLE t", "parse", wording("statements-instead-of-one")),
        (OLD, "DELETE FROM t", "run", wording("is-not-a-query")),
        (f"{OLD} ORDER BY id", f"{OLD} ORDER BY id DESC", "rows", wording("in-another-order")),
        ("SELECT '1'", "SELECT 1", "rows", wording("that-is-not-expected")),
        ("DELETE FROM t WHERE id = 1", "DELETE FROM t", "state", wording("left-in-another-state")),
    ],
)
def test_a_query_with_another_effect_is_wrong_and_says_why(expected, answer, kind, reason):
    found = asked(expected, answer)
    assert (found.passed, found.kind) == (False, kind)
    assert reason in found.reason


@each(
    ("expected", "answer", "check", "reason"),
    [
        (
            "SELECT 1 FROM t WHERE id > 9",
            "SELECT 2 FROM t WHERE id < 0",
            {},
            wording("returns-no-rows"),
        ),
        (OLD, "SELECT name FROM t", {"setup": []}, wording("no-tables-to-run")),
        ("SELECT 0 FROM t", "SELECT 0 FROM t t", {"setup": SETUP[:1]}, "are empty"),
        ("SELECT nope FROM t", "SELECT id FROM t", {}, wording("does-not-run")),
        ("not SQL at all", "SELECT id FROM t", {}, wording("the-expected-query")),
        (OLD, "SELECT 1", {"setup": ["CREATE TABLE"]}, wording("cannot-made-in-sqlite")),
        ("DELETE FROM t WHERE id=9", "DELETE FROM t WHERE id=8", {}, "changes nothing"),
    ],
)
def test_where_nothing_tells_right_from_wrong_there_is_no_oracle(expected, answer, check, reason):
    found = asked(expected, answer, **check)
    assert found.passed is None
    assert reason in found.reason


def test_the_same_query_needs_no_tables():
    assert asked(OLD, "select NAME from T where AGE > 2", setup=[]).passed is True


def test_tables_are_taken_from_the_prompt_where_the_case_names_none():
    prompt = "Names?\n\nSchema:\nCREATE TABLE p(n TEXT); INSERT INTO p VALUES ('x'), ('y');"
    wanted = "SELECT n FROM p"
    assert judged("sql", wanted, "SELECT p.n || '' FROM p", prompt=prompt).passed is True
    assert judged("sql", wanted, "SELECT 'x' FROM p", prompt=prompt).passed is False


def test_queries_of_another_dialect_are_translated():
    wanted = "SELECT name FROM t WHERE name ILIKE 'A%'"
    answer = "SELECT name FROM t WHERE LOWER(name) LIKE 'a%'"
    assert asked(wanted, answer, dialect="postgres").passed is True
    # SQLite itself has no such cast, and is given the answer word for word.
    assert asked("SELECT id FROM t", "SELECT id::int FROM t").passed is False

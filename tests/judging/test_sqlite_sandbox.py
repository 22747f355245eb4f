"""The database itself refuses forbidden actions, whatever was checked before."""

from __future__ import annotations

import pytest

from expert.judging.oracles.sqlite_sandbox import LimitExceeded, Sandbox, StatementRefused
from tests.each import each

SETUP = ["CREATE TABLE t(a); INSERT INTO t VALUES (1), (2)"]
ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT {} FROM c"


@each(
    "statement",
    [
        "DELETE FROM t",
        "INSERT INTO t VALUES (3)",
        "UPDATE t SET a = 0",
        "DROP TABLE t",
        "CREATE TABLE u(a)",
        "ATTACH ':memory:' AS other",
        "PRAGMA table_info(t)",
        "SELECT load_extension('x')",
    ],
)
def test_a_reading_query_changes_nothing(statement):
    with Sandbox(2.0) as box:
        box.set_up(SETUP)
        before = box.state()
        with pytest.raises(StatementRefused, match=r"not authorized|prohibited"):
            box.run(statement, reads=True)
        assert box.state() == before


@pytest.mark.parametrize("statement", ["ATTACH 'x.db' AS o", "PRAGMA user_version = 3"])
def test_a_changing_statement_stays_inside(statement, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Sandbox(2.0) as box:
        box.set_up(SETUP)
        with pytest.raises(StatementRefused):
            box.run(statement, reads=False)
        box.run("DELETE FROM t WHERE a = 1", reads=False)
        assert box.state()["t"]["rows"] == [(2,)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("what", "limit", "text"),
    [
        ("x", 30.0, "returns more than 10,000 rows"),
        ("sum(x)", 0.2, "takes longer than 0.2 s"),
    ],
)
def test_a_query_without_an_end_is_ended(what, limit, text):
    with Sandbox(limit) as box:
        with pytest.raises(LimitExceeded, match=text):
            box.run(ENDLESS.format(what), reads=True)
        assert box.run("SELECT 1", reads=True) == [(1,)]

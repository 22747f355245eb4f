"""Many answers judged in processes that may hang, fall, or lack a package."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest

from expert.core.install import pip_install
from expert.judging.court import Bench, judge_all
from expert.judging.domain import JUDGES, domain_of, is_strict
from expert.judging.oracles.oracle import UnknownDomain, missing_packages, oracle_for
from tests.each import each
from tests.judging.asking import case_of, judged
from tests.wording import wording


def test_answers_are_judged_in_their_order_by_several_processes():
    answers = ["1", "2"] * 60
    told: list[tuple[int, int]] = []
    found = judge_all(
        [case_of("1")] * 120, answers, domain="json", tell=lambda *more: told.append(more)
    )
    assert [each.passed for each in found] == [True, False] * 60
    assert sorted(told) == [(done, 120) for done in range(1, 121)]


def test_a_case_may_have_a_domain_of_its_own():
    from dataclasses import replace

    cases = [case_of("yes"), replace(case_of("[1, 2]"), domain="json")]
    found = judge_all(cases, ["yes ", "[1,2]"], domain="text")
    assert [each.passed for each in found] == [True, True]


def test_an_answer_that_takes_too_long_is_wrong_and_the_next_is_judged():
    # A compound of nested WITH that SQLite needs 2 s to give up; the bench gives it less.
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c) SELECT sum(x) FROM c"
    case = case_of("SELECT 1 FROM t", setup=["CREATE TABLE t(a)", "INSERT INTO t VALUES (1)"])
    with Bench(60) as bench:
        assert bench.judge(case, "SELECT a FROM t", domain="sql", strict=False).passed is True
        bench._seconds = 0.5
        found = bench.judge(case, endless, domain="sql", strict=False)
        assert (found.passed, found.reason) == (False, wording("answer-takes-longer-s"))
        bench._seconds = 60
        assert bench.judge(case, "SELECT a FROM t", domain="sql", strict=False).passed is True


def test_a_case_that_takes_too_long_itself_has_no_oracle():
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c) SELECT sum(x) FROM c"
    case = case_of(endless, setup=["CREATE TABLE t(a)", "INSERT INTO t VALUES (1)"])
    with Bench(60) as bench:
        assert bench.judge(case_of("SELECT 1"), "SELECT 1", domain="sql", strict=False).passed
        bench._seconds = 0.5
        found = bench.judge(case, "SELECT 1", domain="sql", strict=False)
    assert found.passed is None
    assert found.reason == wording("no-oracle-case-itself")


@pytest.mark.skipif(sys.platform == "win32", reason="ends a process by a signal")
def test_a_process_that_was_killed_is_started_again():
    with Bench(60) as bench:
        assert bench.judge(case_of("1"), "1", domain="json", strict=False).passed is True
        assert bench._child is not None
        os.kill(bench._child.pid, 9)
        bench._child.wait()
        assert bench.judge(case_of("1"), "1", domain="json", strict=False).passed is True


@pytest.mark.parametrize("domain", ["sql", "cypher", "typescript"])
def test_without_its_packages_a_domain_has_no_oracle_and_says_how_to_get_them(domain, monkeypatch):
    for name in JUDGES[domain].packages:
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(sys.modules, "antlr4", None)
    found = judged(domain, "SELECT 1", "SELECT 1")
    assert found.passed is None
    assert found.reason.endswith(f"({pip_install('validate')})")


def test_packages_that_are_missing_are_named(monkeypatch):
    assert missing_packages("sql") == []
    monkeypatch.setitem(
        JUDGES, "sql", replace(JUDGES["sql"], packages=("sqlglot", "no_such_package"))
    )
    assert missing_packages("sql") == ["no_such_package"]


def test_an_unknown_domain_is_refused_with_those_there_are():
    with pytest.raises(UnknownDomain, match=wording("known-json-sql-cypher")):
        oracle_for("cobol")


@each(
    ("capabilities", "decoding", "domain"),
    [
        (["task:repair", "format:json", "language:en"], {}, "json"),
        (["language:sql"], {}, "sql"),
        (["database:neo4j"], {}, "cypher"),
        (["language:en", "format:text"], {}, ""),
        ([], {"grammar_type": "text"}, "text"),
        (["language:en"], {"grammar_type": "open"}, "open"),
        ([], {"grammar_type": "sql-postgres"}, "sql"),
        (["format:json"], {"validation": "tsc"}, "typescript"),
    ],
)
def test_the_domain_is_what_the_manifest_says(capabilities, decoding, domain):
    assert domain_of(capabilities, decoding) == domain
    assert not is_strict(decoding)
    assert is_strict({"validation": "parser-strict"})


def test_text_is_right_but_for_white_space():
    assert judged("text", "the cat", " the\ncat ").passed is True
    assert judged("text", "the cat", " the\ncat ", strict=True).passed is False
    assert judged("text", "the cat", "a cat").passed is False

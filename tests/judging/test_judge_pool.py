"""Answers judged in processes that may hang, crash, or lack a package."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest

from expert.core.errors import ExpertError
from expert.core.install import pip_install
from expert.judging.cases import Case
from expert.judging.domain import JUDGES, domain_of, is_strict
from expert.judging.judge_pool import JudgeProcess, judge_all
from expert.judging.oracles.oracle import Judgement, missing_packages, oracle_for
from tests.each import each
from tests.judging.judged import case_of, judged


def test_answers_are_judged_in_their_order_by_several_processes_each_by_its_domain():
    answers = ["1", "2"] * 59 + ["yes ", "[1,2]"]
    cases = [case_of("1")] * 118 + [replace(case_of("yes"), domain="text"), case_of("[1, 2]")]
    told: list[tuple[int, int]] = []
    found = judge_all(cases, answers, domain="json", tell=lambda *more: told.append(more))
    assert [each.passed for each in found] == [True, False] * 59 + [True, True]
    assert sorted(told) == [(done, 120) for done in range(1, 121)]


def test_judging_continues_after_a_hang_or_a_crash():
    # SQLite stops it after 2 s; the process gets less.
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c) SELECT sum(x) FROM c"
    setup = ["CREATE TABLE t(a)", "INSERT INTO t VALUES (1)"]
    case = case_of("SELECT 1 FROM t", setup=setup)
    with JudgeProcess(60) as bench:

        def judged(case: Case, answer: str) -> Judgement:
            return bench.judge(case, answer, domain="sql", strict=False)

        assert judged(case, "SELECT a FROM t").passed is True
        bench._seconds = 0.5
        found = judged(case, endless)
        assert (found.passed, found.reason) == (False, "the answer takes longer than 0.5 s")
        bench._seconds = 60
        assert judged(case, "SELECT a FROM t").passed is True
        bench._seconds = 0.5
        found = judged(case_of(endless, setup=setup), "SELECT 1")
        assert found.passed is None
        assert found.reason == "no oracle: the case itself takes longer than 0.5 s"
        bench._seconds = 60
        assert judged(case, "SELECT a FROM t").passed is True
        assert bench._child is not None
        os.kill(bench._child.pid, 9)
        bench._child.wait()
        assert judged(case, "SELECT a FROM t").passed is True


@each("domain", ["sql", "cypher", "typescript"])
def test_without_its_packages_a_domain_has_no_oracle_and_says_how_to_get_them(domain, monkeypatch):
    assert missing_packages(domain) == []
    for name in JUDGES[domain].packages:
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(sys.modules, "antlr4", None)
    found = judged(domain, "SELECT 1", "SELECT 1")
    assert found.passed is None
    assert found.reason.endswith(f"({pip_install('validate')})")
    not_blocked = JUDGES[domain]._replace(packages=("jsonschema", "no_such_package"))
    monkeypatch.setitem(JUDGES, domain, not_blocked)
    assert missing_packages(domain) == ["no_such_package"]
    with pytest.raises(ExpertError, match="known: json, sql, cypher, typescript, calls, text"):
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

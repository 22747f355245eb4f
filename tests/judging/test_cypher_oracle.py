"""Cypher answers: parsed by openCypher's grammar, run in an embedded graph database."""

from __future__ import annotations

from expert.judging.oracles.cypher_statements import setup_statements
from tests.each import each
from tests.judging.asking import judged
from tests.wording import wording

SETUP = [
    "CREATE NODE TABLE P(id INT64, name STRING, age DOUBLE, PRIMARY KEY(id))",
    "CREATE REL TABLE K(FROM P TO P, since INT64)",
    "CREATE (:P {id: 1, name: 'a', age: 1.5}), (:P {id: 2, name: 'b', age: 2})",
    "MATCH (a:P {id: 1}), (b:P {id: 2}) CREATE (a)-[:K {since: 3}]->(b)",
]
KNOWN = "MATCH (a:P)-[:K]->(b:P) RETURN b.name"


def asked(expected: str, answer: str, **check):
    return judged("cypher", expected, answer, **{"setup": SETUP, **check})


@each(
    ("expected", "answer"),
    [
        (KNOWN, "MATCH (x:P)-[r:K]->(y:P) RETURN y.name AS who"),
        (KNOWN, "match (a:P)-[:K]->(b:P)\n return b.name;"),
        ("MATCH (a:P) RETURN a", "MATCH (n:P) RETURN n ORDER BY n.id DESC"),
        ("CREATE (:P {id: 3, name: 'c'})", "CREATE (n:P {name: 'c', id: 3})"),
    ],
)
def test_a_query_with_the_same_effect_is_right(expected, answer):
    assert asked(expected, answer).passed is True


@each(
    ("expected", "answer", "reason"),
    [
        (KNOWN, "MATCH (a:P) RETURN a.name", wording("rows-instead-of")),
        (KNOWN, "MATCH (a:P RETURN a", wording("does-not-parse-line")),
        (KNOWN, "MATCH (a:P) RETURN a.nope", "Cannot find property nope"),
        (KNOWN, "MATCH (a) DETACH DELETE a", wording("is-not-a-query")),
        (
            "MATCH (a:P) RETURN a.id ORDER BY a.id",
            "MATCH (a:P) RETURN a.id ORDER BY a.id DESC",
            wording("in-another-order"),
        ),
        ("CREATE (:P {id: 3})", "CREATE (:P {id: 4})", wording("that-is-not-expected")),
    ],
)
def test_a_query_with_another_effect_is_wrong_and_says_why(expected, answer, reason):
    found = asked(expected, answer)
    assert found.passed is False
    assert reason in found.reason


@each(
    "table",
    [
        "CREATE NODE TABLE IF NOT EXISTS `my t`(id SERIAL PRIMARY KEY, b BOOL DEFAULT true)",
        "CREATE NODE TABLE Q(id INT64 DEFAULT -1, s STRUCT(a INT64, b STRING[]), PRIMARY KEY(id))",
        "CREATE NODE TABLE Q(id DOUBLE[3], m MAP(STRING, INT64), d DECIMAL(9, 3), PRIMARY KEY(id))",
        "CREATE REL TABLE GROUP K(FROM P TO P, FROM P TO Q, MANY_ONE)",
        "CREATE REL TABLE GROUP(FROM P TO P)",
    ],
)
def test_tables_of_every_shape_are_understood(table):
    [found] = setup_statements(table)
    assert found.safe


@each(
    ("expected", "answer", "check", "reason"),
    [
        (KNOWN, "MATCH (a:P)-[r]->(b) WHERE type(r) = 'K' RETURN b.name", {}, "dialect"),
        (KNOWN, "MATCH (a:P) RETURN a.name", {"setup": []}, wording("no-graph-to-run")),
        ("MATCH (a:P) RETURN type(a)", KNOWN, {}, wording("does-not-run-in")),
        (
            "MATCH (a:P {id: 9}) RETURN a",
            "MATCH (a:P {id: 8}) RETURN a",
            {},
            wording("returns-no-rows"),
        ),
        ("MATCH (a:P {id: 9}) DELETE a", "MATCH (a:P {id: 8}) DELETE a", {}, "changes nothing"),
        ("MATCH (a) WHERE a.x =~ 'b' RETURN a", KNOWN, {}, wording("not-in-grammar")),
        (KNOWN, "MATCH (a:P) RETURN a.id", {"setup": ["CREATE NODE"]}, wording("cannot-be-made")),
    ],
)
def test_what_the_database_cannot_tell_has_no_oracle_and_is_no_pass(
    expected, answer, check, reason
):
    found = asked(expected, answer, **check)
    assert found.passed is None
    assert reason in found.reason

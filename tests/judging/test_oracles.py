"""Answers of every domain: right in any notation, wrong with a reason, or undecided."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from expert.judging.oracles.cypher_statements import setup_statements
from expert.judging.oracles.json_values import difference, parse
from tests.each import each
from tests.judging.judged import CALL, OTHER, judged

TABLES = [
    "CREATE TABLE t(id INTEGER, name TEXT, age REAL)",
    "INSERT INTO t VALUES (1, 'a', 1.5), (2, 'b', 2.5), (3, 'a', 3)",
]
GRAPH = [
    "CREATE NODE TABLE P(id INT64, name STRING, age DOUBLE, PRIMARY KEY(id))",
    "CREATE REL TABLE K(FROM P TO P, since INT64)",
    "CREATE (:P {id: 1, name: 'a', age: 1.5}), (:P {id: 2, name: 'b', age: 2})",
    "MATCH (a:P {id: 1}), (b:P {id: 2}) CREATE (a)-[:K {since: 3}]->(b)",
]
CHECKS: dict[str, Any] = {"sql": {"setup": TABLES}, "cypher": {"setup": GRAPH}}
OLD = "SELECT name FROM t WHERE age > 2"
KNOWN = "MATCH (a:P)-[:K]->(b:P) RETURN b.name"
ADD = "function f(a: number, b: string): string {\n  return b + a;\n}"

LOOKS = f"I look.\n{CALL}"


def asked(domain: str, expected: str, answer: str, **check: Any):
    return judged(domain, expected, answer, **{**CHECKS.get(domain, {}), **check})


def rows(table: dict[str, list[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    return [(domain, *row) for domain, some in table.items() for row in some]


RIGHT: dict[str, list[tuple[Any, ...]]] = {
    "json": [
        ('{"a": 1, "b": [1, 2]}', '{"b":[1,2],"a":1}'),
        ('{"a": 1}', '{"a": 1.0}'),
        ("0.1", "0.10"),
        ("1e400", "1E+400"),
        ('{"a": "x"}', '```json\n{"a": "x"}\n```'),
        ('"é"', '"\\u00e9"'),
        ("null", " null "),
    ],
    "sql": [
        (OLD, "SELECT t.name FROM t WHERE NOT t.age <= 2"),
        (OLD, "SELECT name FROM t WHERE age > 2 ORDER BY id DESC"),
        (OLD, f"```sql\n{OLD};\n```"),
        ("SELECT avg(age) FROM t", "SELECT sum(age) / count(*) FROM t"),
        ("SELECT name AS n FROM t", "SELECT name AS other FROM t"),
        ("UPDATE t SET age = 0 WHERE id = 1", "UPDATE t SET age = 0 WHERE name = 'a' AND id < 2"),
    ],
    "cypher": [
        (KNOWN, "MATCH (x:P)-[r:K]->(y:P) RETURN y.name AS who"),
        (KNOWN, "match (a:P)-[:K]->(b:P)\n return b.name;"),
        ("MATCH (a:P) RETURN a", "MATCH (n:P) RETURN n ORDER BY n.id DESC"),
        ("CREATE (:P {id: 3, name: 'c'})", "CREATE (n:P {name: 'c', id: 3})"),
    ],
    "typescript": [
        (ADD, "// adds\nfunction f(a:number,b:string,):string{return b+a}"),
        ("type A = { a: string; b: number }", "type A = {\n  a: string,\n  b: number,\n};"),
        ("interface A { a: string }", "interface A {\n  a: string;\n}"),
        ("const s = 'a'", 'const s = "a";'),
    ],
    "calls": [
        (LOOKS, CALL),
        (LOOKS, '<tool_call>{"arguments":{"days":2.0,"town":"K\\u00f6ln"},"name":"f"}</tool_call>'),
        (LOOKS, f"{CALL}\nOne moment."),
        (LOOKS, f"<think>\n{OTHER} or not?\n</think>\n\n{CALL}"),
    ],
    "text": [("the cat", " the\ncat ")],
}


@each(("domain", "expected", "answer"), rows(RIGHT))
def test_an_answer_that_means_the_same_is_right(domain, expected, answer):
    assert asked(domain, expected, answer).passed is True


ONE = '{"a": 1}'
TWO = f"{CALL}\n{OTHER}"
NO_JSON = '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'
BY_ID = "MATCH (a:P) RETURN a.id ORDER BY a.id"
WRONG: dict[str, list[tuple[Any, ...]]] = {
    "json": [
        (ONE, '{"a": true}', "equal", "$.a: true or false instead of a number"),
        (ONE, '{"a": 1, "b": 2}', "equal", "$: an object with the extra key 'b'"),
        ("[1, 2]", "[2, 1]", "equal", "$[0]: 2 instead of 1"),
        ('{"a": {"b": "x"}}', '{"a": {"b": "y"}}', "equal", '$.a.b: "y" instead of "x"'),
        (ONE, "", "parse", "the answer is empty"),
        (ONE, '{"a": 1,}', "parse", "line 1"),
        (ONE, '{"a": 1, "a": 1}', "parse", "the key 'a' occurs twice in an object"),
        (ONE, "[NaN]", "parse", "NaN is not JSON"),
        (ONE, "[" * 100_000, "parse", "nests brackets more than 200 deep"),
        (ONE, "9" * 5_000, "parse", "4300 digits"),
        (ONE, "1e99999999999999999999", "parse", "out of range"),
        (ONE, '"' + "x" * 200_000 + '"', "parse", "more than 100,000"),
    ],
    "sql": [
        (OLD, "SELECT name FROM t", "rows", "3 rows instead of 2"),
        (OLD, "SELECT name, id FROM t WHERE age > 2", "rows", "2 columns instead of 1"),
        (OLD, "SELECT nope FROM t", "run", "no such column: nope"),
        (OLD, "Here is your query", "parse", "does not parse"),
        (OLD, f"{OLD}; DROP TABLE t", "parse", "2 statements instead of one"),
        (OLD, "DELETE FROM t", "run", "is not a query"),
        (f"{OLD} ORDER BY id", f"{OLD} ORDER BY id DESC", "rows", "in another order"),
        ("SELECT '1'", "SELECT 1", "rows", "it returns an unexpected row"),
        ("DELETE FROM t WHERE id = 1", "DELETE FROM t", "state", "the tables differ afterwards"),
    ],
    "cypher": [
        (KNOWN, "MATCH (a:P) RETURN a.name", "rows", "2 rows instead of 1"),
        (KNOWN, "MATCH (a:P RETURN a", "parse", "does not parse: line 1, column"),
        (KNOWN, "MATCH (a:P) RETURN a.nope", "run", "Cannot find property nope"),
        (KNOWN, "MATCH (a) DETACH DELETE a", "run", "is not a query"),
        (BY_ID, f"{BY_ID} DESC", "rows", "in another order"),
        ("CREATE (:P {id: 3})", "CREATE (:P {id: 4})", "state", "it returns an unexpected row"),
    ],
    "typescript": [
        (ADD, "function f(a: number): string { return b + a }", "equal", ""),
        (ADD, "function f(a: number {", "parse", ""),
        (ADD, "(" * 5_000, "parse", ""),
        ("const s = `a  b`", "const s = `a b`", "equal", ""),
        ("f(a, b)", "f(a b)", "parse", ""),
        ("const a = [1, , 2]", "const a = [1, 2]", "equal", ""),
    ],
    "calls": [
        (TWO, "It rains.", "calls", "no call; f should be called"),
        (TWO, CALL.replace('"f"', '"h"'), "calls", "call 1: h instead of f"),
        (TWO, CALL.replace("2", '"2"'), "calls", "$.days: a string instead of a number"),
        (TWO, CALL, "calls", "1 call instead of 2"),
        (TWO, f"{OTHER}\n{CALL}", "calls", "call 1: g instead of f"),
        (TWO, CALL.removesuffix("</tool_call>"), "parse", "call 1: </tool_call> is missing"),
        (TWO, f"{CALL}<tool_call>{{}}</tool_call>", "parse", "call 2: names no function"),
        (TWO, "<tool_call>f(2)</tool_call>", "parse", "call 1: not JSON: "),
        (TWO, '<tool_call>{"name": "f"}</tool_call>', "parse", "call 1: f has no arguments"),
        (TWO, NO_JSON, "parse", "the arguments of f are no"),
        (TWO, '{"name": "f", "arguments": {}}', "calls", "no call; f should be called"),
    ],
    "text": [("the cat", "a cat", "equal", "")],
}


@each(("domain", "expected", "answer", "kind", "reason"), rows(WRONG))
def test_another_answer_is_wrong_and_says_why(domain, expected, answer, kind, reason):
    found = asked(domain, expected, answer)
    assert (found.passed, found.kind) == (False, kind)
    assert reason in found.reason


NOBODY = "MATCH (a:P {id: 9}) RETURN a", "MATCH (a:P {id: 8}) RETURN a"
UNDECIDED: dict[str, list[tuple[Any, ...]]] = {
    "json": [
        ("{", "1", {}, "the expected answer is not JSON"),
        ("1", "1", {"equals": False}, "has neither equals nor schema"),
        ("1", "1", {"schema": {"$ref": "https://example.com/x"}}, "refers to something outside it"),
        ("1", "1", {"schema": {"type": 7}}, "is not a JSON Schema"),
    ],
    "sql": [
        (f"{OLD}000", f"{OLD}001", {}, "returns no rows"),
        (OLD, "SELECT name FROM t", {"setup": []}, "no tables to run the query on"),
        ("SELECT 0 FROM t", "SELECT 0 FROM t t", {"setup": TABLES[:1]}, "are empty"),
        ("SELECT nope FROM t", "SELECT id FROM t", {}, "does not run in SQLite"),
        ("not SQL at all", "SELECT id FROM t", {}, "the expected query"),
        (OLD, "SELECT 1", {"setup": ["CREATE TABLE"]}, "cannot be made in SQLite"),
        ("DELETE FROM t WHERE id=9", "DELETE FROM t WHERE id=8", {}, "changes nothing"),
    ],
    "cypher": [
        (KNOWN, "MATCH (a:P)-[r]->(b) WHERE type(r) = 'K' RETURN b.name", {}, "dialect"),
        (KNOWN, "MATCH (a:P) RETURN a.name", {"setup": []}, "no graph to run the query on"),
        ("MATCH (a:P) RETURN type(a)", KNOWN, {}, "does not run in Ladybug"),
        (*NOBODY, {}, "returns no rows"),
        ("MATCH (a:P {id: 9}) DELETE a", "MATCH (a:P {id: 8}) DELETE a", {}, "changes nothing"),
        ("MATCH (a) WHERE a.x =~ 'b' RETURN a", KNOWN, {}, "is not in the grammar"),
        (KNOWN, "MATCH (a:P) RETURN a.id", {"setup": ["CREATE NODE"]}, "cannot be made"),
    ],
    "typescript": [(ADD, "const x = 1", {"equals": False}, "it parses and differs")],
}


@each(("domain", "expected", "answer", "check", "reason"), rows(UNDECIDED))
def test_undecidable_cases_have_no_oracle(domain, expected, answer, check, reason):
    found = asked(domain, expected, answer, **check)
    assert found.passed is None
    assert found.reason.startswith("no oracle: ")
    assert reason in found.reason


# --- JSON ----------------------------------------------------------------------------------------


def test_a_fence_is_part_of_a_strict_answer():
    assert judged("json", "1", "```\n1\n```", strict=True).passed is False
    assert judged("text", "the cat", " the\ncat ", strict=True).passed is False


def test_a_schema_judges_where_there_are_many_right_answers():
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    assert judged("json", "{}", '{"a": 3}', schema=schema).passed is True
    found = judged("json", "{}", '{"a": "x"}', schema=schema)
    assert (found.passed, found.kind) == (False, "schema")
    assert found.reason == "$['a']: 'x' is not of type 'integer'"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(values, values)
def test_two_values_differ_exactly_where_python_says_so(one, other):
    read = parse(json.dumps(one)), parse(json.dumps(other))
    strictly = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (difference(*read) is None) is strictly


# --- SQL -----------------------------------------------------------------------------------------


def test_tables_are_those_of_the_case_or_the_prompt_and_the_same_query_needs_none():
    assert asked("sql", OLD, "select NAME from T where AGE > 2", setup=[]).passed is True
    prompt = "Names?\n\nSchema:\nCREATE TABLE p(n TEXT); INSERT INTO p VALUES ('x'), ('y');"
    wanted = "SELECT n FROM p"
    assert judged("sql", wanted, "SELECT p.n || '' FROM p", prompt=prompt).passed is True
    assert judged("sql", wanted, "SELECT 'x' FROM p", prompt=prompt).passed is False


def test_queries_of_another_dialect_are_translated():
    wanted = "SELECT name FROM t WHERE name ILIKE 'A%'"
    answer = "SELECT name FROM t WHERE LOWER(name) LIKE 'a%'"
    assert asked("sql", wanted, answer, dialect="postgres").passed is True
    # SQLite has no such cast, and gets the answer verbatim.
    assert asked("sql", "SELECT id FROM t", "SELECT id::int FROM t").passed is False


# --- Cypher --------------------------------------------------------------------------------------


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

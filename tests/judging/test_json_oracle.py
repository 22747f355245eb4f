"""JSON answers: what parses, what is equal, and what a hostile answer cannot do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from expert.judging.oracles.json_values import difference, parse
from tests.each import each
from tests.judging.asking import judged
from tests.wording import wording


@each(
    ("expected", "answer"),
    [
        ('{"a": 1, "b": [1, 2]}', '{"b":[1,2],"a":1}'),
        ('{"a": 1}', '{"a": 1.0}'),
        ("0.1", "0.10"),
        ("1e400", "1E+400"),
        ('{"a": "x"}', '```json\n{"a": "x"}\n```'),
        ('"é"', '"\\u00e9"'),
        ("null", " null "),
    ],
)
def test_the_same_value_is_right_however_it_is_written(expected, answer):
    assert judged("json", expected, answer).passed is True


@each(
    ("expected", "answer", "reason"),
    [
        ('{"a": 1}', '{"a": true}', wording("true-false-instead-number")),
        ('{"a": 1}', '{"b": 1}', wording("object-without-key")),
        ('{"a": 1}', '{"a": 1, "b": 2}', wording("object-with-b-not")),
        ("[1, 2]", "[2, 1]", "$[0]: 2 instead of 1"),
        ("[1, 2]", "[1]", wording("entries-instead-of")),
        ('{"a": {"b": "x"}}', '{"a": {"b": "y"}}', '$.a.b: "y" instead of "x"'),
        ("1e400", "1e401", "instead of"),
    ],
)
def test_another_value_is_wrong_and_its_place_is_named(expected, answer, reason):
    found = judged("json", expected, answer)
    assert found.passed is False
    assert reason in found.reason


@each(
    ("answer", "reason"),
    [
        ("", wording("the-answer-is-empty")),
        ('{"a": 1,}', "line 1"),
        ('{"a": 1} and more', "Extra data"),
        ('{"a": 1, "a": 1}', wording("key-stands-twice-in")),
        ("[NaN]", wording("nan-is-no-json")),
        ("[" * 100_000, wording("nests-brackets-more-deep")),
        ('{"a":' * 5_000, wording("nests-brackets-more-deep")),
        ("9" * 5_000, "4300 digits"),
        ("1e99999999999999999999", wording("out-of-range")),
        ('"' + "x" * 200_000 + '"', "more than 100,000"),
    ],
)
def test_what_is_no_json_is_wrong_and_nothing_breaks(answer, reason):
    found = judged("json", '{"a": 1}', answer)
    assert (found.passed, found.kind) == (False, "parse")
    assert reason in found.reason


def test_a_fence_is_part_of_a_strict_answer():
    assert judged("json", "1", "```\n1\n```", strict=True).passed is False


def test_a_schema_judges_where_there_are_many_right_answers():
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    assert judged("json", "{}", '{"a": 3}', schema=schema).passed is True
    found = judged("json", "{}", '{"a": "x"}', schema=schema)
    assert (found.passed, found.kind) == (False, "schema")
    assert found.reason == wording("x-not-type-integer")


@each(
    ("expected", "check", "reason"),
    [
        ("{", {}, wording("expected-answer-no-json")),
        ("1", {"equals": False}, wording("says-neither-equals-nor")),
        ("1", {"schema": {"$ref": "https://example.com/x"}}, wording("names-what-not-in")),
        ("1", {"schema": {"type": 7}}, wording("is-no-json-schema")),
    ],
)
def test_a_case_that_cannot_tell_has_no_oracle(expected, check, reason):
    found = judged("json", expected, "1", **check)
    assert found.passed is None
    assert found.reason.startswith("no oracle: ")
    assert reason in found.reason


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(values, values)
def test_two_values_differ_exactly_where_python_says_so(one, other):
    import json

    read = parse(json.dumps(one)), parse(json.dumps(other))
    strictly = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (difference(*read) is None) is strictly

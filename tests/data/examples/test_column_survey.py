"""All rows are looked at to know the columns: what they fill, how often, with what."""

from __future__ import annotations

from expert.data.examples.column_survey import shape_of, survey_rows
from expert.data.records import BadRow, Row
from tests.data.examples.understood import surveyed
from tests.each import each

SAID = [{"role": "user", "content": "a"}]


@each(
    ("value", "shape"),
    [
        (None, ""),
        ("", ""),
        ({}, ""),
        ("a", "text"),
        ("True", "truth"),
        (False, "truth"),
        (0, "number"),
        (SAID, "messages"),
        ('[{"role": "user", "content": "a"}]', "messages"),
        ('[{"name": "a"}]', "text"),
        ("[1, 2", "text"),
        (SAID[0], "message"),
        ({"messages": SAID, "tools": []}, "conversation"),
        ({"type": "text", "value": "a"}, "part"),
        ([{"type": "text", "text": "a"}], "part"),
        ({"bytes": b"x", "path": None}, "media"),
        ([{"bytes": None, "path": "a.png"}], "media"),
        ({"array": [0.1], "sampling_rate": 16000, "path": "a.wav"}, "media"),
        ({"a": 1}, "object"),
        ({"from": "a@b.c", "to": "d@e.f"}, "object"),
        (["a", "b"], "list"),
    ],
)
def test_a_value_is_known_by_its_shape(value, shape):
    assert shape_of(value) == shape


def test_columns_are_the_union_over_all_rows_in_the_order_of_their_first_sight():
    seen = surveyed([{"a": "x", "b": None}, {"a": "", "c": 1}, {"b": SAID}])
    assert seen.names == ["a", "b", "c"]
    assert [seen.filled(name) for name in "abcd"] == [1, 1, 1, 0]
    assert seen.holds("b", "messages")
    assert not seen.holds_only("d", "text")


def test_bad_rows_are_skipped_and_a_partial_survey_is_marked():
    rows: list[Row | BadRow] = [
        BadRow("f", 1, "broken"),
        Row({"a": "x"}, "f", 2),
        Row({"b": "x"}, "f", 3),
    ]
    seen = survey_rows(rows, 2)
    assert (seen.names, seen.rows, seen.whole, seen.file) == (["a"], 1, False, "f")
    assert seen.late_column({"a": "y", "b": None}) == ""
    assert seen.late_column({"a": "y", "b": "z"}) == "b"
    assert survey_rows(rows, 3).whole

"""Our JSON parser agrees with the standard library's, and knows the line of every value."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.core.errors import ManifestError
from expert.manifest.text.json_text import parse_json
from tests.each import each
from tests.manifest.strategies import TREES


@given(TREES, st.sampled_from([None, 0, 2]), st.booleans())
def test_it_reads_what_the_standard_library_reads(tree: Any, indent: int | None, ascii_only: bool):
    text = json.dumps(tree, indent=indent, ensure_ascii=ascii_only)
    try:
        item, problems = parse_json(text, "m.json")
    except ManifestError as error:
        assert "NUL" in str(error) or "surrogate" in str(error)  # noqa: PT017
        assert "\\u0000" in text or "\\ud" in text or "\0" in text
        return
    assert problems == []
    assert item.plain() == json.loads(text)


def test_a_value_knows_its_path_its_line_and_its_kind():
    item, _ = parse_json('{\n "a": {\n  "b": [\n   1,\n   {"c":\n 2}]}}', "m.json")
    assert [(entry.path, entry.line) for entry in item.walk()] == [
        ("", 1),
        ("a", 2),
        ("a.b", 3),
        ("a.b[0]", 4),
        ("a.b[1]", 5),
        ("a.b[1].c", 5),
    ]
    odd = '{"a"\n\t:' + r'[" : y", "x", "\/\b\f\ud83d\ude00"],"b" :{}, "c:" : "\\ud83d"}'
    assert parse_json(odd, "m.json")[0].plain() == json.loads(odd)
    item, _ = parse_json("[1, 1.0, 1e3, -0, 5e-5]", "m.json")
    assert list(map(repr, item.plain())) == ["1", "1.0", "1000.0", "0", "5e-05"]
    item, problems = parse_json('{"a": 1, "_a": 1,\n"a": 2, "_a": 2, "_a": 3}', "m.json")
    assert [str(problem) for problem in problems] == [
        "line 2: a: key appears twice (first on line 1)  (remove one)"
    ]
    assert item.plain() == {"a": 1}  # comments end here


@each(
    ("text", "refusal"),
    [
        ('{"a": FALSE}', "FALSE is not JSON  (write true, false, null, a number, or text in quo"),
        ('{"a": .5}', ". is not JSON  (write true, false, null, a number, or text in quotes)"),
        *(
            (text, '"," expected after this value  (a missing comma?)')
            for text in ('{"a": 01}', '{"a": 1٣}', "[1 2]")
        ),
        ('{"a": "x', "broken string: unterminated string starting"),
        ("[1, 2", "the file ends too early  (is it cut off?)"),
        ("[" * 62 + "]" * 62, "nested more than 60 deep  (this is not a manifest)"),
        ("[" + "1," * 6000 + "1]", "more than 5,000 values  (this is not a manifest)"),
    ],
)
def test_a_refusal_says_line_fault_and_remedy(text: str, refusal: str):
    with pytest.raises(ManifestError) as caught:
        parse_json(text, "m.json")
    assert str(caught.value.problems[0]).startswith(f"line 1: {refusal}")

"""YAML as people write it: 2e-5 is a number, dates are text, tags are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from expert.core.errors import ManifestError
from expert.manifest.text.item import Item
from expert.manifest.text.yaml_text import parse_yaml, read_scalar
from tests.each import each

# Text that is a number to us and bare text to PyYAML, such as 2e5: we read it as people mean it.
WORDS = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs", "Cc"]), max_size=8
).filter(lambda word: not isinstance(read_scalar(word), float))
TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abc", min_size=1), inner),
    max_leaves=15,
)


def _plain(text: str) -> Any:
    item, problems = parse_yaml(text, "m.yaml")
    assert problems == []
    return item.plain()


def _refusal(text: str) -> str:
    with pytest.raises(ManifestError) as caught:
        parse_yaml(text, "m.yaml")
    return str(caught.value.problems[0])


@each(
    ("word", "value"),
    [
        ("2e-5", 2e-5),
        ("2E-5", 2e-5),
        (".5", 0.5),
        ("1_000", 1000),
        ("0.1", 0.1),
        *((word, word) for word in ("007", "1e999", "9" * 41, "0x10", "1:30", ".inf", ".nan")),
        *((word, word) for word in ("٣", "2025-11-06", "1.2.3", "-", "e5", "_1", "y", "None")),
        ("Yes", True),
        ("~", None),
    ],
)
def test_a_bare_word_means(word: str, value: object):
    assert read_scalar(word) == value
    assert type(read_scalar(word)) is type(value)


@given(TREES)
def test_it_reads_what_pyyaml_writes_and_json(tree: Any):
    assert _plain(yaml.safe_dump(tree, allow_unicode=True)) == tree
    assert _plain(json.dumps({"a": tree}, ensure_ascii=False)) == {"a": tree}
    assert _plain('["1", \'2e-5\', "yes", \'~\', ""]') == ["1", "2e-5", "yes", "~", ""]


def test_anchors_are_copied_and_merge_keys_give_way_to_the_users_own():
    assert _plain("a: &a {x: 1, y: 2}\nb: *a\nc: {<<: *a, y: 3}\nd: {<<: [{x: 9}, *a]}") == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 2},
        "c": {"y": 3, "x": 1},
        "d": {"x": 9, "y": 2},
    }
    assert _plain('{"<<": 5}') == {"<<": 5}
    item, _ = parse_yaml("a: &a\n  x: 1\nb: *a\nc:\n  <<: *a\n", "m.yaml")
    copies = [copy for copy in (item.get("b", "x"), item.get("c", "x")) if copy is not None]
    # The path of the copy, the line of the anchor.
    assert [(copy.path, copy.line) for copy in copies] == [("b.x", 2), ("c.x", 2)]


def test_a_value_knows_its_path_and_the_line_of_its_key():
    item, _ = parse_yaml("a:\n  b:\n    - 1\n    - c:\n        2\n", "m.yaml")
    assert [(entry.path, entry.line) for entry in item.walk()] == [
        ("", 1),
        ("a", 1),
        ("a.b", 2),
        ("a.b[0]", 3),
        ("a.b[1]", 4),
        ("a.b[1].c", 4),
    ]


@each(
    ("text", "refusal"),
    [
        ("a: \x07", "not YAML: control characters are not allowed"),
        ("a: \ud800", "not YAML: half of a surrogate pair"),
        ('a: "\\ud800"', "line 1: not YAML: found invalid Unicode character escape code"),
        ("a: {<<: [{}, 1]}", "line 1: a: << merges objects only  (name an anchor of an object)"),
        ("[" * 100, "line 1: nested more than 60 deep  (this is not a manifest)"),
        ("[" * 61 + "]" * 61, None),
        ("[" * 62 + "]" * 62, "line 1: nested more than 60 deep  (this is not a manifest)"),
        ("a: &a [*a]", "line 1: nested more than 60 deep  (this is not a manifest)"),
        ("a: &a {<<: *a}", "line 1: nested more than 60 deep  (this is not a manifest)"),
        ("a:\n" + "- 1\n" * 5001, "line 5000: more than 5,000 values  (this is not a manifest)"),
    ],
)  # fmt: skip
def test_a_refusal_says_line_fault_and_remedy(text: str, refusal: str | None):
    if refusal is None:
        assert isinstance(parse_yaml(text, "m.yaml")[0], Item)
    else:
        assert _refusal(text) == refusal

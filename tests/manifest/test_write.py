"""Written text reads back to the same data; comments and order survive."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from expert.manifest.text.document import parse_document
from expert.manifest.text.item import Item
from expert.manifest.text.write import WIDTH, to_json, to_yaml
from tests.each import each
from tests.manifest.items import as_item, everything
from tests.manifest.strategies import KEYS, SCALARS

TREES = st.dictionaries(
    KEYS,
    st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
        max_leaves=12,
    ),
    max_size=5,
)

# Texts that a careless writer would turn into something else.
TRICKY = [
    *("yes", "No", "on", "OFF", "true", "null", "~", "", " ", " x", "x ", "a: b", "a:", "#x"),
    *("a #b", "2e-5", "1.0", "1_000", "-1", "+1", ".5", "0x1F", "0o7", "1:30", ".inf"),
    "2025-11-03",
    *("- a", "-", "? a", ":", "[a]", "{a}", "a, b", "'a'", '"a"', "it's", "\\d+", "%a", "@a", "`a"),
    *("!!str", "&a", "*a", "|", ">", "<<", "=", "---", "...", "a\n", "\na", "a\nb", "a\nb\n"),
    *("a\n\nb\n\n", " a\nb", "a\n b", "a\n  \nb", "a\tb", "\ta", "a\n\tb", "# a\n# b", "a\n# b\n"),
    *("a\r\nb", "\x01", "\x7f", "\x85", "\u2028", "\ufeff", "é", "日本", "😀", "\xa0", "1" * 41),
    *("x: |\n  y", "a\\nb", "C:\\x", 'say "hi"', '"it\'s"', "k" * 2000, "é: " * 400, "y", "n"),
]


def with_types(data: Any) -> Any:
    """Data that compares unequal where Python calls 1, 1.0 and True the same."""
    if isinstance(data, dict):
        return {key: with_types(value) for key, value in data.items()}
    if isinstance(data, list):
        return [with_types(value) for value in data]
    return (type(data).__name__, repr(data))


def reread(data: Any, kind: Any) -> Any:
    text = to_json(as_item(data)) if kind == "json" else to_yaml(as_item(data))
    document = parse_document(text, kind)
    assert document.problems == []
    return everything(document.root)


@each("kind", ["json", "yaml"])
@each("text", TRICKY)
def test_tricky_text_reads_back_as_itself_wherever_it_stands(text, kind):
    data = {"value": text, "list": [text, 1], "block": [{"in": text}, [[text]]], text: {text: 1}}
    assert with_types(reread(data, kind)) == with_types(data)
    del data[text]  # another reader has no keys of this length
    assert yaml.safe_load(to_yaml(as_item(data))) == data


@given(TREES)
def test_any_tree_reads_back_from_json_and_yaml(data):
    for kind in ("json", "yaml"):
        assert with_types(reread(data, kind)) == with_types(data), kind
    assert json.loads(to_json(as_item(data))) == data


@given(st.text(max_size=30))
def test_any_text_is_the_same_text_to_another_yaml_reader(text):
    written = to_yaml(as_item({"value": text, "list": [text]}))
    assert yaml.safe_load(written) == {"value": text, "list": [text]}


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_stays_the_same_number_in_every_reader(value):
    tree = as_item({"value": value})
    assert repr(json.loads(to_json(tree))["value"]) == repr(value)
    assert repr(yaml.safe_load(to_yaml(tree))["value"]) == repr(value)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_cannot_be_read_back_is_refused(value):
    with pytest.raises(ValueError, match="cannot be written in a manifest"):
        to_json(as_item({"value": value}))


def test_only_text_that_needs_quotes_gets_them():
    words = ["train.jsonl", "Qwen/Qwen3-0.6B", "http://host/x", "a b", "1.0.0", "F:/models/x", "é"]
    text = to_yaml(as_item({str(n): word for n, word in enumerate(words)}))
    assert [line.split(": ", 1)[1] for line in text.splitlines()] == words


def test_short_lists_of_scalars_stand_on_one_line_and_no_line_is_too_wide():
    data = {"short": ["q_proj", 2, None], "long": [f"module_{n}" for n in range(30)]}
    for text in (to_json(as_item(data)), to_yaml(as_item(data))):
        assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert '"short": ["q_proj", 2, null],' in to_json(as_item(data))
    assert "short: [q_proj, 2, null]" in to_yaml(as_item(data))


def test_a_list_of_exactly_the_width_stays_on_one_line():
    for extra, lines in ((0, 1), (1, 2)):
        word = "w" * (WIDTH - len("key: []") + extra)
        assert len(to_yaml(as_item({"key": [word]})).splitlines()) == lines
        word = "w" * (WIDTH - len('  "key": [""],') + extra)
        assert len(to_json(as_item({"key": [word]})).splitlines()) == (3 if lines == 1 else 5)


COMMENTED = """\
# the head of the file
name: x  # beside a name

# over a section
training:  # beside a section
  # over a key
  epochs: 3  # beside a number
  targets: [a, b]  # beside a short list
  # over a short list
  others: [a, b]
  note: |  # beside a text
    first line
    # not a comment
  spread:
    - a  # beside an entry
    # over an entry
    - b

base_models:
  # over the first model
  - name: q
    # over a list in a list
    adapters:
      - type: lora
  - name: r  # the second
# the end
"""


def test_yaml_with_comments_is_written_as_it_was_read():
    document = parse_document(COMMENTED, "yaml")
    assert to_yaml(document.root, document.closing_comments) == COMMENTED
    quoted = parse_document('a: "one\n  # two"\nb: 1\n', "yaml")  # no comment
    assert to_yaml(quoted.root) == 'a: "one # two"\nb: 1\n'
    entry = Item({"a": Item(1)}, beside="# about the entry", above=["# over it"])
    text = to_yaml(Item({"list": Item([entry])}))  # an entry cannot carry it
    assert text == "list:\n  # over it\n  # about the entry\n  - a: 1\n"


@each(
    ("data", "as_json", "as_yaml"),
    [
        ({}, "{}\n", "{}\n"),
        ({"lr": 2e-5}, '{\n  "lr": 2e-5\n}\n', "lr: 2.0e-5\n"),  # as people write it
        (
            {"decay": 0.01, "k": 3.0},
            '{\n  "decay": 0.01,\n  "k": 3.0\n}\n',
            "decay: 0.01\nk: 3.0\n",
        ),
        ({"é": ["日本", "😀\n"]}, '{\n  "é": ["日本", "😀\\n"]\n}\n', 'é: [日本, "😀\\n"]\n'),
        ({"a": "one\ntwo\n", "b": 1}, None, "a: |\n  one\n  two\n\nb: 1\n"),
        ({"a": "one \ntwo"}, None, 'a: "one \\ntwo"\n'),  # blanks at line ends are shown
    ],
)
def test_data_is_written_readably(data, as_json, as_yaml):
    assert to_yaml(as_item(data)) == as_yaml
    assert as_json is None or to_json(as_item(data)) == as_json

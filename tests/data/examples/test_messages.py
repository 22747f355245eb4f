"""Messages of the usual formats: which answers are trained on, what is joined, what is refused."""

from __future__ import annotations

from typing import Any

from expert.data.examples.checks import RowFilter
from expert.data.examples.columns import detect_columns
from expert.data.examples.formats import example_of
from expert.data.records import Example, Row, Turn
from expert.data.template.templates import named_template
from expert.manifest.schema.dataset import RowChecks
from tests.data.examples.understood import (
    MESSAGES,
    example_in,
    reason_of,
    surveyed,
    turns_of,
    understand,
)
from tests.data.template.chat_templates import family, qwen3_source
from tests.data.template.test_templates import shown
from tests.each import each

TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "two"},
]


def talk(**of_first_answer: Any) -> list[dict[str, Any]]:
    return [TALK[0], {**TALK[1], **of_first_answer}, *TALK[2:]]


CHATML = named_template("chatml", eos="<|endoftext|>")


@each("mask", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"train_on_turn": False}])
@each("template", [CHATML, family("chatml"), family("thinking")])
def test_an_answer_with_weight_0_is_not_trained_on(template, mask):
    segments = template.segments(example_in({"messages": talk(**mask)}))
    plain = template.segments(example_in({"messages": TALK}))
    assert "".join(each.text for each in segments) == "".join(each.text for each in plain)
    learnt = [each.text for each in segments if each.learn]
    assert learnt == [each.text for each in plain if each.learn][1:]
    assert "two" in learnt[0]
    whole = template.segments(example_in({"messages": talk(**mask)}), learn_prompt=True)
    assert [each.learn for each in whole] == [True, False, True]
    assert "one" in whole[1].text


@each(
    ("fields", "reason"),
    [
        ({"weight": 0.5}, "messages[2]: weight 0.5; allowed: 1 or true, 0 or false"),
        ({"train": "no"}, "messages[2]: train 'no'; allowed: 1 or true, 0 or false"),
        ({"images": ["x.png"]}, "messages[2]: the field 'images' of a message is not understood"),
        ({"tools": [{"name": "add"}]}, "messages[2]: the field 'tools' of a message"),
        (
            {"content": [{"type": "image", "text": ""}, {"text": "a"}]},
            "messages[2]: a part of type 'image'; only text is trained on",
        ),
        (
            {"content": [{"text": "a"}, {"type": "thinking", "thinking": "hm"}]},
            "messages[2]: a part of type 'thinking' after the text of the answer",
        ),
        (
            {"content": [{"type": "reasoning", "summary": 1, "text": 5}, {"text": "a"}]},
            "messages[2]: a part of type 'reasoning' without text",
        ),
        (
            {"content": [{"type": "thinking", "thinking": "a"}], "reasoning": "b"},
            "messages[2]: reasoning is one text, in an assistant message",
        ),
        ({"train_detail": [{"train": False}]}, "messages[2]: the field 'train_detail' of"),
        (
            {"reasoning_content": "a", "content": "<think>b</think>c"},
            "messages[2]: reasoning in a field of its own and in the content",
        ),
    ],
)
def test_unsupported_training_fields_are_refused(fields, reason):
    assert reason_of({"messages": talk(**fields)}, MESSAGES).startswith(reason)


def test_a_row_of_which_no_answer_is_learnt_or_a_request_alone_is_refused():
    said = [TALK[0], {**TALK[1], "weight": 0}]
    assert reason_of({"messages": said}, MESSAGES).startswith("no assistant turn is trained on")
    said = [{**TALK[0], "train": True}, TALK[1]]
    assert "train is true, but only answers" in reason_of({"messages": said}, MESSAGES)
    assert turns_of({"messages": [{**TALK[0], "train": False}, TALK[1]]})


ONE = {"type": "text", "text": "one"}


@each(
    "answer",
    [
        {"reasoning_content": "\nfirst this\n", "content": "one"},
        {"content": [{"type": "thinking", "thinking": "first this", "signature": "x"}, ONE]},
        {"content": [{"type": "reasoning", "text": "first this"}, ONE]},
    ],
)
def test_thoughts_stand_before_the_answer_as_qwen3_writes_them(answer):
    said = [TALK[0], {"role": "assistant", **answer}]
    made = example_in({"messages": said})
    assert made.turns[1].text == "<think>\nfirst this\n</think>\n\none"
    written = shown(family(qwen3_source()).segments(made))
    assert written.endswith("[[<think>\nfirst this\n</think>\n\none<|im_end|>\n]]")
    assert written == shown(CHATML.segments(made))


def test_the_history_comes_before_the_request_and_is_trained_on():
    row = {"instruction": "c", "output": "three", "history": [["a", "one"], ["b", "two"]]}
    assert turns_of({**row, "system": "S"}) == [
        ("system", "S"),
        *[("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two")],
        *[("user", "c"), ("assistant", "three")],
    ]
    assert turns_of({**row, "history": []}) == [("user", "c"), ("assistant", "three")]
    columns = understand(list(row), row)
    assert columns.unused(surveyed([row])) == {}
    reason = reason_of({**row, "history": [["a"]]}, columns)
    assert reason == "history[1]: is not a pair of a request and an answer"


def test_tools_and_a_history_that_later_rows_have_are_read():
    rows: list[dict[str, Any]] = [{"messages": TALK}]
    rows.append({**rows[0], "tools": [{"name": "add"}]})
    columns = detect_columns(surveyed(rows))
    made = [example_of(Row(row, "rows.jsonl", 1), columns) for row in rows]
    assert [isinstance(each, Example) and bool(each.tools) for each in made] == [False, True]
    firsts: list[dict[str, Any]] = [{}, {"history": []}, {"history": None}]
    for first in firsts:
        rows = [{**first, "instruction": "a", "output": "b"}]
        rows.append({"instruction": "c", "output": "d", "history": [["a", "b"]]})
        later = example_of(Row(rows[1], "rows.jsonl", 2), detect_columns(surveyed(rows)))
        assert isinstance(later, Example)
        assert [turn.text for turn in later.turns] == ["a", "b", "c", "d"]


def test_rows_that_differ_in_what_is_learnt_or_offered_are_no_duplicates():
    once = RowFilter(RowChecks(deduplicate=True))
    turns = (Turn("user", "a"), Turn("assistant", "b"))
    unlearnt = (Turn("user", "a"), Turn("assistant", "b", learn=False))
    rows = [Example(turns), Example(unlearnt), Example(turns, tools="[]"), Example(turns)]
    assert [once.reason(row) for row in rows] == ["", "", "", "occurred before"]
    calls = Example((Turn("user", "a"), Turn("assistant", "", extra='{"tool_calls": []}')))
    assert RowFilter(RowChecks(min_length=1)).reason(calls) == ""

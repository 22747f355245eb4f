"""Every shape of row ends as the same example, and what cannot is refused with a reason."""

from __future__ import annotations

import math
from datetime import date
from typing import Any

from expert.data.examples.formats import example_of
from expert.data.records import BadRow, Row
from expert.manifest.schema.dataset import FieldMapping
from expert.manifest.schema.message_names import ROLES
from tests.data.examples.understood import INSTRUCTION, MESSAGES, reason_of, turns_of
from tests.each import each


def said(*turns: str) -> list[dict[str, Any]]:
    """Messages from "role text" pairs."""
    return [dict(zip(("role", "content"), turn.split(" ", 1), strict=True)) for turn in turns]


QA = [("user", "Q"), ("assistant", "A")]
SQA = [("system", "S"), *QA]
PARTS = [{"type": "text", "text": "a "}, {"type": "input_text", "text": "b"}, {"text": "c"}, "d"]
JSON = '[{"role": "assistant", "content": "A"}]'
TASK = {
    "broken_json": "[1 2]",
    "instruction": "Repair it, JSON only.",
    "error_type": "missing_comma_array",
    "schema": {"type": "array"},
    "text": "",
}
TOLD = 'Repair it, JSON only.\n\nBroken json:\n[1 2]\n\nSchema:\n{"type":"array"}'


@each(
    ("row", "turns"),
    [
        ({"instruction": "Q", "input": "", "response": "A"}, QA),
        # A blank input or system makes no block and no turn.
        ({"instruction": "Q", "input": "  \n", "output": "A", "system": "  \n"}, QA),
        ({"instruction": "Q", "input": None, "output": "A", "system": None}, QA),
        ({"instruction": "Q", "input": [], "output": "A", "system": {}}, QA),
        ({"instruction": "Q", "input": math.nan, "output": "A", "system": math.nan}, QA),
        # A row without a request asks with its input.
        ({"instruction": "", "input": "Q", "output": "A"}, QA),
        ({"instruction": "Q", "output": "A", "system": "S"}, SQA),
        # Texts are kept to the last blank; numbers are as they are written.
        ({"instruction": " Q\n", "output": "A \n\n"}, [("user", " Q\n"), ("assistant", "A \n\n")]),
        ({"instruction": "Q", "output": 3}, [("user", "Q"), ("assistant", "3")]),
        # JSON text of messages stays a text: a model may be trained to write it.
        ({"prompt": "Q", "completion": JSON}, [("user", "Q"), ("assistant", JSON)]),
        # Prompt and completion may be lists of messages, or one of them.
        ({"prompt": said("system S", "user Q"), "completion": said("assistant A")}, SQA),
        ({"prompt": said("user Q"), "completion": "A"}, QA),
        # Messages and ShareGPT. The system turn of a conversation wins over the column.
        (
            {
                "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}],
                "system": "S",
            },
            SQA,
        ),
        ({"messages": said("system S", "user Q", "assistant A"), "system": "outer"}, SQA),
        ({"messages": said("system  ", "user Q", "assistant A")}, QA),
        (
            {"messages": [{"role": "user", "content": PARTS}, *said("assistant A")]},
            [("user", "a bcd"), ("assistant", "A")],
        ),
        # Two user turns become one, and a developer is the system.
        (
            {"messages": said("developer S", "user a", "user b", "assistant A")},
            [("system", "S"), ("user", "a\n\nb"), ("assistant", "A")],
        ),
        # A question at the end may stay unanswered.
        ({"messages": said("user Q", "assistant A", "user R")}, [*QA, ("user", "R")]),
        # The parts of a task follow its instruction under their names.
        (
            {"task": "json_repair", "input": TASK, "output": [1, 2]},
            [("user", TOLD), ("assistant", "[1,2]")],
        ),
        (
            {"task": "text_to_schema", "input": {"description": "A port"}, "output": "{}"},
            [("user", "Description:\nA port"), ("assistant", "{}")],
        ),
        ({"task": "t", "input": "Q", "output": "A"}, QA),
    ],
)
def test_a_row_of_any_shape_becomes_a_conversation(row, turns):
    assert turns_of(row) == turns


@each(
    ("column", "material", "label"),
    [
        ("input", "CREATE TABLE t (a INT)", "Schema"),
        ("context", "CREATE TABLE t (a INT)", "Schema"),
        ("db_Schema", "t(a INT)", "Schema"),
        ("input", "a text", "Input"),
    ],
)
def test_the_input_block_is_labelled_by_its_text_and_its_column(column, material, label):
    row = {"question": "Q", column: material, "answer": "A"}
    mapping = FieldMapping(input=column)
    assert turns_of(row, field_mapping=mapping)[0] == ("user", f"Q\n\n{label}:\n{material}")


@each(
    ("answer", "text"),
    [({"a": [1, "ä"]}, '{"a":[1,"ä"]}'), ([1, 2], "[1,2]"), ([{"x": 1}], '[{"x":1}]'), ([], "[]")],
)
def test_objects_and_lists_are_trained_on_as_json_only_where_that_is_asked_for(answer, text):
    row = {"instruction": "Q", "output": answer}
    assert turns_of(row, json_values=True)[1] == ("assistant", text)
    kind = "a list" if isinstance(answer, list) else "an object"
    told = f"column 'output' holds {kind}, not text  (name another column in training.dataset."
    assert reason_of(row).startswith(told)
    assert reason_of(row).endswith("training.dataset.json_values: true)")


@each(
    "answer",
    [
        {"role": "assistant", "content": "A"},
        [{"from": "gpt", "value": "A"}],
        {"role": "assistant", "content": {"type": "text", "value": "A"}},
        {"type": "text", "value": "A"},
        [{"type": "text", "text": "A"}],
    ],
)
def test_an_answer_of_a_known_shape_is_what_it_says(answer):
    assert turns_of({"prompt": "Q", "completion": answer}) == [("user", "Q"), ("assistant", "A")]
    mapped = turns_of(
        {"prompt": "Q", "x": answer}, field_mapping=FieldMapping(instruction="prompt", response="x")
    )
    assert mapped == [("user", "Q"), ("assistant", "A")]


@each(
    ("row", "reason"),
    [
        ({"instruction": "Q"}, "column 'output' is missing; columns found: instruction"),
        ({"output": "A"}, "column 'instruction' is missing; columns found: output"),
        ({"instruction": "Q", "output": None}, "column 'output' is null"),
        ({"instruction": None, "output": "A"}, "column 'instruction' is null"),
        ({"instruction": "Q", "output": ""}, "column 'output': the answer is empty"),
        ({"instruction": " ", "output": "A"}, "column 'instruction': the request is empty"),
        ({"instruction": "Q", "output": math.nan}, "column 'output' holds NaN, not text"),
        (
            {"instruction": "Q", "output": True},
            "column 'output' holds true, not text; write what the model is to answer in words",
        ),
        (
            {"instruction": "Q", "output": date(2024, 1, 2)},
            "column 'output' holds a date, not text",
        ),
        (
            {"instruction": "Q", "input": True, "output": "A"},
            "column 'input' holds true, not text; write what the model is to answer in words",
        ),
    ],
)
def test_an_instruction_row_that_cannot_be_used_says_why(row, reason):
    assert reason_of(row, INSTRUCTION) == reason


def test_a_bad_row_shows_its_beginning_only_and_a_completion_that_is_no_answer_is_one():
    bad = example_of(Row({"output": "x" * 5000}, "a.jsonl", 3), INSTRUCTION)
    assert isinstance(bad, BadRow)
    assert bad.raw == '{"output": "' + "x" * 488
    assert str(bad) == "a.jsonl:3: column 'instruction' is missing; columns found: output"
    row = {"prompt": "Q", "completion": said("user A")}
    assert reason_of(row) == "column 'completion': the last message is not an answer"


def test_several_turns_keep_their_order_and_every_name_of_a_role_is_known():
    names = ["system", "human", "gpt", "user", "bot", "user", "model", "user", "assistant"]
    row = {"messages": [{"role": name, "content": f"{n}"} for n, name in enumerate(names)]}
    assert turns_of(row) == [(ROLES[name], f"{n}") for n, name in enumerate(names)]


UNASKED = "an answer without a user turn before it  (remove it, or add the request)"


@each(
    ("messages", "reason"),
    [
        (None, "column 'messages' is null"),
        ("text", "column 'messages' holds text, not messages"),
        (said("user Q"), "there is no assistant turn"),
        (said("assistant A"), f"turn 1: {UNASKED}"),
        (said("system S", "assistant A"), f"turn 2: {UNASKED}"),
        (said("user Q", "assistant A", "assistant B"), "turn 3: two answers in a row"),
        (said("user Q", "system S", "assistant A"), "turn 2: a system turn that is not the first"),
        (said("user  ", "assistant A"), "turn 1 (user) is empty"),
        (said("user Q", "assistant \n"), "turn 2 (assistant) is empty"),
        (
            said("user Q", "tool T"),
            "turn 2: a tool result without a call before it  (write the call",
        ),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}],
            "messages[1]: a tool call has no name",
        ),
        (said("critic Q"), f"messages[1]: unknown role 'critic'  (known: {', '.join(ROLES)})"),
        ([{"content": "Q"}], "messages[1]: no 'role' or 'from'; its fields: content"),
        (["Q"], "messages[1] is text, not a message"),
        ([{"role": "user"}], "messages[1]: no content; its fields: role"),
        ([{"role": "user", "content": 3}], "messages[1]: the content is a number"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "messages[1]: a part of type 'image_url'; only text is trained on",
        ),
    ],
)
def test_a_conversation_that_cannot_be_used_says_why(messages, reason):
    assert reason_of({"messages": messages}, MESSAGES).startswith(reason)

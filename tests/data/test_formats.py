"""Every shape of row ends as the same example, and what cannot is refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.data.columns import PREFERENCE, Columns, understand_columns
from expert.data.formats import ROLES, example_of
from expert.data.records import BadRow, DataError, Example, Row, Turn
from expert.manifest.dataset import FieldMapping

REAL_DATA = Path(__file__).parents[3] / "shared" / "data"
REAL_FILES = (
    "json/train.jsonl",
    "json/test.jsonl",
    "json/corpus.jsonl",
    "sql/train.jsonl",
    "sql/test.jsonl",
    "cypher/train.jsonl",
    "cypher/test.jsonl",
    "alpaca/alpaca_libre.jsonl",
)
# Five answers are nothing but line breaks.
REAL_EMPTY_ANSWERS = {
    ("alpaca/alpaca_libre.jsonl", line) for line in (1194, 1195, 1197, 1461, 2162)
}


def understood(values: dict[str, Any], **asked: Any) -> Example | BadRow:
    columns = understand_columns(list(values), values, **asked)
    return example_of(Row(values, "rows.jsonl", 7), columns)


def turns_of(values: dict[str, Any], **asked: Any) -> list[tuple[str, str]]:
    example = understood(values, **asked)
    assert isinstance(example, Example), example
    assert example.text == ""
    return [(turn.role, turn.text) for turn in example.turns]


def reason_of(values: dict[str, Any], columns: Columns | None = None) -> str:
    if columns is None:
        columns = understand_columns(list(values), values)
    bad = example_of(Row(values, "rows.jsonl", 7), columns)
    assert isinstance(bad, BadRow), bad
    assert (bad.file, bad.line) == ("rows.jsonl", 7)
    assert bad.raw[:500] == bad.raw != ""
    return bad.reason


INSTRUCTION = Columns("instruction", instruction="instruction", input="input", response="output")
TEXT = Columns("text", text="text")
MESSAGES = Columns("messages", messages="messages")
TASKS = Columns("multi_task", input="input", response="output")


# Which column is what


@pytest.mark.parametrize(
    ("names", "instruction", "response", "material"),
    [
        ("instruction input output", "instruction", "output", "input"),
        ("instruction response", "instruction", "response", ""),
        ("prompt completion", "prompt", "completion", ""),
        ("question context answer", "question", "answer", "context"),
        ("question schema cypher", "question", "cypher", "schema"),
        ("sql_prompt sql", "sql_prompt", "sql", ""),
        ("text sql", "text", "sql", ""),
        ("instruction text", "instruction", "text", ""),
        ("instruction input output text", "instruction", "output", "input"),
        ("input output", "input", "output", ""),
        ("answer question instruction id", "instruction", "answer", ""),
        ("question reply", "question", "reply", ""),
        ("query answer", "query", "answer", ""),
        ("request response", "request", "response", ""),
        ("user assistant", "user", "assistant", ""),
        ("human assistant", "human", "assistant", ""),
        ("user input output", "input", "output", ""),
        ("Question Answer", "Question", "Answer", ""),
        ("PROMPT Completion", "PROMPT", "Completion", ""),
        ("Question Context answer", "Question", "answer", "Context"),
        ("Question question answer", "question", "answer", ""),
    ],
)
def test_columns_are_chosen_by_name_in_a_fixed_order(names, instruction, response, material):
    columns = understand_columns(names.split(), {})
    assert columns == Columns(
        "instruction", instruction=instruction, response=response, input=material
    )


@pytest.mark.parametrize(
    ("names", "columns"),
    [
        ("text path", Columns("text", text="text")),
        ("messages prompt", Columns("messages", messages="messages")),
        ("id conversations system", Columns("messages", messages="conversations", system="system")),
        ("text user", Columns("text", text="text")),
        ("Text", Columns("text", text="Text")),
        ("Messages System", Columns("messages", messages="Messages", system="System")),
        ("Task Input Output", Columns("multi_task", input="Input", response="Output")),
        ("task input output", TASKS),
        (
            "system instruction output",
            Columns("instruction", instruction="instruction", response="output", system="system"),
        ),
    ],
)
def test_other_kinds_of_rows_are_known_by_their_columns(names, columns):
    assert understand_columns(names.split(), {}) == columns


@pytest.mark.parametrize(
    ("names", "columns"),
    [
        ("text query", Columns("text", text="text")),
        ("query text", Columns("text", text="text")),
        ("text request", Columns("text", text="text")),
        ("text reply", Columns("text", text="text")),
        ("user assistant text", Columns("text", text="text")),
        ("human assistant text", Columns("text", text="text")),
        ("Question Answer text", Columns("text", text="text")),
        ("prompt text sql", Columns("instruction", instruction="prompt", response="text")),
        ("text sql_prompt sql", Columns("instruction", instruction="text", response="sql")),
        ("text query answer", Columns("instruction", instruction="text", response="answer")),
        ("query input output", Columns("instruction", instruction="input", response="output")),
    ],
)
def test_further_names_change_nothing_where_the_usual_ones_are_enough(names, columns):
    assert understand_columns(names.split(), {}) == columns


def test_blanks_around_the_name_of_a_column_do_not_hide_it():
    columns = understand_columns(["Question", " Answer "], {})
    assert columns == Columns("instruction", instruction="Question", response=" Answer ")


def test_an_object_as_input_makes_a_multi_task_row_without_a_task_column():
    assert understand_columns(["input", "output"], {"input": {"text": "x"}}) == TASKS


def test_a_messages_column_that_holds_text_is_no_conversation():
    names = ["messages", "question", "answer"]
    assert understand_columns(names, {"messages": "3"}).kind == "instruction"


def test_mapped_columns_win_over_the_automatic_choice():
    mapping = FieldMapping(instruction="b", response="a", input="c")
    names = ["instruction", "output", "a", "b", "c"]
    assert understand_columns(names, {}, mapping=mapping) == Columns(
        "instruction", instruction="b", response="a", input="c"
    )


def test_columns_that_are_not_mapped_are_chosen_among_the_others():
    mapping = FieldMapping(response="prompt")
    assert understand_columns(["prompt", "question"], {}, mapping=mapping) == Columns(
        "instruction", instruction="question", response="prompt"
    )


@pytest.mark.parametrize(
    "asked",
    [
        {"mapping": FieldMapping(text="body")},
        {"text_field": "body"},
        {"mapping": FieldMapping(text="body"), "text_field": "body"},
    ],
)
def test_a_text_column_named_in_the_manifest_wins_over_everything(asked):
    names = ["instruction", "output", "body", "messages"]
    assert understand_columns(names, {}, **asked) == Columns("text", text="body")


def test_a_part_mapped_to_its_own_name_may_be_absent():
    mapping = FieldMapping(instruction="instruction", response="response", text="text")
    assert understand_columns(["prompt", "completion"], {}, mapping=mapping) == Columns(
        "instruction", instruction="prompt", response="completion"
    )


def test_mapped_columns_of_preference_rows_are_taken_as_asked():
    mapping = FieldMapping(instruction="prompt", response="chosen")
    columns = understand_columns(["prompt", "chosen", "rejected"], {}, mapping=mapping)
    assert columns.response == "chosen"


@pytest.mark.parametrize(
    ("names", "asked", "text"),
    [
        (
            "a b",
            {},
            "no column holds the request (looked for instruction, prompt, question, text, "
            "sql_prompt, query, request, user, human) and no column holds the answer (looked for "
            "response, output, answer, completion, text, cypher, sql, reply, assistant); columns "
            "found: a, b  (name them in "
            "training.dataset.field_mapping: instruction and response, or text where the rows "
            "are already formatted)",
        ),
        (
            "question b",
            {},
            "no column holds the answer (looked for response, output, answer, completion, text, "
            "cypher, sql, reply, assistant); columns found: question, b  (name them in "
            "training.dataset.field_mapping: instruction and response, or text where the rows "
            "are already formatted)",
        ),
        ("prompt chosen rejected", {}, f"{PREFERENCE}  (columns found: prompt, chosen, rejected)"),
        (
            "a b",
            {"mapping": FieldMapping(instruction="c")},
            "training.dataset.field_mapping.instruction: there is no column 'c'  "
            "(columns found: a, b)",
        ),
        (
            "a b",
            {"text_field": "c"},
            "training.dataset.text_field: there is no column 'c'  (columns found: a, b)",
        ),
        (
            "a b",
            {"mapping": FieldMapping(text="a"), "text_field": "b"},
            "training.dataset: text_field is 'b' and field_mapping.text is 'a'  (keep one of them)",
        ),
        (
            "a b",
            {"mapping": FieldMapping(text="a", response="b")},
            "training.dataset.field_mapping: either text, or instruction and response  "
            "(columns found: a, b)",
        ),
    ],
)
def test_rows_nobody_understands_are_refused_with_the_columns_and_what_to_set(names, asked, text):
    with pytest.raises(DataError) as caught:
        understand_columns(names.split(), {}, **asked)
    assert str(caught.value) == text


def test_no_columns_at_all_are_told_as_none():
    with pytest.raises(DataError, match="columns found: none"):
        understand_columns([], {})


# Instruction rows


def test_an_instruction_row_becomes_a_question_and_an_answer():
    row = {"instruction": "Name all rivers", "input": "", "response": "SELECT name FROM river"}
    assert turns_of(row) == [("user", "Name all rivers"), ("assistant", "SELECT name FROM river")]


@pytest.mark.parametrize(
    ("column", "material", "label"),
    [
        ("input", "CREATE TABLE t (a INT)", "Schema"),
        ("context", "CREATE TABLE t (a INT)", "Schema"),
        ("db_Schema", "t(a INT)", "Schema"),
        ("my_context", "a text", "Context"),
        ("input", "a text", "Input"),
        ("body", "a text", "Input"),
    ],
)
def test_the_input_block_is_labelled_by_its_text_and_its_column(column, material, label):
    row = {"question": "Q", column: material, "answer": "A"}
    mapping = FieldMapping(input=column)
    assert turns_of(row, mapping=mapping)[0] == ("user", f"Q\n\n{label}:\n{material}")


@pytest.mark.parametrize("blank", ["", "  \n", None])
def test_a_blank_input_or_system_makes_no_block_and_no_turn(blank):
    row = {"instruction": "Q", "input": blank, "output": "A", "system": blank}
    assert turns_of(row) == [("user", "Q"), ("assistant", "A")]


def test_a_row_without_a_request_asks_with_its_input():
    assert turns_of({"instruction": "", "input": "X", "output": "A"})[0] == ("user", "X")


def test_the_system_column_becomes_the_system_turn():
    row = {"instruction": "Q", "output": "A", "system": "S"}
    assert turns_of(row) == [("system", "S"), ("user", "Q"), ("assistant", "A")]


def test_texts_are_kept_to_the_last_blank():
    row = {"instruction": " Q\n", "output": "A \n\n"}
    assert turns_of(row) == [("user", " Q\n"), ("assistant", "A \n\n")]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"a": [1, "ä"]}, '{"a":[1,"ä"]}'),
        ([1, 2], "[1,2]"),
        ([{"x": 1}], '[{"x":1}]'),
        (3, "3"),
        (2.5, "2.5"),
        ([], "[]"),
    ],
)
def test_numbers_objects_and_lists_as_answers_become_json(answer, text):
    assert turns_of({"instruction": "Q", "output": answer})[1] == ("assistant", text)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"instruction": "Q"},
            "column 'output' is missing; columns found: instruction",
        ),
        ({"output": "A"}, "column 'instruction' is missing; columns found: output"),
        ({"instruction": "Q", "output": None}, "column 'output' is null"),
        ({"instruction": None, "output": "A"}, "column 'instruction' is null"),
        ({"instruction": "Q", "output": ""}, "column 'output': the answer is empty"),
        ({"instruction": "Q", "output": " \n\t"}, "column 'output': the answer is empty"),
        ({"instruction": " ", "output": "A"}, "column 'instruction': the request is empty"),
        ({"instruction": "Q", "output": True}, "column 'output' holds true, not text"),
        ({"instruction": "Q", "output": False}, "column 'output' holds false, not text"),
        ({"instruction": "Q", "output": float("nan")}, "column 'output' holds a number, not text"),
        (
            {"instruction": "Q", "output": date(2024, 1, 2)},
            "column 'output' holds a date, not text",
        ),
        (
            {"instruction": "Q", "output": {"when": date(2024, 1, 2)}},
            "column 'output' holds an object, not text",
        ),
        (
            {"instruction": "Q", "input": True, "output": "A"},
            "column 'input' holds true, not text",
        ),
        ({"instruction": "Q", "chosen": "A", "rejected": "B"}, PREFERENCE),
    ],
)
def test_an_instruction_row_that_cannot_be_used_says_why(row, reason):
    assert reason_of(row, INSTRUCTION) == reason


def test_a_bad_row_shows_its_beginning_only():
    bad = example_of(Row({"output": "x" * 5000}, "a.jsonl", 3), INSTRUCTION)
    assert isinstance(bad, BadRow)
    assert bad.raw == '{"output": "' + "x" * 488
    assert str(bad) == "a.jsonl:3: column 'instruction' is missing; columns found: output"


# Prompt and completion


def test_prompt_and_completion_may_be_lists_of_messages():
    row = {
        "prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}],
        "completion": [{"role": "assistant", "content": "A"}],
    }
    assert turns_of(row) == [("system", "S"), ("user", "Q"), ("assistant", "A")]


def test_a_list_of_messages_and_a_text_go_together():
    row = {"prompt": [{"role": "user", "content": "Q"}], "completion": "A"}
    assert turns_of(row) == [("user", "Q"), ("assistant", "A")]


def test_a_completion_that_is_no_answer_is_refused():
    row = {"prompt": "Q", "completion": [{"role": "user", "content": "A"}]}
    assert reason_of(row) == "column 'completion': the last message is not an answer"


# Messages and ShareGPT


def test_several_turns_keep_their_order_and_every_name_of_a_role_is_known():
    names = ["system", "human", "gpt", "user", "bot", "user", "model", "user", "assistant"]
    row = {"messages": [{"role": name, "content": f"{n}"} for n, name in enumerate(names)]}
    assert turns_of(row) == [(ROLES[name], f"{n}") for n, name in enumerate(names)]


def test_sharegpt_rows_are_conversations_too():
    row = {
        "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}],
        "system": "S",
    }
    assert turns_of(row) == [("system", "S"), ("user", "Q"), ("assistant", "A")]


def test_the_system_turn_of_a_conversation_wins_over_the_system_column():
    said = [
        {"role": "system", "content": "inner"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
    ]
    assert turns_of({"messages": said, "system": "outer"})[0] == ("system", "inner")


def test_text_parts_of_a_message_are_joined():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}, "c"]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "A"}]}
    assert turns_of(row)[0] == ("user", "a bc")


def test_an_empty_system_message_is_left_out():
    said = [
        {"role": "system", "content": " "},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
    ]
    assert turns_of({"messages": said}) == [("user", "Q"), ("assistant", "A")]


def test_a_question_at_the_end_may_stay_unanswered():
    said = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "Thanks"},
    ]
    assert turns_of({"messages": said})[-1] == ("user", "Thanks")


def said(*turns: str) -> list[dict[str, Any]]:
    """Messages from "role text" pairs."""
    return [dict(zip(("role", "content"), turn.split(" ", 1), strict=True)) for turn in turns]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "column 'messages' is null"),
        ("text", "column 'messages' holds text, not messages"),
        ([], "there is no assistant turn"),
        (said("user Q"), "there is no assistant turn"),
        (said("assistant A"), "turn 1: an answer to no user turn"),
        (said("system S", "assistant A"), "turn 2: an answer to no user turn"),
        (said("user Q", "assistant A", "assistant B"), "turn 3: two answers in a row"),
        (said("user Q", "user R", "assistant A"), "turn 2: two user turns in a row"),
        (said("user Q", "system S", "assistant A"), "turn 2: a system turn that is not the first"),
        (said("user  ", "assistant A"), "turn 1 (user) is empty"),
        (said("user Q", "assistant \n"), "turn 2 (assistant) is empty"),
        (said("user Q", "tool T"), "messages[2]: tool messages are not supported"),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}],
            "messages[1]: tool messages are not supported",
        ),
        (
            said("critic Q"),
            "messages[1]: unknown role 'critic'  (known: system, user, human, assistant, gpt, bot, "
            "model)",
        ),
        (
            [{"content": "Q"}],
            "messages[1]: unknown role None  (known: system, user, human, assistant, gpt, bot, "
            "model)",
        ),
        (["Q"], "messages[1] is text, not a message"),
        ([{"role": "user"}], "messages[1]: has no content"),
        ([{"role": "user", "content": 3}], "messages[1]: the content is a number"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "messages[1]: a part of type 'image_url'; only text is learnt",
        ),
        (
            [{"role": "user", "content": [4]}],
            "messages[1]: a part of type 'int'; only text is learnt",
        ),
    ],
)
def test_a_conversation_that_cannot_be_used_says_why(messages, reason):
    assert reason_of({"messages": messages}, MESSAGES) == reason


def test_a_row_without_its_messages_says_which_columns_it_has():
    assert reason_of({"a": 1}, MESSAGES) == "column 'messages' is missing; columns found: a"


# Text


def test_plain_text_is_learnt_as_it_stands():
    assert understood({"text": "First Citizen:\nSpeak.\n"}) == Example(
        text="First Citizen:\nSpeak.\n"
    )


def test_other_special_tokens_do_not_make_a_text_a_conversation():
    assert understood({"text": "a <|endoftext|> b <| c"}) == Example(text="a <|endoftext|> b <| c")


THREE_TURNS = [("system", "Dialect: sql"), ("user", "All of t"), ("assistant", "SELECT 1;")]


def as_chatml(turns, newline="\n"):
    return "".join(f"<|im_start|>{role}{newline}{text}<|im_end|>{newline}" for role, text in turns)


def as_legacy(turns, newline="\n"):
    return newline.join(f"<|{role}|>{newline}{text}{newline}<|end|>" for role, text in turns)


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("write", [as_chatml, as_legacy])
def test_marked_text_is_taken_apart_on_any_line_ending(write, newline):
    assert turns_of({"text": write(THREE_TURNS, newline)}) == THREE_TURNS


def test_line_breaks_inside_a_turn_stay_as_they_are():
    turns = [("user", "a\r\nb"), ("assistant", "\nc\n\nd\n")]
    assert turns_of({"text": as_legacy(turns, "\r\n")}) == turns
    assert turns_of({"text": as_chatml(turns, "\r\n")}) == turns


def test_legacy_markers_need_no_line_breaks():
    text = " <|user|>Q<|end|><|assistant|>A<|end|><|endoftext|>\n"
    assert turns_of({"text": text}) == [("user", "Q"), ("assistant", "A")]


def test_chatml_may_end_with_an_end_of_text_and_name_roles_otherwise():
    text = "<|im_start|>human\nQ<|im_end|>\n<|im_start|>gpt\nA<|im_end|><|endoftext|>"
    assert turns_of({"text": text}) == [("user", "Q"), ("assistant", "A")]


def test_a_thought_is_part_of_the_answer():
    answer = "<think>\nA plain read.\n</think>\nSELECT 1;"
    assert turns_of({"text": as_chatml([("user", "Q"), ("assistant", answer)])})[1][1] == answer


def test_markers_of_the_other_kind_are_only_text_inside_a_turn():
    turns = [("user", "What is <|end|>?"), ("assistant", "A marker.")]
    assert turns_of({"text": as_chatml(turns)}) == turns
    turns = [("user", "What is <|im_end|>?"), ("assistant", "A marker.")]
    assert turns_of({"text": as_legacy(turns)}) == turns


bodies = st.text(min_size=1).filter(
    lambda text: text.strip() and "<|" not in text and not text.endswith("\r")
)


@given(question=bodies, answer=bodies, system=bodies)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("write", [as_chatml, as_legacy])
def test_what_was_written_with_markers_is_read_back(write, newline, question, answer, system):
    turns = [("system", system), ("user", question), ("assistant", answer)]
    assert turns_of({"text": write(turns, newline)}) == turns


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "column 'text' is null"),
        (4, "column 'text' holds a number, not text"),
        ("", "column 'text': the text is empty"),
        (" \n", "column 'text': the text is empty"),
        (
            "Hello <|user|>\nQ\n<|end|>",
            "the text has turn markers (<|user|>) but does not begin with one",
        ),
        ("a <|im_end|>", "the text has turn markers (<|im_end|>) but does not begin with one"),
        ("<|end|>\n", "the text has turn markers (<|end|>) but does not begin with one"),
        ("<|im_start|>user\nQ", "ChatML turn 1: <|im_end|> is missing"),
        (
            "<|im_start|>user\nQ<|im_start|>assistant\nA<|im_end|>",
            "ChatML turn 1: <|im_end|> is missing",
        ),
        (
            "<|im_start|>user Q<|im_end|>",
            "ChatML turn 1: no role and line break after <|im_start|>",
        ),
        (
            "<|im_start|>user\nQ<|im_end|>\nstray\n<|im_start|>assistant\nA<|im_end|>",
            "text outside the turns: 'stray'",
        ),
        ("<|im_start|>tool\nQ<|im_end|>", "tool messages are not supported"),
        (
            "<|im_start|>critic\nQ<|im_end|>",
            "unknown role 'critic'  (known: system, user, human, assistant, gpt, bot, model)",
        ),
        ("<|user|>\nQ\n", "turn 1 (<|user|>): <|end|> is missing"),
        ("<|user|>\nQ\n<|assistant|>\nA\n<|end|>", "turn 1 (<|user|>): <|end|> is missing"),
        ("<|user|>\nQ\n<|end|>\n<|end|>", "<|end|> without a turn before it"),
        ("<|user|>\nQ\n<|end|>\n<|assistant|>\n\n<|end|>", "turn 2 (assistant) is empty"),
        ("<|user|>\nQ\n<|end|>stray<|assistant|>A<|end|>", "text outside the turns: 'stray'"),
        ("<|user|>\nQ\n<|end|>", "there is no assistant turn"),
    ],
)
def test_a_text_that_cannot_be_used_says_why(text, reason):
    assert reason_of({"text": text}, TEXT) == reason


def test_a_row_without_its_text_says_which_columns_it_has():
    assert reason_of({"a": 1}, TEXT) == "column 'text' is missing; columns found: a"


# Multi-task rows


def test_the_parts_of_a_task_follow_its_instruction_under_their_names():
    row = {
        "task": "json_repair",
        "input": {
            "broken_json": "[1 2]",
            "instruction": "Repair it, JSON only.",
            "error_type": "missing_comma_array",
            "schema": {"type": "array"},
            "text": "",
        },
        "output": [1, 2],
    }
    assert turns_of(row) == [
        (
            "user",
            'Repair it, JSON only.\n\nBroken json:\n[1 2]\n\nSchema:\n{"type":"array"}',
        ),
        ("assistant", "[1,2]"),
    ]


def test_the_description_of_a_task_is_not_lost():
    row = {"task": "text_to_schema", "input": {"description": "A port"}, "output": "{}"}
    assert turns_of(row)[0] == ("user", "Description:\nA port")


def test_the_input_of_a_task_may_be_text():
    assert turns_of({"task": "t", "input": "Q", "output": "A"})[0] == ("user", "Q")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"task": "t", "input": {"instruction": "Q"}, "chosen": "A", "rejected": "B"}, PREFERENCE),
        (
            {"task": "t", "input": "Q"},
            "column 'output' is missing; columns found: task, input",
        ),
        ({"task": "t", "input": None, "output": "A"}, "column 'input' is null"),
        ({"task": "t", "input": "Q", "output": ""}, "column 'output': the answer is empty"),
        (
            {"task": "t", "input": {"error_type": "x"}, "output": "A"},
            "column 'input': the request is empty",
        ),
    ],
)
def test_a_task_that_cannot_be_used_says_why(row, reason):
    assert reason_of(row, TASKS) == reason


# Real rows


def real_rows(name: str) -> Iterator[Row]:
    path = REAL_DATA / name
    if not path.is_file():
        pytest.skip(f"shared/data/{name} is not here")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            yield Row(json.loads(line), name, number)


def real_examples(name: str) -> Iterator[tuple[Row, Example]]:
    rows = real_rows(name)
    first = next(rows)
    columns = understand_columns(list(first.values), first.values)
    for row in (first, *rows):
        example = example_of(row, columns)
        if (name, row.line) in REAL_EMPTY_ANSWERS:
            assert isinstance(example, BadRow)
            assert example.reason == "column 'output': the answer is empty"
            continue
        assert isinstance(example, Example), example
        yield row, example


@pytest.mark.parametrize("name", REAL_FILES)
def test_every_real_row_gives_an_example_with_its_own_answer(name):
    count = 0
    for row, example in real_examples(name):
        *before, answer = example.turns
        assert answer.role == "assistant"
        assert [turn.role for turn in before] in (["user"], ["system", "user"])
        if "output" in row.values:
            assert answer == Turn("assistant", row.values["output"])
        else:
            assert row.values["text"].endswith(f"<|assistant|>\n{answer.text}\n<|end|>")
        count += 1
    assert count > 300


def test_real_plain_text_stays_plain():
    for row in real_rows("typescript/handbook_text.jsonl"):
        assert example_of(row, TEXT) == Example(text=row.values["text"])

"""Which column holds what: by the manifest, else by name; refused if that is not clear."""

from __future__ import annotations

from dataclasses import replace

import pytest

from expert.data.examples.columns import Columns, detect_columns
from expert.data.records import DataError
from expert.manifest.schema.dataset import DatasetSpec, FieldMapping
from tests.data.examples.understood import TASKS, surveyed, understand
from tests.each import each

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@each(
    ("names", "instruction", "response", "material"),
    [
        ("instruction input output", "instruction", "output", "input"),
        ("instruction response", "instruction", "response", ""),
        ("prompt completion", "prompt", "completion", ""),
        ("question context answer", "question", "answer", "context"),
        ("question schema cypher", "question", "cypher", "schema"),
        ("sql_prompt sql", "sql_prompt", "sql", ""),
        ("instruction text", "instruction", "text", ""),
        ("instruction input output text", "instruction", "output", "input"),
        ("input output", "input", "output", ""),
        ("query answer", "query", "answer", ""),
        ("user assistant", "user", "assistant", ""),
        ("user input output", "input", "output", ""),
        ("Question Answer", "Question", "Answer", ""),
        ("Question Context answer", "Question", "answer", "Context"),
        ("Question question answer", "question", "answer", ""),
    ],
)
def test_columns_are_chosen_by_name_in_a_fixed_order(names, instruction, response, material):
    columns = understand(names.split(), {})
    assert columns == Columns(
        "instruction", instruction=instruction, response=response, input=material
    )


@each(
    ("names", "columns"),
    [
        ("text path", Columns("text", text="text")),
        ("messages prompt", Columns("messages", messages="messages")),
        ("id conversations system", Columns("messages", messages="conversations", system="system")),
        ("Text", Columns("text", text="Text")),
        ("Messages System", Columns("messages", messages="Messages", system="System")),
        ("Task Input Output", Columns("multi_task", input="Input", response="Output")),
        ("task input output", TASKS),
        (
            "system instruction output",
            Columns("instruction", instruction="instruction", response="output", system="system"),
        ),
        # Further names change nothing where the usual ones are enough.
        ("query text", Columns("text", text="text")),
        ("user assistant text", Columns("text", text="text")),
        ("Question Answer text", Columns("text", text="text")),
        ("prompt text sql", Columns("instruction", instruction="prompt", response="text")),
        ("text query answer", Columns("instruction", instruction="text", response="answer")),
        ("query input output", Columns("instruction", instruction="input", response="output")),
    ],
)
def test_other_kinds_of_rows_are_known_by_their_columns(names, columns):
    assert understand(names.split(), {}) == columns


def exchange(instruction: str, response: str, input: str = "") -> Columns:
    return Columns("instruction", instruction=instruction, response=response, input=input)


BODY = Columns("text", text="body")


@each(
    ("names", "asked", "columns"),
    [
        # Blanks around the name of a column do not hide it.
        (["Question", " Answer "], {}, exchange("Question", " Answer ")),
        # Mapped columns win over the automatic choice; the others are chosen among the rest.
        ("instruction output a b c", {"instruction": "b", "response": "a", "input": "c"},
         exchange("b", "a", "c")),
        ("prompt question", {"response": "prompt"}, exchange("question", "prompt")),
        # A part mapped to its own name may be absent.
        ("prompt completion",
         {"instruction": "instruction", "response": "response", "text": "text"},
         exchange("prompt", "completion")),
        # Mapped columns of preference rows are taken as asked.
        ("prompt chosen rejected", {"instruction": "prompt", "response": "chosen"},
         exchange("prompt", "chosen")),
        # A text column that is named wins over everything.
        ("instruction output body messages", {"text": "body"}, BODY),
        ("instruction output body messages", {"text_field": "body"}, BODY),
    ],
)  # fmt: skip
def test_columns_that_the_manifest_names_are_taken(names, asked, columns):
    mapping = FieldMapping.model_validate({k: v for k, v in asked.items() if k != "text_field"})
    given = names.split() if isinstance(names, str) else names
    text_field = asked.get("text_field")
    assert understand(given, {}, field_mapping=mapping, text_field=text_field) == columns


@each(
    ("row", "part", "column"),
    [
        # An object as input makes a row of a task without a task column.
        ({"input": {"text": "x"}, "output": "y"}, "kind", "multi_task"),
        # A messages column that holds text is not a conversation.
        ({"messages": "3", "question": "Q", "answer": "A"}, "kind", "instruction"),
        # The system text of OpenOrca; a column named speech may hold text.
        ({"system_prompt": "S", "question": "Q", "response": "A"}, "system", "system_prompt"),
        ({"speech": "Friends, Romans", "question": "Q", "answer": "A"}, "response", "answer"),
    ],
)
def test_what_a_column_holds_decides_too(row, part, column):
    assert getattr(understand(list(row), row), part) == column


@each(
    ("names", "asked", "text"),
    [
        ("a b", {}, "no column holds the request (looked for instruction, prompt,"),
        ("question b", {}, "no column holds the answer (looked for response, output,"),
        (
            "a b",
            {"field_mapping": FieldMapping(instruction="c")},
            "training.dataset.field_mapping.instruction: there is no column",
        ),
        (
            "a b",
            {"text_field": "c"},
            "training.dataset.text_field: there is no column 'c'  (columns found: a, b)",
        ),
        (
            "a b",
            {"field_mapping": FieldMapping(text="a", response="b")},
            "training.dataset.field_mapping: either text, or messages, or",
        ),
    ],
)
def test_rows_with_unknown_columns_are_refused_with_a_fix(names, asked, text):
    with pytest.raises(DataError) as caught:
        understand(names.split(), {}, **asked)
    assert text in str(caught.value)
    with pytest.raises(DataError, match="columns found: none"):
        understand([], {})


@each("label", [True, False, "True", "false"])
@each("names", ["prompt completion label", "messages label", "messages kto_tag"])
def test_rows_with_good_and_bad_answers_are_refused(names, label):
    columns = names.split()
    row = {**dict.fromkeys(columns, "a"), columns[-1]: label}
    row |= {"messages": [{"role": "user", "content": "a"}]} if "messages" in row else {}
    words = f"the column '{columns[-1]}' says of each answer whether it is good.*preference_rows"
    mapped = {"messages": "messages"} if "messages" in row else {"response": "completion"}
    for mapping in (None, FieldMapping.model_validate(mapped)):
        with pytest.raises(DataError, match=words):
            understand(columns, row, field_mapping=mapping)
    assert understand(columns, row, preference_rows="preferred").label == columns[-1]
    assert understand(columns, row, preference_rows="all").label == ""


@each(
    "row",
    [
        {"messages": [{"role": "user", "content": "<image>a"}], "images": ["a.png"]},
        {"question": "a", "answer": "b", "photo": {"bytes": b"x", "path": None}},
        {"text": "a", "audio": {"array": [0.1], "sampling_rate": 16000}},
    ],
)
def test_rows_with_media_are_refused_by_the_column_that_holds_them(row):
    column = list(row)[-1]
    with pytest.raises(DataError, match=f"the column '{column}' holds images, video or audio"):
        understand(list(row), row)
    understand(list(row), {**row, column: None})


@each(
    ("row", "mapping"),
    [
        ({"messages": TALK, "more": "b"}, {"input": "more"}),
        ({"q": "a", "more": "b"}, {"text": "q", "system": "more"}),
        ({"task": "t", "input": {"x": "y"}, "output": "z", "more": "b"}, {"input": "more"}),
    ],
)
def test_a_mapped_column_that_such_rows_cannot_have_is_refused(row, mapping):
    part = next(part for part, column in mapping.items() if column == "more")
    with pytest.raises(
        DataError, match=f"field_mapping.{part}: 'more' is not used, since the rows are read as "
    ):
        understand(list(row), row, field_mapping=FieldMapping(**mapping))


@each(
    ("row", "named"),
    [
        ({"messages": TALK, "loss_mask": [0, 1]}, "loss_mask"),
        ({"prompt": "q", "response": "a", "trainable": False}, "trainable"),
        ({"prompt": "q", "response": "a", "label": 1}, "label"),
        ({"task": "translate", "input": "a", "output": "b"}, "task"),
        ({"prompt": "q", "response": "a", "split": "x", "history": "h"}, "split"),
        ({"prompt": "q", "response": "a", "split": "x", "history": "h"}, "history"),
    ],
)
def test_unused_columns_that_matter_are_named(row, named):
    assert f"{named} (filled in 1 of" in understand(list(row), row).unused_warning(surveyed([row]))


def test_single_messages_of_a_tree_are_refused():
    row = {"message_id": "1", "parent_id": None, "role": "prompter", "text": "Hi"}
    with pytest.raises(DataError, match="a single message of a tree"):
        understand(list(row), row)


def test_a_mapped_column_that_the_first_window_of_a_stream_lacks_may_come_later():
    seen = replace(surveyed([{"question": "a", "answer": "b"}]), whole=False)
    mapping = FieldMapping(input="context")
    assert detect_columns(seen, DatasetSpec(field_mapping=mapping)).input == "context"
    with pytest.raises(DataError, match="no column 'reply'"):
        detect_columns(seen, DatasetSpec(field_mapping=FieldMapping(response="reply")))

"""Which column holds what: by the manifest, else by name, and refused where nobody can tell."""

from __future__ import annotations

import pytest

from expert.data.examples.column_survey import ColumnSurvey
from expert.data.examples.columns import Columns, refused_pairs, understand_columns
from expert.data.records import DataError
from expert.manifest.schema.dataset import DatasetSpec, FieldMapping
from tests.data.examples.understood import TASKS, understand
from tests.each import each
from tests.wording import wording


@each(
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
    assert understand(names.split(), {}) == columns


@each(
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
    assert understand(names.split(), {}) == columns


def test_blanks_around_the_name_of_a_column_do_not_hide_it():
    columns = understand(["Question", " Answer "], {})
    assert columns == Columns("instruction", instruction="Question", response=" Answer ")


def test_an_object_as_input_makes_a_multi_task_row_without_a_task_column():
    assert understand(["input", "output"], {"input": {"text": "x"}}) == TASKS


def test_a_messages_column_that_holds_text_is_no_conversation():
    names = ["messages", "question", "answer"]
    assert understand(names, {"messages": "3"}).kind == "instruction"


def test_mapped_columns_win_over_the_automatic_choice():
    mapping = FieldMapping(instruction="b", response="a", input="c")
    names = ["instruction", "output", "a", "b", "c"]
    assert understand(names, {}, field_mapping=mapping) == Columns(
        "instruction", instruction="b", response="a", input="c"
    )


def test_columns_that_are_not_mapped_are_chosen_among_the_others():
    mapping = FieldMapping(response="prompt")
    assert understand(["prompt", "question"], {}, field_mapping=mapping) == Columns(
        "instruction", instruction="question", response="prompt"
    )


@pytest.mark.parametrize(
    "asked",
    [
        {"field_mapping": FieldMapping(text="body")},
        {"text_field": "body"},
        {"field_mapping": FieldMapping(text="body"), "text_field": "body"},
    ],
)
def test_a_text_column_named_in_the_manifest_wins_over_everything(asked):
    names = ["instruction", "output", "body", "messages"]
    assert understand(names, {}, **asked) == Columns("text", text="body")


def test_a_part_mapped_to_its_own_name_may_be_absent():
    mapping = FieldMapping(instruction="instruction", response="response", text="text")
    assert understand(["prompt", "completion"], {}, field_mapping=mapping) == Columns(
        "instruction", instruction="prompt", response="completion"
    )


def test_mapped_columns_of_preference_rows_are_taken_as_asked():
    mapping = FieldMapping(instruction="prompt", response="chosen")
    columns = understand(["prompt", "chosen", "rejected"], {}, field_mapping=mapping)
    assert columns.response == "chosen"


@each(
    ("names", "asked", "text"),
    [
        ("a b", {}, wording("no-column-holds-request")),
        ("question b", {}, wording("no-column-holds-answer")),
        ("prompt chosen rejected", {}, str(refused_pairs("chosen", "rejected"))),
        ("a b", {"field_mapping": FieldMapping(instruction="c")}, wording("no-column-c-columns")),
        ("a b", {"text_field": "c"}, wording("no-column-c")),
        (
            "a b",
            {"field_mapping": FieldMapping(text="a"), "text_field": "b"},
            wording("b-keep-one"),
        ),
        (
            "a b",
            {"field_mapping": FieldMapping(text="a", response="b")},
            wording("either-text-messages-instruction"),
        ),
    ],
)
def test_rows_nobody_understands_are_refused_with_the_columns_and_what_to_set(names, asked, text):
    with pytest.raises(DataError) as caught:
        understand(names.split(), {}, **asked)
    assert str(caught.value) == text


def test_no_columns_at_all_are_told_as_none():
    with pytest.raises(DataError, match="columns found: none"):
        understand([], {})


@each("label", [True, False, "True", "false"])
@each("names", ["prompt completion label", "messages label", "messages kto_tag"])
def test_rows_that_say_which_answers_are_good_are_not_learnt_as_good(names, label):
    columns = names.split()
    row = {**dict.fromkeys(columns, "a"), columns[-1]: label}
    row |= {"messages": [{"role": "user", "content": "a"}]} if "messages" in row else {}
    words = wording("column-says-each-answer", columns=columns[-1])
    mapped = {"messages": "messages"} if "messages" in row else {"response": "completion"}
    for mapping in (None, FieldMapping.model_validate(mapped)):
        with pytest.raises(DataError, match=words):
            understand(columns, row, field_mapping=mapping)
    assert understand(columns, row, preference_rows="preferred").label == columns[-1]
    assert understand(columns, row, preference_rows="all").label == ""


def test_a_label_that_is_a_word_and_columns_that_are_named_are_taken():
    names = ["prompt", "completion", "label"]
    found = understand(names, {"label": "sport"})
    seen = ColumnSurvey.of([{"prompt": "a", "completion": "b", "label": "sport"}])
    assert (found.response, found.unused(seen)) == ("completion", {"label": 1})
    text = understand(["text", "label"], {"text": "a", "label": True})
    seen = ColumnSurvey.of([{"text": "a", "label": True}])
    assert (text.used(), text.unused(seen)) == ({"text": "text"}, {"label": 1})


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "<image>a"}], "images": ["a.png"]},
        {"question": "a", "answer": "b", "Image": "a.png"},
        {"question": "a", "answer": "b", "photo": {"bytes": b"x", "path": None}},
        {"text": "a", "audio": {"array": [0.1], "sampling_rate": 16000}},
    ],
)
def test_rows_with_media_are_refused_by_the_column_that_holds_them(row):
    column = list(row)[-1]
    with pytest.raises(DataError, match=wording("column-holds-images-video", column=column)):
        understand(list(row), row)
    understand(list(row), {**row, column: None})


def test_single_messages_of_a_tree_are_refused():
    row = {"message_id": "1", "parent_id": None, "role": "prompter", "text": "Hi"}
    with pytest.raises(DataError, match=wording("single-message-tree")):
        understand(list(row), row)


def test_the_system_text_of_openorca_is_read():
    row = {"id": "1", "system_prompt": "S", "question": "Q", "response": "A"}
    assert understand(list(row), row).system == "system_prompt"


def test_a_mapped_column_that_the_first_window_of_a_stream_lacks_may_come_later():
    seen = ColumnSurvey.of([{"question": "a", "answer": "b"}], whole=False)
    mapping = FieldMapping(input="context")
    assert understand_columns(seen, DatasetSpec(field_mapping=mapping)).input == "context"
    with pytest.raises(DataError, match="no column 'reply'"):
        understand_columns(seen, DatasetSpec(field_mapping=FieldMapping(response="reply")))


def test_a_column_named_speech_may_hold_text():
    row = {"speech": "Friends, Romans", "question": "Q", "answer": "A"}
    assert understand(list(row), row).response == "answer"


@pytest.mark.parametrize("answer", [{"a": 1}, [1], {"role": "assistant", "content": "A"}])
def test_tokens_of_answers_that_were_trained_on_as_json_text_are_not_used_again(answer):
    """The columns decide whether prepared tokens are used."""
    plain = {"prompt": "Q", "completion": "A"}
    assert "structured" not in str(understand(list(plain), plain))
    rows = {**plain, "completion": answer}
    assert "structured=True" in str(understand(list(rows), rows))

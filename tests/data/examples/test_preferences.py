"""Rows that say which answer is better: refused, both of their answers, or the preferred one."""

from __future__ import annotations

from typing import Any

import pytest

from expert.data.examples.formats import answers_of
from expert.data.records import DataError, Dropped, Row
from expert.manifest.schema.dataset import FieldMapping
from tests.data.examples.understood import example_in, reason_of, turns_of, understand, understood
from tests.each import each

ASKED, GOOD, BAD = "What is 2+2?", "4", "5"
USER = {"role": "user", "content": ASKED}
WHOLE = [USER, {"role": "assistant", "content": GOOD}]
WORSE = [USER, {"role": "assistant", "content": BAD}]

PAIRS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
    "texts with a system text": {"system": "S", "question": ASKED, "chosen": GOOD, "rejected": BAD},
    "a prompt and whole conversations": {"prompt": ASKED, "chosen": WHOLE, "rejected": WORSE},
    "whole conversations alone": {"chosen": WHOLE, "rejected": WORSE},
    "messages on both sides": {"prompt": [USER], "chosen": WHOLE[1:], "rejected": WORSE[1:]},
    "single messages after a conversation": {
        "conversations": [{"from": "human", "value": ASKED}],
        "chosen": {"from": "gpt", "value": GOOD},
        "rejected": {"from": "gpt", "value": BAD},
    },
    "conversations named so": {"chosen_messages": WHOLE, "rejected_messages": WORSE},
    "an instruction": {"instruction": ASKED, "input": "", "chosen": GOOD, "rejected": BAD},
    "of a task": {"task": "t", "input": {"instruction": ASKED}, "chosen": GOOD, "rejected": BAD},
    "OpenAI's": {
        "input": {"messages": [USER], "tools": [], "parallel_tool_calls": True},
        "preferred_output": WHOLE[1:],
        "non_preferred_output": WORSE[1:],
    },
    "transcripts": {
        "chosen": f"\n\nHuman: {ASKED}\n\nAssistant: {GOOD}",
        "rejected": f"\n\nHuman: {ASKED}\n\nAssistant: {BAD}",
    },
    "JSON in texts, as in CSV": {
        "prompt": ASKED,
        "chosen": '[{"role": "assistant", "content": "4"}]',
        "rejected": '[{"role": "assistant", "content": "5"}]',
    },
}


@each("row", PAIRS.values(), ids=PAIRS)
def test_of_a_pair_the_preferred_answer_or_both_follow_the_prompt_where_that_is_asked_for(row):
    for asked in (None, "all"):
        with pytest.raises(DataError, match=r"method: dpo.*preference_rows: preferred"):
            understand(list(row), row, preference_rows=asked)
    prompt = [*([("system", "S")] if "system" in row else []), ("user", ASKED)]
    assert turns_of(row, preference_rows="preferred") == [*prompt, ("assistant", GOOD)]
    columns = understand(list(row), row, preference_rows="pairs")
    pair = answers_of(Row(row, "rows.jsonl", 1), columns)
    assert isinstance(pair, list)
    for example, answer in zip(pair, (GOOD, BAD), strict=True):
        assert example is not None
        said = [(turn.role, turn.text) for turn in example.turns]
        assert said == [*prompt, ("assistant", answer)]


def test_only_the_last_answers_of_a_pair_are_trained_on():
    before = [USER, {"role": "assistant", "content": "3"}]
    row = {"prompt": [*before, USER], "chosen": WHOLE[1:], "rejected": WORSE[1:]}
    pair = answers_of(
        Row(row, "rows.jsonl", 1), understand(list(row), row, preference_rows="pairs")
    )
    assert isinstance(pair, list)
    for example in pair:
        assert example is not None
        assert [turn.in_prompt for turn in example.turns] == [False, True, False, False]


def test_pairs_in_columns_of_any_name_are_mapped():
    row = {"prompt": ASKED, "good": GOOD, "bad": BAD}
    mapping = FieldMapping(response="good", rejected="bad")
    columns = understand(list(row), row, preference_rows="pairs", field_mapping=mapping)
    pair = answers_of(Row(row, "rows.jsonl", 1), columns)
    assert isinstance(pair, list)
    assert [example.turns[-1].text for example in pair if example] == [GOOD, BAD]
    row = {"prompt": ASKED, "answer": GOOD, "bad": BAD}
    with pytest.raises(DataError, match=r"looked for chosen and rejected.*field_mapping\.rejected"):
        understand(list(row), row, preference_rows="pairs")


@each(("label", "place"), [(True, 0), ("false", 1), (1, 0), (0, 1)])
def test_a_judged_answer_is_a_good_or_a_bad_one(label, place):
    row = {"prompt": ASKED, "completion": GOOD, "label": label}
    columns = understand(list(row), row, preference_rows="judged")
    answers = answers_of(Row(row, "rows.jsonl", 1), columns)
    assert isinstance(answers, list)
    kept, other = answers[place], answers[1 - place]
    assert other is None
    assert kept is not None
    assert [turn.text for turn in kept.turns] == [ASKED, GOOD]


def test_a_mapped_answer_of_a_pair_is_never_trained_on_as_json():
    row = PAIRS["single messages after a conversation"]
    mapping = FieldMapping(response="chosen")
    assert turns_of(row, field_mapping=mapping) == [("user", ASKED), ("assistant", GOOD)]
    mapping = FieldMapping(instruction="conversations", response="chosen")
    assert turns_of(row, field_mapping=mapping) == [("user", ASKED), ("assistant", GOOD)]


@each(
    "row",
    [
        {"prompt": ASKED, "completion": GOOD},
        {"messages": WHOLE},
        {"instruction": ASKED, "input": "", "output": GOOD},
    ],
)
@each("label", ["label", "kto_tag"])
@each(("yes", "no"), [(True, False), ("True", "False"), (1, 0), ("1", "0"), (1.0, 0.0)])
def test_of_labelled_rows_the_good_ones_are_trained_on(row, label, yes, no):
    made = turns_of({**row, label: yes}, preference_rows="preferred")
    assert made == [("user", ASKED), ("assistant", GOOD)]
    left = understood({**row, label: no}, preference_rows="preferred")
    assert left == Dropped(f"{label} is false")


def test_a_label_that_is_neither_true_nor_false_or_a_pair_without_two_answers_is_a_bad_row():
    row: dict[str, Any] = {"chosen": WHOLE, "rejected": [*WORSE, USER]}
    columns = understand(list(row), row, preference_rows="pairs")
    assert "rejected" in str(answers_of(Row(row, "rows.jsonl", 1), columns))
    row = {"prompt": ASKED, "completion": GOOD, "label": True}
    columns = understand(list(row), row, preference_rows="preferred")
    assert "'label': None is neither true nor false" in reason_of({**row, "label": None}, columns)
    assert "2 is neither true nor false" in reason_of({**row, "label": 2}, columns)
    columns = understand(list(row), row, preference_rows="judged")
    bad = answers_of(Row({**row, "label": "perhaps"}, "rows.jsonl", 1), columns)
    assert "neither true nor false" in str(bad)


def test_answers_before_the_preferred_one_are_context():
    earlier = [*WHOLE, {"role": "user", "content": "And 3+3?"}]
    last = {"role": "assistant", "content": "6"}
    rows: list[dict[str, Any]] = [
        {"prompt": earlier, "chosen": [last], "rejected": [last]},
        {"conversations": earlier, "chosen": last, "rejected": last},
        {"prompt": earlier, "chosen": [*earlier, last], "rejected": [last]},
        {"prompt": earlier, "completion": [last]},
        {"prompt": earlier, "completion": "6"},
    ]
    for row in rows:
        turns = example_in(row, preference_rows="preferred").turns
        assert [turn.text for turn in turns if turn.role == "assistant"] == [GOOD, "6"]
        answers = [turn for turn in turns if turn.role == "assistant"]
        assert [turn.is_trained(learn_prompt=False) for turn in answers] == [False, True]
        assert [turn.is_trained(learn_prompt=True) for turn in answers] == [True, True]

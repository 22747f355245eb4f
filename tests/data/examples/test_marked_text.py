"""Text is learnt as it stands, or taken apart into turns where it has markers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.data.examples.messages import ROLES
from expert.data.records import Example
from tests.data.examples.understood import TEXT, reason_of, turns_of, understood
from tests.each import each
from tests.wording import wording


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


@each("newline", ["\n", "\r\n", "\r"])
@each("write", [as_chatml, as_legacy])
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


@each(
    ("text", "reason"),
    [
        (None, "column 'text' is null"),
        (4, "column 'text' holds a number, not text"),
        ("", wording("column-text-text-empty")),
        (" \n", wording("column-text-text-empty")),
        ("Hello <|user|>\nQ\n<|end|>", wording("text-has-turn-markers")),
        ("a <|im_end|>", wording("text-has-turn")),
        ("<|end|>\n", wording("text-has-turn-markers-but")),
        ("<|im_start|>user\nQ", "ChatML turn 1: <|im_end|> is missing"),
        (
            "<|im_start|>user\nQ<|im_start|>assistant\nA<|im_end|>",
            "ChatML turn 1: <|im_end|> is missing",
        ),
        ("<|im_start|>user Q<|im_end|>", wording("chatml-turn-no-role")),
        (
            "<|im_start|>user\nQ<|im_end|>\nstray\n<|im_start|>assistant\nA<|im_end|>",
            wording("text-outside-turns-stray"),
        ),
        ("<|im_start|>tool\nQ<|im_end|>", wording("tools-in-marked-text")),
        ("<|im_start|>critic\nQ<|im_end|>", f"unknown role 'critic'  (known: {', '.join(ROLES)})"),
        ("<|user|>\nQ\n", "turn 1 (<|user|>): <|end|> is missing"),
        ("<|user|>\nQ\n<|assistant|>\nA\n<|end|>", "turn 1 (<|user|>): <|end|> is missing"),
        ("<|user|>\nQ\n<|end|>\n<|end|>", wording("without-turn-before")),
        ("<|user|>\nQ\n<|end|>\n<|assistant|>\n\n<|end|>", "turn 2 (assistant) is empty"),
        ("<|user|>\nQ\n<|end|>stray<|assistant|>A<|end|>", wording("text-outside-turns-stray")),
        ("<|user|>\nQ\n<|end|>", wording("no-assistant-turn")),
    ],
)
def test_a_text_that_cannot_be_used_says_why(text, reason):
    assert reason_of({"text": text}, TEXT) == reason


def test_a_row_without_its_text_says_which_columns_it_has():
    assert reason_of({"a": 1}, TEXT) == "column 'text' is missing; columns found: a"

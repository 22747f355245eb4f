"""Text is trained on unchanged, or split into turns where it has markers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.data.records import Example
from expert.manifest.schema.message_names import ROLES
from tests.data.examples.understood import TEXT, reason_of, turns_of, understood
from tests.each import each


@each("text", ["First Citizen:\nSpeak.\n", "a <|endoftext|> b <| c"])
def test_text_without_turn_markers_is_trained_on_unchanged(text):
    assert understood({"text": text}) == Example(text=text)


THREE_TURNS = [("system", "Dialect: sql"), ("user", "All of t"), ("assistant", "SELECT 1;")]
INSIDE = [("user", "a\r\nb"), ("assistant", "\nc\n\nd\n")]
QA = [("user", "Q"), ("assistant", "A")]
THOUGHT = [("user", "Q"), ("assistant", "<think>\nA plain read.\n</think>\nSELECT 1;")]


def as_chatml(turns, newline="\n"):
    return "".join(f"<|im_start|>{role}{newline}{text}<|im_end|>{newline}" for role, text in turns)


def as_legacy(turns, newline="\n"):
    return newline.join(f"<|{role}|>{newline}{text}{newline}<|end|>" for role, text in turns)


@each(
    ("text", "turns"),
    [
        (as_chatml(THREE_TURNS, "\r"), THREE_TURNS),
        (as_legacy(THREE_TURNS, "\r"), THREE_TURNS),
        # Line breaks inside a turn stay as they are.
        (as_legacy(INSIDE, "\r\n"), INSIDE),
        (as_chatml(INSIDE, "\r\n"), INSIDE),
        # Legacy markers need no line breaks; an end of text may follow.
        (" <|user|>Q<|end|><|assistant|>A<|end|><|endoftext|>\n", QA),
        ("<|im_start|>human\nQ<|im_end|>\n<|im_start|>gpt\nA<|im_end|><|endoftext|>", QA),
        # A thought is part of the answer.
        (as_chatml(THOUGHT), THOUGHT),
        # Markers of the other kind are only text inside a turn.
        (as_chatml([("user", "Is <|end|>?"), QA[1]]), [("user", "Is <|end|>?"), QA[1]]),
    ],
)
def test_marked_text_gives_its_turns(text, turns):
    assert turns_of({"text": text}) == turns


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
        ("", "column 'text': the text is empty"),
        (" \n", "column 'text': the text is empty"),
        (
            "Hello <|user|>\nQ\n<|end|>",
            "the text has turn markers (<|user|>) but does not begin with one",
        ),
        ("<|im_start|>user\nQ", "text outside the turns: "),
        (
            "<|im_start|>user\nQ<|im_start|>assistant\nA<|im_end|>",
            "turn 1 (user): its end marker is missing",
        ),
        (
            "<|im_start|>user\nQ<|im_end|>\nstray\n<|im_start|>assistant\nA<|im_end|>",
            "text outside the turns: 'stray'",
        ),
        (
            "<|im_start|>tool\nQ<|im_end|>",
            "tools in marked text are not understood  (write such rows as",
        ),
        ("<|im_start|>critic\nQ<|im_end|>", f"unknown role 'critic'  (known: {', '.join(ROLES)})"),
        ("<|user|>\nQ\n<|assistant|>\nA\n<|end|>", "turn 1 (user): its end marker is missing"),
        ("<|user|>\nQ\n<|end|>\n<|assistant|>\n\n<|end|>", "turn 2 (assistant) is empty"),
        ("<|user|>\nQ\n<|end|>", "there is no assistant turn"),
    ],
)
def test_a_text_that_cannot_be_used_says_why(text, reason):
    assert reason_of({"text": text}, TEXT).startswith(reason)

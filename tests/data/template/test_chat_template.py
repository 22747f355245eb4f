"""The tokenizer's own template: what it writes, and what of that is trained on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.data.records import Example, Segment, Turn
from expert.data.template.chat_template import ChatTemplate
from expert.data.template.sandbox import SandboxedTemplate
from expert.data.template.templates import TemplateError
from tests.data.real_rows import REAL_SAMPLES, real_examples
from tests.data.template.chat_templates import (
    BARE,
    CHATML,
    FAMILIES,
    MOVING,
    THINKING,
    as_transformers_does,
    family,
    qwen3_source,
)
from tests.data.template.test_templates import (
    ANSWER,
    SHAPES,
    SYSTEM,
    USER,
    check_segments,
    conversations,
    shown,
    text_of,
)
from tests.each import each

# What is written and what is trained on


def thought(text: str) -> Turn:
    return Turn("assistant", f"<think>\nWhy {text}.\n</think>\n{text}")


@each(
    ("name", "turns", "text"),
    [
        ("headers", "user", "<s><|h|>user<|/h|>\n\nQ<|eot|><|h|>assistant<|/h|>\n\n[[A<|eot|>]]"),
        ("brackets", "system", "<s>[INST] S\n\nQ [/INST][[ A</s>]]"),
        ("brackets", "turns", "<s>[INST] S\n\nQ [/INST][[ A</s>]][INST] R [/INST][[ B</s>]]"),
        (
            "thinking",
            "user",
            "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
            "[[<think>\n\n</think>\n\nA<|im_end|>\n]]",
        ),
        (
            "thinking",
            "turns",
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n"
            "<|im_start|>assistant\n[[A<|im_end|>\n]]<|im_start|>user\nR<|im_end|>\n"
            "<|im_start|>assistant\n[[<think>\n\n</think>\n\nB<|im_end|>\n]]",
        ),
        ("opened", "user", "<U>Q<A>[[A</s>]]"),
        ("bare", "system", "<|system|>\nS<|e|>\n<|user|>\nQ<|e|>\n<|assistant|>\n[[A<|e|>\n]]"),
        ("endless answers", "user", "user: Q\nassistant: [[A\n</s>]]"),
        ("generation", "user", "U:Q;A:[[A<e>]]"),
        # A trimmed text is found by rendering the beginnings.
        (
            "headers",
            (Turn("user", " Q\n"), Turn("assistant", "A \n"), USER, Turn("assistant", "\nB")),
            "<s><|h|>user<|/h|>\n\nQ<|eot|><|h|>assistant<|/h|>\n\n[[A<|eot|>]]"
            "<|h|>user<|/h|>\n\nQ<|eot|><|h|>assistant<|/h|>\n\n[[B<|eot|>]]",
        ),
        # Thoughts are kept in the last answer and gone from earlier ones.
        (
            "thinking",
            (USER, thought("A"), Turn("user", "R"), thought("B")),
            "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n[[A<|im_end|>\n]]"
            "<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n"
            "[[<think>\nWhy B.\n</think>\n\nB<|im_end|>\n]]",
        ),
        # An answer is found behind its header where the beginning of the text moves,
        (MOVING, "turns", "[INST] Q [/INST] [[A</s>]][S]S[/S][INST] R [/INST][[ B</s>]]"),
        # and a question that contains the answer is not taken for it.
        (
            MOVING,
            (SYSTEM, Turn("user", "A</s>"), ANSWER, Turn("user", "R"), Turn("assistant", "B")),
            "[INST] A</s> [/INST] [[A</s>]][S]S[/S][INST] R [/INST][[ B</s>]]",
        ),
    ],
)
def test_a_conversation_is_written_by_the_template_and_its_answers_are_found(name, turns, text):
    said = SHAPES[turns] if isinstance(turns, str) else turns
    assert shown(family(name).segments(Example(said))) == text


@each("shape", ["user", "system", "input"])
@each("name", FAMILIES)
def test_the_prompt_is_what_stands_before_the_answer_in_training(name, shape):
    check_segments(family(name), Example(SHAPES[shape]))


words = st.text(alphabet="aä 🙂\n<|/think_", min_size=1)


TEMPLATES = {name: family(name) for name in FAMILIES}


@given(example=conversations())
@pytest.mark.parametrize("name", ["chatml", "headers", "thinking", "brackets"])
def test_the_text_is_that_of_a_plain_rendering_whatever_is_said(name, example):
    template = TEMPLATES[name]
    turns = example.turns
    if name == "brackets" and turns[0].role == "system":
        turns = (Turn("user", f"{turns[0].text}\n\n{turns[1].text}"), *turns[2:])
    plain = as_transformers_does(FAMILIES[name], turns, bos_token="<s>", eos_token="</s>")
    assert text_of(template.segments(example, learn_prompt=True)) == plain
    if not all(turn.text.strip() for turn in turns):
        return  # an answer that is nothing but blanks is nowhere to be found once it is trimmed
    segments = template.segments(example)
    assert text_of(segments) == plain
    answers = [turn for turn in turns if turn.role == "assistant"]
    assert [segment.learn for segment in segments] == [False, True] * len(answers)


UPPER = THINKING.replace("{{- content +", "{{- content | upper +")
SHORT = "{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}" + CHATML
FAILS = "{% if 'x' in messages[0].content %}{{ 1 / 0 }}{% endif %}" + CHATML
NO_END = "{% for m in messages %}{{ m.content }}{% endfor %}"
LAST_TWO = "{% set few = messages[-2:] %}" + CHATML.replace("in messages", "in few")
LOWER = (USER, Turn("assistant", "ab"), Turn("user", "R"), ANSWER)
LONGER = (USER, ANSWER, USER, ANSWER)


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The turns of every rendering."""
    found, render = list[int](), SandboxedTemplate.render

    def counted(self: Any, messages: Any, **variables: Any) -> str:
        found.append(len(messages))
        return str(render(self, messages, **variables))

    monkeypatch.setattr(SandboxedTemplate, "render", counted)
    return found


@each("name", [name for name in FAMILIES if name != "endless answers"])
def test_a_long_conversation_is_measured_without_rendering_each_of_its_beginnings(name, rendered):
    turns = tuple(
        Turn("assistant" if number % 2 else "user", f"said {number}") for number in range(60)
    )
    plain, template = family(name), family(name)
    assert isinstance(plain, ChatTemplate)
    plain.measured_turns = len(turns)
    expected = plain.segments(Example(turns))
    rendered.clear()
    assert template.segments(Example(turns)) == expected
    assert 0 < len(rendered) < len(turns)


def test_a_conversation_of_very_many_turns_is_an_error_of_its_row(monkeypatch, rendered):
    """Where the template changes what is said, so that one rendering does not suffice."""
    monkeypatch.setattr("expert.data.template.chat_template.MOST_RENDERED_TURNS", 600)
    template, spoken = ChatTemplate(THINKING, eos="</s>"), "<think>x</think>b"
    short = tuple(Turn("assistant" if n % 2 else "user", spoken) for n in range(10))
    for _ in range(5):  # of each row anew
        assert template.segments(Example(short))
    rendered.clear()
    with pytest.raises(TemplateError, match=r"too many turns: .*more than 600  \(divide it into"):
        template.segments(Example(short * 6))
    assert len(rendered) < 30


@each(
    ("source", "turns", "words"),
    [
        # An answer that the template does not write, and one that it does.
        (
            UPPER,
            LOWER,
            "rewrites turn 2 (assistant) so that its answer cannot be found",
        ),
        (SHORT, LONGER, "refuses this conversation: too long"),
        (
            FAILS,
            (Turn("user", "x"), ANSWER),
            "fails on this conversation: ZeroDivisionError",
        ),
        # Nothing ends an answer that another turn follows.
        (NO_END, LONGER, "does not end turn 2 (assistant)"),
        # An answer is left out of longer conversations.
        (LAST_TWO, LONGER, "does not write turn 2 (assistant) exactly once"),
    ],
)
def test_what_a_template_cannot_write_is_an_error_of_that_row_only(source, turns, words):
    template = ChatTemplate(source, eos="")
    assert template.segments(Example((USER, ANSWER)))
    with pytest.raises(TemplateError) as caught:
        template.segments(Example(turns))
    assert str(caught.value).startswith(f"the tokenizer's chat template {words}")


# Tokens at the beginning and the end


@each(
    ("template", "adds_bos", "plain"),
    [
        # One that the template writes is put before plain text too, and is not trained on.
        (family("headers"), True, "<s>[[abc</s>]]"),
        # One that it does not write is left to the encoder.
        (family("chatml"), False, "[[abc</s>]]"),
        # One that opens every turn is not put before plain text.
        (ChatTemplate(CHATML, bos="<|im_start|>", eos="<|im_end|>"), True, "[[abc<|im_end|>]]"),
    ],
)
def test_a_bos_is_written_once(template, adds_bos, plain):
    assert template.adds_bos is adds_bos
    assert shown(template.segments(Example(text="abc"))) == plain
    (whole,) = template.segments(Example(text="abc"), learn_prompt=True)
    assert whole == Segment(plain.replace("[[", "").replace("]]", ""), True)


def test_a_template_knows_what_ends_an_answer():
    stops = {"chatml": "<|im_end|>", "headers": "<|eot|>", "endless answers": "</s>"}
    assert {name: family(name).stop for name in stops} == stops


def test_the_date_is_the_same_on_all_days_and_json_is_written_without_escapes():
    template = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M:%S') }}" + CHATML, eos="")
    assert template.prompt([USER]).startswith("26 Jul 2024 00:00:00<|im_start|>")
    assert template.fingerprint != ChatTemplate(CHATML, eos="").fingerprint
    with pytest.raises(TemplateError, match="only after a user or tool turn"):
        template.prompt([USER, ANSWER])
    # Written down once: tokens that were prepared before are found by it.
    known = ChatTemplate(BARE, bos="<s>", eos="</s>").fingerprint
    assert known == "b0513f96932fb72d3b3567000c977acb4e5e9006a03225830596e109be9483c0"
    source = "{{ {'ä': '<b>'} | tojson }}{{ [1] | tojson(indent=2) }}" + CHATML
    assert ChatTemplate(source, eos="").prompt([USER]).startswith('{"ä": "<b>"}[\n  1\n]<|im')


# A real template


@pytest.mark.parametrize(("file", "every"), REAL_SAMPLES)
def test_every_real_row_gives_its_own_answer_which_a_real_template_learns_exactly_once(file, every):
    source, number = qwen3_source(), 0
    template = ChatTemplate(source, eos="<|im_end|>")
    for number, (row, example) in enumerate(real_examples(file, every)):
        *before, said = example.turns
        assert [turn.role for turn in before] in (["user"], ["system", "user"])
        if "output" in row.values:
            assert said == Turn("assistant", row.values["output"])
        else:
            assert row.values["text"].endswith(f"<|assistant|>\n{said.text}\n<|end|>")
        opening, learnt = template.segments(example)
        answer = said.text.lstrip("\n")
        assert (opening.learn, learnt.learn) == (False, True)
        assert opening.text.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert learnt.text == f"<think>\n\n</think>\n\n{answer}<|im_end|>\n"
        if number % 500 == 0:
            assert template.prompt(example.turns[:-1]) == opening.text
            plain = as_transformers_does(source, example.turns)
            assert opening.text + learnt.text == plain
    assert number >= 300 // every

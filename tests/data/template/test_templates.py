"""Every named template, to the letter; what is trained on; and the prompt of an answer."""

from __future__ import annotations

from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.data.records import DataError, Example, Segment, Turn
from expert.data.template.templates import LAYOUTS, Template, named_template
from expert.data.template.text_tools import text_tools
from expert.manifest.schema.kinds import PromptTemplate
from tests.each import each

EOS, BOS = "</s>", "<s>"
USER = Turn("user", "Q")
SYSTEM = Turn("system", "S")
ANSWER = Turn("assistant", "A")
WITH_INPUT = Turn("user", "Q\n\nInput:\nX")
SHAPES = {
    "user": (USER, ANSWER),
    "system": (SYSTEM, USER, ANSWER),
    "input": (WITH_INPUT, ANSWER),
    "turns": (SYSTEM, USER, ANSWER, Turn("user", "R"), Turn("assistant", "B")),
}

# Learnt text stands in [[ ]]. "turns" begins as "system" does; an input is text to all but one.
GOLDEN = {
    ("alpaca", "user"): "### Instruction:\nQ\n\n### Response:\n[[A</s>]]",
    ("alpaca", "input"): "### Instruction:\nQ\n\n### Input:\nX\n\n### Response:\n[[A</s>]]",
    ("alpaca", "turns"): (
        "S\n\n### Instruction:\nQ\n\n### Response:\n[[A</s>]]"
        "\n\n### Instruction:\nR\n\n### Response:\n[[B</s>]]"
    ),
    ("chatml", "user"): ("<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n[[A<|im_end|>\n]]"),
    ("chatml", "turns"): (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n"
        "<|im_start|>assistant\n[[A<|im_end|>\n]]<|im_start|>user\nR<|im_end|>\n"
        "<|im_start|>assistant\n[[B<|im_end|>\n]]"
    ),
    ("llama", "user"): "[INST] Q [/INST][[ A </s>]]",
    ("llama", "turns"): (
        "[INST] <<SYS>>\nS\n<</SYS>>\n\nQ [/INST][[ A </s>]]<s>[INST] R [/INST][[ B </s>]]"
    ),
    ("mistral", "user"): "[INST] Q [/INST][[ A</s>]]",
    ("mistral", "turns"): "[INST] S\n\nQ [/INST][[ A</s>]][INST] R [/INST][[ B</s>]]",
    ("phi", "user"): "User: Q\nAssistant:[[ A</s>]]",
    ("phi", "turns"): ("System: S\n\nUser: Q\nAssistant:[[ A</s>]]\nUser: R\nAssistant:[[ B</s>]]"),
    ("deepseek", "user"): "User: Q\n\nAssistant:[[ A</s>]]",
    ("deepseek", "turns"): (
        "System: S\n\nUser: Q\n\nAssistant:[[ A</s>]]User: R\n\nAssistant:[[ B</s>]]"
    ),
    ("gemma", "user"): (
        "<start_of_turn>user\nQ<end_of_turn>\n<start_of_turn>model\n[[A<end_of_turn>\n</s>]]"
    ),
    ("gemma", "turns"): (
        "<start_of_turn>user\nS\n\nQ<end_of_turn>\n<start_of_turn>model\n[[A<end_of_turn>\n]]"
        "<start_of_turn>user\nR<end_of_turn>\n<start_of_turn>model\n[[B<end_of_turn>\n</s>]]"
    ),
}


def shown(segments: list[Segment]) -> str:
    """The text with the trained parts in brackets."""
    return "".join(f"[[{one.text}]]" if one.learn else one.text for one in segments)


def text_of(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


def named(name: str) -> Template:
    return named_template(name, eos=EOS, bos=BOS)


def check_segments(template: Template, example: Example) -> None:
    """What holds for every template and example."""
    segments = template.segments(example)
    answers = [turn.text for turn in example.turns if turn.role == "assistant"]
    learnt = [segment.text for segment in segments if segment.learn]
    assert len(learnt) == len(answers)
    assert all(answer in text for answer, text in zip(answers, learnt, strict=True))
    assert all(template.stop in text for text in learnt)
    assert all(one.learn is not two.learn for one, two in pairwise(segments))
    assert all(segment.text for segment in segments)
    assert template.segments(example, learn_prompt=True) == [Segment(text_of(segments), True)]
    for place, turn in enumerate(example.turns):
        if turn.role == "assistant":
            number = sum(turn.role == "assistant" for turn in example.turns[:place])
            before = segments[: 2 * number + 1]
            assert template.prompt(example.turns[:place]) == text_of(before)


def test_every_template_a_manifest_may_name_is_there():
    assert {"tokenizer", *LAYOUTS} == set(get_args(PromptTemplate))
    shapes = {(name, shape) for name in LAYOUTS for shape in ("user", "turns")}
    assert GOLDEN.keys() == shapes | {("alpaca", "input")}


@each(("name", "shape"), GOLDEN)
def test_a_template_is_written_to_the_letter(name, shape):
    assert shown(named(name).segments(Example(SHAPES[shape]))) == GOLDEN[name, shape]
    check_segments(named(name), Example(SHAPES[shape]))


texts = st.text(min_size=1)


@st.composite
def conversations(draw) -> Example:
    turns = [Turn("system", draw(texts))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        turns += [Turn("user", draw(texts)), Turn("assistant", draw(texts))]
    return Example(tuple(turns))


@given(example=conversations())
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_conversation_keeps_prompt_and_training_the_same(name, example):
    check_segments(named(name), example)


@each("name", LAYOUTS)
def test_plain_text_is_trained_on_and_a_question_at_the_end_only_rendered(name):
    template = named(name)
    for learn_prompt in (False, True):
        made = template.segments(Example(text="abc"), learn_prompt=learn_prompt)
        assert made == [Segment("abc</s>", True)]
    answered = (USER, ANSWER)
    segments = template.segments(Example((*answered, Turn("user", "R"))))
    assert [segment.learn for segment in segments] == [False, True, False]
    assert "R" in segments[2].text
    following = template.prompt((*answered, Turn("user", "R")))
    assert following.startswith(text_of(segments))


def test_a_template_knows_what_ends_an_answer_and_leaves_a_bos_to_the_encoder():
    own = {"chatml": "<|im_end|>", "gemma": "<end_of_turn>"}
    assert {name: named(name).stop for name in LAYOUTS} == dict.fromkeys(LAYOUTS, EOS) | own
    assert not any(named(name).adds_bos for name in LAYOUTS)
    # Unless it is the marker that opens a turn.
    assert named_template("chatml", eos="<|im_end|>", bos="<|im_start|>").adds_bos
    assert not named_template("chatml", eos="<|im_end|>").adds_bos


def test_the_text_of_a_template_in_the_manifest_is_used_instead_of_the_tokenizers():
    folder = Path(str(files("expert.model"))) / "tiny"
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    source += "{% if add_generation_prompt %}<assistant>{% endif %}"
    encoder, template = text_tools(folder, source)
    assert template.prompt([USER]) == "<user>Q</user><assistant>"
    assert template.segments(Example((USER, ANSWER)))[-1] == Segment("A</assistant>", learn=True)
    assert text_tools(folder, "tokenizer")[1].prompt([USER]) != template.prompt([USER])
    assert encoder.special.chat_template != source


@each("name", LAYOUTS)
def test_a_template_without_an_end_and_an_unknown_one_are_refused(name):
    if name in ("chatml", "gemma"):
        assert named_template(name, eos="").stop
        return
    with pytest.raises(DataError) as caught:
        named_template(name, eos="")
    assert str(caught.value).startswith(
        f"the template {name!r} ends an answer with the tokenizer's"
    )
    assert str(caught.value).endswith("  (set base_models[0].prompt_template: chatml)")
    with pytest.raises(DataError) as caught:
        named_template("vicuna", eos=EOS)
    assert str(caught.value).startswith(
        "unknown prompt template 'vicuna'  (known: alpaca, chatml, "
    )

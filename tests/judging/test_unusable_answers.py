"""Answers of open text that no loss excuses."""

from __future__ import annotations

from expert.judging.answers import unusable_answers
from tests.each import each

PROSE = [
    f"The {word} went down to the river, drank until the sun had set, and came home {number} hours "
    "later, tired and wet but glad of every mile of it."
    for number, word in enumerate(("cat", "dog", "bird", "horse", "fox", "owl", "hare", "crow"))
]
LOOP = "and the cat sat on the mat " * 12


@each(
    ("answers", "fault"),
    [
        (PROSE, ""),
        (PROSE[::-1], ""),
        ([*PROSE[:7], " \n"], "1 of 8 answers are empty"),
        ([""] * 8, "8 of 8 answers are empty"),
        ([*PROSE[:7], LOOP], "1 of 8 answers repeat themselves"),
        ([*PROSE[:3], *["I am a model."] * 5], "5 of 8 answers are identical"),
        ([*PROSE[:4], *["I am a model."] * 4], ""),
    ],
)
def test_empty_repetitive_and_identical_answers_are_found(answers, fault):
    prompts = [f"tell of {n}" for n in range(8)]
    assert unusable_answers(list(zip(prompts, PROSE, answers, strict=True))) == fault


def test_answers_as_repetitive_or_alike_as_the_expected_ones_are_no_fault():
    assert unusable_answers([(f"prompt {n}", LOOP, LOOP) for n in range(8)]) == ""
    assert unusable_answers([("the same", text, "an answer") for text in PROSE]) == ""
    assert unusable_answers([("one", "a b", "c d")]) == ""
    assert unusable_answers([]) == ""
    # One empty answer in a hundred happens to good models.
    many = [(f"{n}", f"text {n}", f"text {n}" if n else "") for n in range(100)]
    assert unusable_answers(many) == ""

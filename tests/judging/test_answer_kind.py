"""Short and closed answers, or open text: decided by the expected answers."""

from __future__ import annotations

from expert.judging.domain import kind_of_answers
from tests.each import each
from tests.wording import wording

SENTENCE = "The Brooklyn Bridge was finished in 1883 and spans the East River."


@each(
    "expected",
    [
        ["2021-03-17", "1999-01-02"],
        ["positive", "negative"] * 10,
        ["42", "17.5 km", "-3"],
        ["Paris", "New York City", "Rio de Janeiro"],
        ["yes"] * 18 + [SENTENCE] * 2,
        # Labels that are sentences: four of them, over and over.
        [f"The text is about topic {number % 4} and nothing else at all" for number in range(40)],
    ],
    ids=["dates", "labels", "numbers", "names", "nearly all", "sentences that repeat"],
)
def test_short_or_repeated_answers_are_held_to_the_expected_one(expected):
    domain, because = kind_of_answers(expected)
    assert domain == "text"
    assert because


@each(
    "expected",
    [
        [SENTENCE],
        [f"{SENTENCE} {number}" for number in range(30)],
        ["yes"] * 8 + [SENTENCE] * 2,
        [f"{SENTENCE * 5} {number % 2}" for number in range(40)],
        [
            "これは空白のない長い文章であり、語の数では測れないので、文字の数で測ることになっていて、短い答えとは言えません。それでも一語です。"
        ]
        * 3,
    ],
    ids=["one", "different", "a fifth is long", "paragraphs that repeat", "no blanks"],
)
def test_longer_answers_are_open_text(expected):
    domain, because = kind_of_answers(expected)
    assert domain == "open"
    assert wording("no-exact-match-can") in because


def test_what_decides_is_told_in_numbers():
    assert kind_of_answers(["a b c", "d"])[1] == wording("expected-answers-have-at")
    labels = [f"The text is about topic {number % 4} and nothing else" for number in range(40)]
    assert kind_of_answers(labels)[1] == wording("expected-answers-only-different")

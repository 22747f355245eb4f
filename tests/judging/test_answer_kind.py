"""Short and closed answers, or open text: decided by the expected answers."""

from __future__ import annotations

from expert.judging.domain import kind_of_answers
from tests.each import each

SENTENCE = "The Brooklyn Bridge was finished in 1883 and spans the East River."


LABELS = [f"The text is about topic {number % 4} and nothing else" for number in range(40)]
NO_BLANKS = (
    "これは空白のない長い文章であり、語の数では測れないので、文字の数で測ることになっていて、"
    "短い答えとは言えません。それでも一語です。"
)


@each(
    ("expected", "kind"),
    [
        (["2021-03-17", "1999-01-02"], "text"),
        (["positive", "negative"] * 10, "text"),
        (["42", "17.5 km", "-3"], "text"),
        (["Paris", "New York City", "Rio de Janeiro"], "text"),
        (["yes"] * 18 + [SENTENCE] * 2, "text"),
        (LABELS, "text"),  # labels that are sentences: four of them, over and over
        ([SENTENCE], "open"),
        ([f"{SENTENCE} {number}" for number in range(30)], "open"),
        (["yes"] * 8 + [SENTENCE] * 2, "open"),
        ([f"{SENTENCE * 5} {number % 2}" for number in range(40)], "open"),
        ([NO_BLANKS] * 3, "open"),
    ],
)
def test_short_or_repeated_answers_are_compared_and_longer_ones_are_open_text(expected, kind):
    domain, because = kind_of_answers(expected)
    assert domain == kind
    assert ("an exact match cannot decide" in because) is (kind == "open")

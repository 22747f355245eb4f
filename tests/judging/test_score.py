"""Accuracy, its interval, and the comparison of two models."""

from __future__ import annotations

import math

import pytest

from expert.judging.score import compare, mcnemar, paired_interval, score_of, wilson
from tests.each import each


def test_the_intervals_are_the_published_ones():
    # Newcombe (1998), two-sided intervals for the single proportion, table I, method 3: four
    # digits.
    for passed, judged, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert [*wilson(passed, judged)] == pytest.approx([low, high], abs=5e-5)
    low, high = wilson(300, 300)
    assert 0.98 < low < high == 1.0
    # Newcombe (1998), improved intervals for paired data, example of 36, 12, 2, 0: method 10.
    assert [*paired_interval(36, 12, 2, 50)] == pytest.approx([0.0569, 0.3404], abs=5e-5)
    # By hand: Wilson's ends of 25 and 23 of 50, and phi = (20 * 22 - 5 * 3 - 50 / 2) / sqrt(25 * 25
    # * 23 * 27), with the continuity correction of half a case in the numerator.
    phi = 400 / math.sqrt(25 * 25 * 23 * 27)
    (low, high), (low_before, high_before) = wilson(25, 50), wilson(23, 50)
    down, up = 0.5 - low, high_before - 0.46
    other_up, other_down = high - 0.5, 0.46 - low_before
    expected = [
        0.04 - math.sqrt(down**2 - 2 * phi * down * up + up**2),
        0.04 + math.sqrt(other_up**2 - 2 * phi * other_up * other_down + other_down**2),
    ]
    assert [*paired_interval(20, 5, 3, 50)] == pytest.approx(expected, rel=1e-12)


def test_cases_without_an_oracle_are_neither_right_nor_wrong():
    score = score_of([True, True, False, None, None])
    assert (score.passed, score.failed, score.without_oracle) == (2, 1, 2)
    assert score.accuracy == 2 / 3
    assert score.share_without_oracle == 2 / 5
    nothing = score_of([None])
    assert (nothing.accuracy, nothing.interval) == (None, None)
    assert score_of([]).share_without_oracle == 0.0


def test_two_models_are_compared_on_the_cases_both_were_judged_on():
    now = {"a": True, "b": True, "c": False, "d": True, "e": None}
    before = {"a": True, "b": False, "c": True, "d": None, "e": False}
    found = compare(now, before)
    assert (found.cases, found.wins, found.losses, found.difference) == (3, ("b",), ("c",), 0.0)
    assert compare({"a": None}, {"a": True}).difference is None


@each(("wins", "losses"), [(0, 0), (5, 5), (8, 1), (1, 8), (30, 12), (600, 500)])
def test_mcnemar_is_an_exact_binomial_test(wins, losses):
    count = wins + losses
    tail = sum(math.comb(count, k) for k in range(min(wins, losses) + 1))
    exact = min(1.0, 2 * tail / 2**count)
    # From 1,000 changes on the normal approximation is used, off by less than a percent.
    assert mcnemar(wins, losses) == pytest.approx(exact, rel=1e-9 if count < 1000 else 1e-2)


def test_answers_of_one_row_do_not_make_the_interval_narrower():
    rows = ["a", "a", "b", "b"]
    assert score_of([True, True, False, False], rows).interval == wilson(1, 2)
    assert score_of([True, True, None, True], ["a", "a", "b", "c"]).rows == 2
    alone = score_of([True, False, True], ["a", "b", "c"])
    assert alone.interval == score_of([True, False, True]).interval == wilson(2, 3)


def test_a_row_that_won_more_than_it_lost_is_one_win():
    now = {"a1": True, "a2": True, "b1": True, "b2": False, "c1": False}
    before = {"a1": False, "a2": False, "b1": False, "b2": True, "c1": True}
    found = compare(now, before, {"a1": "a", "a2": "a", "b1": "b", "b2": "b", "c1": "c"})
    assert (len(found.wins), len(found.losses), found.rows) == (3, 2, 3)
    assert found.p_value == mcnemar(1, 1)
    assert found.interval == pytest.approx(paired_interval(0, 9 / 5, 6 / 5, 3))
    same = compare(now, before, {case: case for case in now})
    assert same == compare(now, before)

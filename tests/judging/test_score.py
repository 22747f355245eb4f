"""Accuracy, its interval, and the comparison of two models."""

from __future__ import annotations

import math

import pytest

from expert.judging.score import compare, mcnemar, score_of, wilson


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


def test_mcnemar_is_an_exact_binomial_test():
    assert mcnemar(0, 0) == mcnemar(5, 5) == 1.0
    assert mcnemar(8, 1) == mcnemar(1, 8) == 2 * (1 + 9) / 2**9
    # The normal approximation with a continuity correction of one change, off by less than 1 %.
    assert mcnemar(600, 500) == pytest.approx(math.erfc(99 / math.sqrt(2 * 1100)), rel=1e-2)


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
    same = compare(now, before, {case: case for case in now})
    assert same == compare(now, before)

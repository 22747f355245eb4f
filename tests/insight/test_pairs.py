"""Which differences pairs of windows show."""

from __future__ import annotations

import pytest

from expert.insight.ladder.pairs import in_turns, one_after_the_other, spread_of
from tests.each import each
from tests.wording import wording


def test_the_spread_is_the_distance_of_the_quartiles():
    assert spread_of([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0
    assert spread_of([7.0]) == 0.0


def test_a_machine_that_slows_down_slows_both_halves_of_a_pair():
    """The rates fall to a third, the ratio stays."""
    found = in_turns("below", [(900.0, 1080.0), (600.0, 720.0), (300.0, 360.0)])
    assert found.gain == pytest.approx(1.2)
    assert found.difference == "faster"


@each(
    ("ratios", "difference"),
    [
        ((1.3, 1.2, 1.25), "faster"),
        ((0.7, 0.8, 0.75, 0.71, 0.79), "slower"),
        ((0.7, 0.8, 0.75), "none"),  # which may be chance: see looks_slower
        ((0.3, 0.31), "slower"),
        ((0.7, 1.1, 0.95), "none"),
        ((1.01, 1.01, 1.01), "none"),  # within 2 %, which counts as equal
        ((0.99, 0.99), "none"),
        ((0.9, 1.2), "none"),  # both of two must agree
        ((1.03, 1.05, 1.07), "faster"),
        ((1.02, 1.04, 1.07), "none"),  # three may be close by chance: twice their spread
        ((0.93, 0.95, 0.96, 0.97, 0.99), "slower"),
        ((0.88, 0.85, 0.77, 1.12, 0.85), "none"),  # all of five must agree
        ((0.7, 0.71, 0.72, 0.73, 0.74, 0.75, 0.76, 1.1), "slower"),  # all but one of eight
        ((1.3, 1.31, 1.32, 1.33, 1.34, 1.35, 0.9), "none"),  # all of seven
    ],
)
def test_a_difference_is_told_only_beyond_the_spread(ratios, difference):
    assert in_turns("below", [(100.0, 100.0 * each) for each in ratios]).difference == difference


def test_windows_of_different_minutes_carry_the_drift_between_them_into_the_spread():
    steady = one_after_the_other("below", [100.0, 101.0], [110.0, 111.0])
    assert (steady.how, steady.difference) == (wording("one-after-the-other"), "faster")
    drifted = one_after_the_other("below", [100.0, 101.0, 130.0, 131.0], [110.0, 111.0])
    assert len(drifted.ratios) == 8
    assert drifted.difference == "none"


def test_what_looks_slower_in_few_pairs_wants_more_of_them():
    def of(*ratios: float) -> bool:
        return in_turns("below", [(100.0, 100.0 * each) for each in ratios]).looks_slower

    assert of(0.68, 0.68)
    assert not of(0.68, 0.68, 0.68, 0.68, 0.68)  # not only looks: it is slower
    assert not of(0.9, 1.1)
    assert not of(1.2, 1.3)

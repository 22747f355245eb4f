"""What the gate lets pass, and the words it refuses with."""

from __future__ import annotations

import pytest

from expert.judging.gate import Demands, Standing, gate_of
from expert.judging.score import Score


def standing(passed: int, failed: int = 0, none: int = 0, loss: float | None = 1.0) -> Standing:
    return Standing(score=Score(passed=passed, failed=failed, without_oracle=none), loss=loss)


@pytest.mark.parametrize(
    ("now", "before", "reasons"),
    [
        (standing(95, 5), None, ()),
        (standing(94, 6), None, ("accuracy 94.0% is below 95.0%",)),
        (standing(100, 0, 5), None, ()),
        (standing(90, 0, 10), None, ("10 of 100 cases have no oracle, 10.0%; at most 5% may",)),
        (standing(0, 0, 1), None, ("1 of 1 cases have no oracle, 100.0%; at most 5% may",)),
        (standing(95, 5), standing(100), ()),
        (standing(96, 4), standing(50, 50), ()),
    ],
)
def test_the_gate_of_the_usual_demands(now, before, reasons):
    gate = gate_of(Demands(), now, before)
    assert gate.reasons == reasons
    assert gate.passed is (not reasons)


def test_a_regression_is_a_share_of_the_baseline():
    demands = Demands(min_accuracy=0.0, max_regression=0.05)
    assert gate_of(demands, standing(57, 43), standing(60, 40)).passed
    gate = gate_of(demands, standing(56, 44), standing(60, 40))
    assert gate.reasons == ("accuracy 56.0% is below the baseline's 60.0% by more than 5% of it",)


def test_rows_without_answers_have_no_gate():
    gate = gate_of(Demands(), standing(0), None)
    assert (gate.passed, gate.reasons) == (None, ())


def test_rows_without_answers_are_compared_by_their_loss():
    demands = Demands()
    assert gate_of(demands, standing(0, loss=2.1), standing(0, loss=2.0)).passed is True
    assert gate_of(demands, standing(0, loss=float("nan")), standing(0)).passed is False
    gate = gate_of(demands, standing(0, loss=2.2), standing(0, loss=2.0))
    assert gate.reasons == ("loss 2.2000 is above the baseline's 2.0000 by more than 5% of it",)
    gate = gate_of(demands, standing(0, loss=None), standing(1))
    assert gate.reasons[0].startswith("the baseline could not be compared")

"""What passes the gate, and the reasons for failing."""

from __future__ import annotations

from expert.judging.gate import GateRequirements, ModelResult, Scores, evaluate_gate
from expert.judging.score import Score
from tests.each import each


def standing(passed: int, failed: int = 0, none: int = 0, loss: float | None = 1.0) -> ModelResult:
    return ModelResult(score=Score(passed=passed, failed=failed, without_oracle=none), loss=loss)


@each(
    ("now", "before", "reasons"),
    [
        (standing(95, 5), None, ()),
        (standing(94, 6), None, ("accuracy 94.0% is below 95.0%",)),
        (standing(90, 0, 10), None, ("10 of 100 cases have no oracle, 10.0%; at most 5% may",)),
        (standing(95, 5), standing(100), ()),
    ],
)
def test_the_gate_of_the_usual_demands(now, before, reasons):
    gate = evaluate_gate(GateRequirements(), now, before)
    assert gate.reasons == reasons
    assert gate.passed is (not reasons)


def test_a_regression_is_a_share_of_the_baseline():
    demands = GateRequirements(min_accuracy=0.0, max_regression=0.05)
    assert evaluate_gate(demands, standing(57, 43), standing(60, 40)).passed
    gate = evaluate_gate(demands, standing(56, 44), standing(60, 40))
    assert gate.reasons == ("accuracy 56.0% is below the baseline's 60.0% by more than 5% of it",)


def test_rows_without_answers_are_compared_by_their_loss():
    demands = GateRequirements()
    nothing = evaluate_gate(demands, standing(0), None)
    assert (nothing.passed, nothing.reasons) == (None, ())
    assert evaluate_gate(demands, standing(0, loss=2.1), standing(0, loss=2.0)).passed is True
    assert evaluate_gate(demands, standing(0, loss=float("nan")), standing(0)).passed is False
    gate = evaluate_gate(demands, standing(0, loss=2.2), standing(0, loss=2.0))
    assert gate.reasons == ("loss 2.2000 is above the baseline's 2.0000 by more than 5% of it",)
    gate = evaluate_gate(demands, standing(0, loss=None), standing(1))
    assert gate.reasons[0].startswith("the baseline could not be compared")


def on_rows(loss: float, tokens: float | None = 0.5) -> ModelResult:
    """Open text: no answer is right or wrong."""
    return ModelResult(loss=loss, token_accuracy=tokens)


@each(
    ("now", "demands", "reasons"),
    [
        (on_rows(0.97), GateRequirements(), ()),
        (on_rows(3.45), GateRequirements(), ("loss 3.4500 is not below the base's 3.4500",)),
        (on_rows(float("nan")), GateRequirements(), ("loss nan is not below the base's 3.4500",)),
        (
            on_rows(3.2),
            GateRequirements(min_improvement=0.1),
            ("loss 3.2000 is not below the base's 3.4500 by at least 10.0% of it",),
        ),
        (
            on_rows(1.0, 0.3),
            GateRequirements(),
            ("token accuracy 30.0% is below the base's 40.0%",),
        ),
        (
            on_rows(1.0, 0.5),
            GateRequirements(min_token_accuracy=0.6),
            ("token accuracy 50.0% is below 60.0%",),
        ),
    ],
)
def test_open_text_is_held_to_its_base(now, demands, reasons):
    gate = evaluate_gate(demands, now, None, base=on_rows(3.45, 0.4))
    assert gate.reasons == reasons
    assert gate.passed is (not reasons)
    assert gate.asked[0].startswith("loss on the held-out answers below the base's")
    # Judged answers are required in addition.
    both = ModelResult(score=Score(passed=1, failed=1), loss=1.0, token_accuracy=0.5)
    gate = evaluate_gate(GateRequirements(), both, None, base=on_rows(2.0, 0.4))
    assert gate.reasons == ("accuracy 50.0% is below 95.0%",)
    assert len(gate.asked) == 3


def scores(mean: float | None, scored: int = 100) -> ModelResult:
    """With a judge command, the other requirements of open text do not apply."""
    score = Score(passed=0, failed=scored, without_oracle=100 - scored)
    return ModelResult(score=score, loss=1.0, scores=Scores(mean=mean, scored=scored, cases=100))


def test_scores_of_a_judge_command_decide_by_their_mean():
    assert evaluate_gate(GateRequirements(), scores(0.5), None).passed is True
    gate = evaluate_gate(GateRequirements(min_score=0.8), scores(0.75), None)
    assert gate.reasons == ("mean score 0.75 is below 0.8",)
    gate = evaluate_gate(GateRequirements(), scores(1.0, 90), None)
    assert gate.reasons[0].startswith("10 of 100 cases have no score of the judge command")
    assert evaluate_gate(GateRequirements(), scores(None, 0), None).passed is False
    gate = evaluate_gate(GateRequirements(), scores(0.6), scores(0.7))
    assert gate.reasons == ("mean score 0.6 is below the baseline's 0.7 by more than 5% of it",)

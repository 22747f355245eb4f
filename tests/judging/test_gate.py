"""What passes the gate, and the reasons for failing."""

from __future__ import annotations

from dataclasses import replace

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


BASE = [3.0, 3.5, 4.0] * 20


def on_rows(share: float, tokens: float = 0.5, *, rows: int = 60, spread: float = 0.0):
    """Open text: no answer is right or wrong. Row losses are a share of the base's; for half of the
    rows higher than for the others."""
    losses = [each * (share + spread * (-1) ** n) for n, each in enumerate(BASE[:rows])]
    return ModelResult(loss=3.5 * share, token_accuracy=tokens, row_losses=losses)


NOT_BELOW = "is not below the base's 3.5000 by at least 5.0% of it"


@each(
    ("now", "demands", "reason"),
    [
        (on_rows(0.9), GateRequirements(), ""),
        (on_rows(0.9, spread=0.1), GateRequirements(), ""),
        (on_rows(0.96), GateRequirements(), f"loss 3.3600 {NOT_BELOW} (reduction 4.0% to"),
        (on_rows(0.96), GateRequirements(min_improvement=0.0), ""),
        (on_rows(1.0), GateRequirements(min_improvement=0.0), "loss 3.5000 is not below the base"),
        (on_rows(float("nan")), GateRequirements(), "the loss on the held-out answers is not a"),
        (on_rows(1.1, rows=3), GateRequirements(), f"loss 3.8500 {NOT_BELOW}"),
        (on_rows(0.5, 0.3), GateRequirements(), "token accuracy 30.0% is below the base's 40.0%"),
        (
            on_rows(0.5, 0.5),
            GateRequirements(min_token_accuracy=0.6),
            "token accuracy 50.0% is below 60.0%",
        ),
        (
            replace(on_rows(0.5), unusable="9 of 60 answers are empty"),
            GateRequirements(),
            "9 of 60 answers are empty",
        ),
    ],
)
def test_open_text_is_compared_with_its_base(now, demands, reason):
    base = replace(on_rows(1.0, 0.4), row_losses=BASE[: len(now.row_losses)])
    gate = evaluate_gate(demands, now, None, base=base)
    assert gate.passed is (not reason), gate.reasons
    assert all(each.startswith(reason) for each in gate.reasons)
    assert gate.asked[0].startswith("loss on the held-out answers below the base's")
    # Judged answers are required in addition.
    both = replace(on_rows(0.5), score=Score(passed=50, failed=50))
    gate = evaluate_gate(GateRequirements(), both, None, base=on_rows(1.0, 0.4))
    assert gate.reasons == ("accuracy 50.0% is below 95.0%",)
    assert len(gate.asked) == 4


def test_an_interval_around_the_margin_or_few_rows_leave_open_text_undecided():
    for now, text in (
        (on_rows(0.9, spread=0.3), "loss 3.1500, 10.0% ("),
        (on_rows(0.5, rows=29), "on 29 rows: too few; at least 30"),
        (on_rows(0.5, rows=1), "1 row: too few to compare losses"),
    ):
        base = replace(on_rows(1.0, 0.4), row_losses=BASE[: len(now.row_losses)])
        gate = evaluate_gate(GateRequirements(), now, None, base=base)
        assert gate.undecided
        assert text in gate.reasons[0]
    # A reason against fails it, however little is known of the rest.
    garbage = replace(on_rows(0.5, rows=3), unusable="3 of 3 answers are empty")
    gate = evaluate_gate(GateRequirements(), garbage, None, base=base)
    assert (gate.passed, gate.reasons[0]) == (False, "3 of 3 answers are empty")


@each(
    ("now", "least", "passed"),
    [
        (standing(195, 5), 0.95, True),  # the demo
        (standing(73), 0.95, True),
        (standing(72), 0.95, None),
        (standing(35), 0.9, True),
        (standing(34), 0.9, None),
        (standing(3), 0.95, None),
        (standing(0, 3), 0.95, False),  # its interval ends at 56.2 %
        (standing(19, 1), 0.95, None),
        (standing(18, 2), 0.99, False),
        (standing(380), 1.0, None),
        (standing(381), 1.0, True),
        (standing(0, 1), 0.0, True),
    ],
)
def test_an_accuracy_passes_only_on_rows_that_could_show_it(now, least, passed):
    gate = evaluate_gate(GateRequirements(min_accuracy=least), now, None)
    assert gate.passed is passed
    assert gate.undecided is (passed is None)
    # Answers of one conversation are one row.
    score = replace(now.score, rows=min(3, now.score.judged))
    assert evaluate_gate(GateRequirements(), replace(now, score=score), None).passed is not True


def scores(mean: float | None, scored: int = 100) -> ModelResult:
    """With a judge command, the other requirements of open text do not apply."""
    score = Score(passed=0, failed=scored, without_oracle=100 - scored)
    return ModelResult(
        score=score, loss=1.0, scores=Scores(mean=mean, scored=scored, cases=100, rows=scored)
    )


def test_scores_of_a_judge_command_decide_by_their_mean():
    assert evaluate_gate(GateRequirements(), scores(0.5), None).passed is True
    gate = evaluate_gate(GateRequirements(min_score=0.8), scores(0.75), None)
    assert gate.reasons == ("mean score 0.75 is below 0.8",)
    gate = evaluate_gate(GateRequirements(), scores(1.0, 90), None)
    assert gate.reasons[0].startswith("10 of 100 cases have no score of the judge command")
    assert evaluate_gate(GateRequirements(), scores(None, 0), None).passed is False
    few = replace(scores(1.0), scores=Scores(mean=1.0, scored=3, cases=3, rows=3))
    assert evaluate_gate(GateRequirements(), few, None).undecided
    gate = evaluate_gate(GateRequirements(), scores(0.6), scores(0.7))
    assert gate.reasons == ("mean score 0.6 is below the baseline's 0.7 by more than 5% of it",)

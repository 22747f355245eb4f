from __future__ import annotations

import math

import pytest
import torch

from expert.core.errors import ExpertError
from expert.training.evaluation import evaluate, mean_metrics
from expert.training.objectives.objective import EvalResult
from tests.training.toys import OBJECTIVE, toy_batches, toy_engine


def test_an_interrupted_evaluation_returns_none():
    _, _, engine = toy_engine()
    asked = iter([False, True])
    assert evaluate(engine, OBJECTIVE, toy_batches(8, 2), stop=lambda: next(asked)) is None


def test_metrics_go_by_the_names_of_the_manifest():
    result = EvalResult(loss=math.log(8), token_accuracy=0.5, targets=2, examples=1)
    assert result.metric("eval_loss") == math.log(8)
    assert result.metric("eval_perplexity") == pytest.approx(8.0)
    assert result.metric("eval_token_accuracy") == 0.5
    assert EvalResult(loss=1e4, token_accuracy=0, targets=1, examples=1).perplexity == math.inf


def test_no_target_tokens_are_an_error():
    with pytest.raises(ExpertError, match="no answer token before max_seq_length in 3 rows"):
        mean_metrics(0.0, 0, targets=0, examples=3)
    made = mean_metrics(6.0, 1, targets=4, examples=3)
    assert (made.loss, made.token_accuracy) == (1.5, 0.25)


@pytest.mark.parametrize("at_once", [1, 3, 8])
def test_every_token_counts_the_same_whatever_batch_it_is_in(at_once):
    model, _, engine = toy_engine()
    (all_rows,) = toy_batches(8, 8)
    with torch.no_grad():
        loss, correct = model.evaluate(all_rows)
    sums = evaluate(engine, OBJECTIVE, toy_batches(8, at_once))
    # Batches are summed in float32, the batches' sums in float64.
    assert float(sums.sums["loss"]) == pytest.approx(float(loss), rel=1e-6)
    assert int(sums.sums["correct"]) == int(correct)
    assert (sums.weight, sums.examples) == (8, 8)

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch

from expert.training.step import StepInterrupted, train_step
from tests.training.toys import OBJECTIVE, toy_batches, toy_engine


def test_batches_of_unequal_size_weigh_by_their_tokens():
    """A mean of means would give the lone row of the last batch the weight of four."""
    model, _, engine = toy_engine()
    expected = sum(float(model.loss_sum(batch).detach()) for batch in toy_batches(9, 9))
    stats = train_step(engine, OBJECTIVE, toy_batches(9, 4), step=1, rate=0.0, max_norm=0.0)
    assert float(stats.loss_sum) == pytest.approx(expected, rel=1e-6)
    model.matrix.grad = None
    (model.loss_sum(toy_batches(9, 9)[0]) / 9).backward()
    norm = torch.cat([model.matrix.grad.flatten(), model.gate.grad]).norm()
    assert float(stats.grad_norm) == pytest.approx(float(norm), rel=1e-6)


def test_a_step_without_targets_divides_by_nothing():
    _, _, engine = toy_engine()
    empty = toy_batches(4, 4)[0]
    empty = type(empty)(tokens=empty.tokens[:0], labels=empty.labels[:0])
    nothing = train_step(engine, OBJECTIVE, [empty], step=2, rate=1e-2, max_norm=1.0)
    assert nothing.weight == 0
    assert float(nothing.loss_sum) == 0.0
    assert bool(nothing.applied)


def test_an_error_during_the_optimizer_step_raises_step_interrupted(monkeypatch):
    _, learner, engine = toy_engine()

    monkeypatch.setattr(learner, "step", MagicMock(side_effect=MemoryError("no room")))
    with pytest.raises(StepInterrupted, match="step 7 failed while changing the weights") as caught:
        train_step(engine, OBJECTIVE, toy_batches(2, 2), step=7, rate=1e-2, max_norm=1.0)
    assert isinstance(caught.value.__cause__, MemoryError)

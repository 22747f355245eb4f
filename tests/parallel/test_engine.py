from __future__ import annotations

import torch

from expert.parallel.engine import Engine
from tests.training.toys import CPU, OBJECTIVE, ToyModel, accumulate, toy_batches, toy_engine

BATCH = toy_batches(6, 6)[0]


def test_what_was_accumulated_is_used_once():
    model, _, engine = toy_engine()
    accumulate(engine, BATCH, divisor=6)
    engine.step(step=1, rate=1e-2, max_norm=1.0)
    assert model.matrix.grad is None
    assert float(engine.step(step=2, rate=1e-2, max_norm=1.0).grad_norm) == 0.0


def test_autocast_covers_forward_and_evaluation():
    types = []

    class Watched(ToyModel):
        def said(self, batch):
            product = batch.tokens.float() @ self.matrix
            types.append(product.dtype)
            return super().said(batch)

    model, learner, _ = toy_engine(Watched())
    engine = Engine(model, learner, device=CPU, autocast=torch.bfloat16)
    accumulate(engine, BATCH, divisor=6)
    engine.evaluate(OBJECTIVE.evaluate, BATCH)
    assert types == [torch.bfloat16] * 2

"""A model of a few weights behind a real engine and a real learner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from expert.parallel.engine import Engine
from expert.planning.run_plan import OptimPlan, StabilityPlan
from expert.training.learner import OptimizerLearner
from expert.training.objectives.next_token import NextToken
from expert.training.step import forward_backward

CPU = torch.device("cpu")
OBJECTIVE = NextToken()
WIDTH = 6


@dataclass(frozen=True, kw_only=True)
class Counts:
    targets: int
    real_tokens: int
    examples: int


@dataclass(frozen=True, kw_only=True)
class ToyBatch:
    """Rows of numbers, each with the number to predict."""

    tokens: Tensor
    labels: Tensor
    bins: tuple[int, ...] = ()

    @property
    def targets(self) -> int:
        return len(self.labels)

    @property
    def counts(self) -> Counts:
        rows = len(self.labels)
        return Counts(targets=rows, real_tokens=rows * WIDTH, examples=rows)


def optim_plan(**changes: Any) -> OptimPlan:
    own: dict[str, Any] = {
        "optimizer": "adamw_torch",
        "learning_rate": 1e-2,
        "scheduler": "constant",
        "scheduler_options": {},
        "warmup_steps": None,
        "warmup_ratio": None,
        "weight_decay": 0.01,
        "betas": (0.9, 0.999),
        "epsilon": 1e-8,
        "max_grad_norm": 1.0,
        "seed": 0,
    }
    return OptimPlan(**{**own, **changes})


def stability(**changes: Any) -> StabilityPlan:
    own = {"on_not_finite": "stop", "max_skipped_updates": 10, "on_loss_spike": "ignore"}
    return StabilityPlan(**{**own, "max_rollbacks": 3, **changes})


class ToyModel:
    """The squared errors of a matrix and a gate, summed over the rows."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(1)
        start = torch.randn(WIDTH, 3, generator=generator)
        self.matrix = Parameter(start.to(dtype))
        self.gate = Parameter(torch.ones(3, dtype=dtype))
        self.named = [("matrix", self.matrix), ("gate", self.gate)]

    def said(self, batch: ToyBatch) -> Tensor:
        inputs = batch.tokens.to(self.matrix.dtype)
        return ((inputs @ self.matrix) * self.gate).sum(dim=1)

    def loss_sum(self, batch: ToyBatch) -> Tensor:
        wrong = self.said(batch) - batch.labels.to(self.matrix.dtype)
        return wrong.square().sum().float()

    def evaluate(self, batch: ToyBatch) -> tuple[Tensor, Tensor]:
        wrong = self.said(batch) - batch.labels
        return wrong.square().sum(), (wrong.abs() < 1.0).sum()


def toy_batches(rows: int, at_once: int, seed: int = 0) -> list[ToyBatch]:
    """The same rows for every micro-batch size."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randn(rows, generator=generator, dtype=torch.float64)
    return [
        ToyBatch(
            tokens=tokens[begin : begin + at_once],
            labels=labels[begin : begin + at_once],
            bins=tuple(range(begin, min(rows, begin + at_once))),
        )
        for begin in range(0, rows, at_once)
    ]


def toy_engine(
    model: ToyModel | None = None, *, loss_scaling: bool = False, **plan: Any
) -> tuple[ToyModel, OptimizerLearner, Engine]:
    model = model or ToyModel()
    made = optim_plan(**plan)
    learner = OptimizerLearner(model.named, made, device=CPU, loss_scaling=loss_scaling)
    return model, learner, Engine(model, learner, device=CPU)


def accumulate(engine: Any, batch: Any, *, divisor: int) -> Tensor:
    """Add the gradient of a batch; returns its loss sum."""
    return forward_backward(engine, OBJECTIVE, batch, divisor=divisor)[0]

"""Supervised fine-tuning: predict each token of the answer from those before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from expert.training.evaluation import mean_metrics
from expert.training.objectives.objective import EvalResult, Objective


class NextToken(Objective):
    """Cross entropy, summed over the target tokens of a batch."""

    def weight(self, batch: Any) -> int:
        return int(batch.targets)

    def loss_sum(self, model: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return model.loss_sum(batch), {}

    def evaluate(self, model: Any, batch: Any) -> dict[str, Tensor]:
        loss, correct = model.evaluate(batch)
        return {"loss": loss, "correct": correct}

    def result(self, sums: Mapping[str, float], *, weight: int, examples: int) -> EvalResult:
        return mean_metrics(sums["loss"], sums["correct"], targets=weight, examples=examples)

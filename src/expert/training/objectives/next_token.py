"""Supervised fine-tuning: predict each token of the answer from those before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from expert.parallel.engine import Engine
from expert.training.evaluation import EvalResult, mean_metrics


class NextToken:
    """Cross entropy, summed over the target tokens of a batch."""

    def begin_step(self, engine: Engine, batches: Sequence[Any]) -> None:
        """Nothing: the loss of a batch needs no other batch."""

    def weight(self, batch: Any) -> int:
        return int(batch.targets)

    def loss_sum(self, model: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return model.loss_sum(batch), {}

    def evaluate(self, model: Any, batch: Any) -> dict[str, Tensor]:
        loss, correct = model.evaluate(batch)
        return {"loss": loss, "correct": correct}

    def result(self, sums: Mapping[str, float], *, weight: int, examples: int) -> EvalResult:
        return mean_metrics(sums["loss"], sums["correct"], targets=weight, examples=examples)

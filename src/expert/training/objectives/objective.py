"""What an objective is: how a batch becomes a loss, what it is divided by, what is reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from expert.parallel.engine import Engine
from expert.training.evaluation import EvalResult, Evaluates


class Objective(Evaluates, Protocol):
    """A value that the step and the evaluation are given; neither knows which one it is.

    Sums travel and means are made once: the loss sum of a batch is divided by the weight of all
    batches of the step, on all ranks.
    """

    def begin_step(self, engine: Engine, batches: Sequence[Any]) -> None:
        """Measure what the losses of the step's batches need of all of them, on all ranks."""

    def loss_sum(self, model: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to backpropagate, summed over the batch, and sums of further metrics."""

    def result(self, sums: Mapping[str, float], *, weight: int, examples: int) -> EvalResult:
        """The means of an evaluation, from its sums over all batches."""

"""What an objective is: how a batch becomes a loss, what it is divided by, what is reported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from expert.parallel.engine import Engine

MEAN_OF = " of"
"""Ends the name of a metric that counts what the metric before it is a sum of, where that is not
what the loss is divided by."""


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """Means over all target tokens."""

    loss: float
    token_accuracy: float | None
    """None if the loss is not that of tokens; then there is no perplexity either."""
    targets: int
    examples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further means, of objectives that have them."""
    row_losses: tuple[float, ...] = ()
    """Loss sums of the rows, if they were evaluated one by one."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def fields(self) -> dict[str, Any]:
        """As fields of an event."""
        if self.token_accuracy is None:
            return {"loss": self.loss, **self.metrics}
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "token_accuracy": self.token_accuracy,
            "tokens": self.targets,
            **self.metrics,
        }

    def metric(self, name: str) -> float:
        """The metric that a manifest calls eval_loss, eval_perplexity or eval_token_accuracy."""
        name = name.removeprefix("eval_")
        return float(self.metrics[name] if name in self.metrics else getattr(self, name))


class Objective(Protocol):
    """A value that the step and the evaluation are given; neither knows which one it is.

    Sums travel and means are made once: the loss sum of a batch is divided by the weight of all
    batches of the step, on all ranks.
    """

    def begin(self, model: Any) -> None:
        """Called with a model that has the weights which training starts from."""
        return

    def begin_step(self, engine: Engine, batches: Sequence[Any]) -> None:
        """Measure what the losses of the step's batches need of all of them, on all ranks: nothing,
        for most objectives."""
        return

    def weight(self, batch: Any) -> int:
        """What the loss sum of a batch is a sum over: target tokens, or pairs."""

    def loss_sum(self, model: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to backpropagate, summed over the batch, and sums of further metrics."""

    def evaluate(self, model: Any, batch: Any) -> dict[str, Tensor]:
        """Sums over the batch without dropout, among them `loss`."""

    def result(self, sums: Mapping[str, float], *, weight: int, examples: int) -> EvalResult:
        """The means of an evaluation, from its sums over all batches."""
        means = means_of(sums, weight)
        loss = means.pop("loss")
        return EvalResult(
            loss=loss, token_accuracy=None, targets=weight, examples=examples, metrics=means
        )


def means_of(sums: Mapping[str, float], weight: float) -> dict[str, float]:
    """The means of metrics, divided by their own counts or else by `weight`."""
    return {
        name: value / max(1.0, sums.get(name + MEAN_OF, weight))
        for name, value in sums.items()
        if not name.endswith(MEAN_OF)
    }

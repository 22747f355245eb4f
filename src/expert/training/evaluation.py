"""Loss and token accuracy on held-out rows, without keeping logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expert.core.errors import ExpertError
from expert.core.text import counted
from expert.parallel.engine import Engine


@dataclass(frozen=True, kw_only=True)
class EvalSums:
    """Sums over all target tokens, still on the device."""

    loss_sum: Tensor
    correct: Tensor
    targets: int
    examples: int


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """Means over all target tokens."""

    loss: float
    token_accuracy: float
    targets: int
    examples: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def fields(self) -> dict[str, Any]:
        """As fields of an event."""
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "token_accuracy": self.token_accuracy,
            "tokens": self.targets,
        }

    def metric(self, name: str) -> float:
        """The metric that a manifest calls eval_loss, eval_perplexity or eval_token_accuracy."""
        return float(getattr(self, name.removeprefix("eval_")))


class NoTargetTokens(ExpertError):
    """The rows have no target token, so there is no mean loss."""


def mean_metrics(loss_sum: float, correct: float, *, targets: int, examples: int) -> EvalResult:
    """Means from sums on the host; raises NoTargetTokens without targets."""
    if not targets:
        raise NoTargetTokens(
            "nothing to evaluate: no answer token before max_seq_length in "
            f"{counted(examples, 'row')}  (increase training.config.max_seq_length, or use rows "
            "with answers)"
        )
    return EvalResult(
        loss=loss_sum / targets,
        token_accuracy=correct / targets,
        targets=targets,
        examples=examples,
    )


def evaluate(
    engine: Engine, batches: Iterable[Any], *, stop: Callable[[], bool] = lambda: False
) -> EvalSums | None:
    """Evaluate all batches once, every token weighted equally.

    None if `stop` became true meanwhile: a part of the rows is not a result.
    """
    loss_sum = torch.zeros((), dtype=torch.float64, device=engine.device)
    correct = torch.zeros((), dtype=torch.int64, device=engine.device)
    targets = examples = 0
    for batch in batches:
        if stop():
            return None
        batch_loss, batch_correct = engine.evaluate(batch)
        loss_sum += batch_loss
        correct += batch_correct
        targets += batch.targets
        examples += batch.counts.examples
    targets, examples = engine.total(targets, examples)
    return EvalSums(
        loss_sum=engine.summed(loss_sum),
        correct=engine.summed(correct),
        targets=targets,
        examples=examples,
    )

"""Loss and token accuracy on held-out rows, without keeping logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from expert.core.errors import ExpertError
from expert.core.text import counted
from expert.parallel.engine import Engine


class Evaluates(Protocol):
    """What an evaluation needs of an objective."""

    def weight(self, batch: Any) -> int:
        """What the loss sum of a batch is a sum over: target tokens, or pairs."""

    def evaluate(self, model: Any, batch: Any) -> dict[str, Tensor]:
        """Sums over the batch without dropout, among them `loss`."""


@dataclass(frozen=True, kw_only=True)
class EvalSums:
    """Sums over all batches and ranks, still on the device."""

    sums: dict[str, Tensor]
    weight: int
    examples: int


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
    engine: Engine,
    objective: Evaluates,
    batches: Iterable[Any],
    *,
    stop: Callable[[], bool] = lambda: False,
) -> EvalSums | None:
    """Evaluate all batches once, every token weighted equally.

    None if `stop` became true meanwhile: a part of the rows is not a result.
    """
    sums: dict[str, Tensor] = {}
    weight = examples = 0
    for batch in batches:
        if stop():
            return None
        for name, value in engine.evaluate(objective.evaluate, batch).items():
            sums[name] = sums.get(name, 0) + value.double()
        weight += objective.weight(batch)
        examples += batch.counts.examples
    weight, examples = engine.total(weight, examples)
    return EvalSums(
        sums={name: engine.summed(value) for name, value in sums.items()},
        weight=weight,
        examples=examples,
    )

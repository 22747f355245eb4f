"""Loss and token accuracy on held-out rows, without keeping logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from expert.core.errors import ExpertError
from expert.core.text import counted
from expert.parallel.engine import Engine
from expert.training.objectives.objective import EvalResult, Objective


@dataclass(frozen=True, kw_only=True)
class EvalSums:
    """Sums over all batches and ranks, still on the device."""

    sums: dict[str, Tensor]
    weight: int
    examples: int


def mean_metrics(loss_sum: float, correct: float, *, targets: int, examples: int) -> EvalResult:
    """Means from sums on the host; raises without targets."""
    if not targets:
        raise ExpertError(
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
    objective: Objective,
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

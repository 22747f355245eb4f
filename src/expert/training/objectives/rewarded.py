"""GRPO: answers that the weights in training have just given become likelier if they are better
than the others to their prompt, and less likely if they are worse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expert.parallel.engine import Engine
from expert.training.objectives.next_token import NextToken

SPREAD = 1e-4
"""Added to the standard deviation of the rewards of a group."""


def advantages(rewards: Sequence[float]) -> list[float]:
    """How much better each answer is than its group, in standard deviations; all 0 if there is no
    difference."""
    values = torch.tensor(rewards, dtype=torch.float64)
    if len(values) < 2 or bool((values == values[0]).all()):
        return [0.0] * len(values)
    centred: list[float] = ((values - values.mean()) / (values.std() + SPREAD)).tolist()
    return centred


class RewardedAnswers(NextToken):
    """The mean over the tokens of all answers of a step of advantage times probability, relative to
    that with which the token was drawn. This ratio is clipped by others: here every batch of
    answers is learnt from in one step, by the weights that gave them, so that it is 1 and what
    remains is its gradient.

    With `beta` the mean divergence from the starting weights is added. Evaluated are expected
    answers, as in supervised fine-tuning."""

    def __init__(self, beta: float = 0.0) -> None:
        self._beta = beta
        self._start: list[Tensor] = []
        self._reference: dict[Any, Tensor] = {}
        """The log-probabilities of the targets of each batch under the starting weights."""

    def begin(self, model: Any) -> None:
        if self._beta:
            self._start = [parameter.detach().clone() for _, parameter in model.trainable]

    def begin_step(self, engine: Engine, batches: Sequence[Any]) -> None:
        self._reference = {}
        if self._beta:
            for batch in batches:
                self._reference[batch] = engine.evaluate(self._at_start, batch)["logps"]

    def loss_sum(self, model: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        if batch.reference is None:  # expected answers, to see what fits the card
            return super().loss_sum(model, batch)
        logps = model.target_logps(batch)
        # Places without a target are of the answer after the last.
        gains = F.pad(batch.reference, (0, 1))[batch.answers[: len(logps)].long()]
        losses = -gains * (1 + logps - logps.detach())
        if batch not in self._reference:
            return losses.sum(), {}
        change = self._reference[batch] - logps
        divergence = change.exp() - change - 1
        loss = (losses + self._beta * divergence).sum()
        return loss, {"kl": divergence.detach().sum()}

    def _at_start(self, model: Any, batch: Any) -> dict[str, Tensor]:
        with self._starting_weights(model):
            return {"logps": model.target_logps(batch)}

    @contextmanager
    def _starting_weights(self, model: Any) -> Iterator[None]:
        own = [parameter.detach().clone() for _, parameter in model.trainable]
        try:
            self._put(model, self._start)
            yield
        finally:
            self._put(model, own)

    @staticmethod
    @torch.no_grad()
    def _put(model: Any, weights: Sequence[Tensor]) -> None:
        for (_, parameter), values in zip(model.trainable, weights, strict=True):
            parameter.copy_(values)

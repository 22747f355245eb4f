"""Preference training: two answers to each prompt, of which one is preferred.

A loss is a function of the log-probabilities of the answers, summed over their tokens: of the
policy, and of the weights that training started from (the reference).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expert.planning.run_plan import ObjectivePlan
from expert.training.objectives.objective import Objective


@dataclass(frozen=True, eq=False, slots=True)
class Answers:
    """One number for each row: of the preferred answers or of the rejected ones."""

    policy: Tensor
    """The sum of the log-probabilities of the answer's tokens."""
    reference: Tensor
    tokens: Tensor

    @property
    def gain(self) -> Tensor:
        """How much more likely the answer is than under the reference, as a logarithm."""
        return self.policy - self.reference

    @property
    def mean(self) -> Tensor:
        """The mean log-probability of its tokens."""
        return self.policy / self.tokens


Loss = Callable[[Answers, Answers, ObjectivePlan], Tensor]


def sigmoid(chosen: Answers, rejected: Answers, plan: ObjectivePlan) -> Tensor:
    """DPO; with `label_smoothing` its conservative form."""
    margin, epsilon = plan.beta * (chosen.gain - rejected.gain), plan.label_smoothing
    return -(1 - epsilon) * F.logsigmoid(margin) - epsilon * F.logsigmoid(-margin)


def robust(chosen: Answers, rejected: Answers, plan: ObjectivePlan) -> Tensor:
    """DPO, unbiased if the share `label_smoothing` of the preferences is wrong."""
    margin, epsilon = plan.beta * (chosen.gain - rejected.gain), plan.label_smoothing
    smoothed = (1 - epsilon) * F.logsigmoid(margin) - epsilon * F.logsigmoid(-margin)
    return -smoothed / (1 - 2 * epsilon)


def hinge(chosen: Answers, rejected: Answers, plan: ObjectivePlan) -> Tensor:
    return F.relu(1 - plan.beta * (chosen.gain - rejected.gain))


def ipo(chosen: Answers, rejected: Answers, plan: ObjectivePlan) -> Tensor:
    """The mean gain of a token is to differ by 1 / (2 beta)."""
    difference = chosen.gain / chosen.tokens - rejected.gain / rejected.tokens
    return (difference - 1 / (2 * plan.beta)) ** 2


def apo_zero(chosen: Answers, rejected: Answers, plan: ObjectivePlan) -> Tensor:
    """Preferred answers become more likely and rejected ones less."""
    return 1 - torch.sigmoid(plan.beta * chosen.gain) + torch.sigmoid(plan.beta * rejected.gain)


def apo_down(chosen: Answers, rejected: Answers, plan: ObjectivePlan) -> Tensor:
    """Both become less likely, rejected answers more so."""
    margin = plan.beta * (chosen.gain - rejected.gain)
    return torch.sigmoid(plan.beta * chosen.gain) + 1 - torch.sigmoid(margin)


def simpo(chosen: Answers, rejected: Answers, plan: ObjectivePlan) -> Tensor:
    """Mean log-probabilities with a target margin, without a reference."""
    return -F.logsigmoid(plan.beta * (chosen.mean - rejected.mean) - plan.simpo_gamma)


def orpo(chosen: Answers, rejected: Answers, plan: ObjectivePlan) -> Tensor:
    """The odds of the answers, without a reference; the plan adds the likelihood."""
    odds = [each.mean - torch.log1p(-torch.exp(each.mean)) for each in (chosen, rejected)]
    return -plan.beta * F.logsigmoid(odds[0] - odds[1])


def cpo(chosen: Answers, rejected: Answers, plan: ObjectivePlan) -> Tensor:
    """DPO against a uniform reference; the plan adds the likelihood."""
    return -F.logsigmoid(plan.beta * (chosen.policy - rejected.policy))


LOSSES: dict[str, Loss] = {
    "sigmoid": sigmoid,
    "robust": robust,
    "hinge": hinge,
    "ipo": ipo,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "simpo": simpo,
    "orpo": orpo,
    "cpo": cpo,
}
BY_MEANS = ("simpo", "orpo")
"""Losses that compare mean log-probabilities, which are then the rewards."""


@dataclass(frozen=True)
class Preference(Objective):
    """An objective over pairs: loss and metrics are sums over pairs, divided by their number."""

    plan: ObjectivePlan

    def weight(self, batch: Any) -> int:
        return int(batch.counts.examples)

    def loss_sum(self, model: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        sums = self._sums(model, batch)
        return sums["loss"], {name: s.detach() for name, s in sums.items() if name != "loss"}

    def evaluate(self, model: Any, batch: Any) -> dict[str, Tensor]:
        with model.answering():
            return self._sums(model, batch)

    def _sums(self, model: Any, batch: Any) -> dict[str, Tensor]:
        logps, tokens = model.answer_logps(batch)
        table = (logps.view(-1, 2), batch.reference.view(-1, 2), tokens.view(-1, 2))
        present = tokens.view(-1, 2).sum(1) > 0
        chosen, rejected = (
            Answers(policy, reference, count.clamp(min=1))
            for policy, reference, count in zip(*(each.unbind(1) for each in table), strict=True)
        )
        assert self.plan.loss is not None
        loss = LOSSES[self.plan.loss](chosen, rejected, self.plan)
        if self.plan.sft_weight:
            loss = loss - self.plan.sft_weight * chosen.mean
        with torch.no_grad():
            rewards = [self.plan.beta * self._gain(each) for each in (chosen, rejected)]
            by_name = {
                "rewards/chosen": rewards[0],
                "rewards/rejected": rewards[1],
                "rewards/margins": rewards[0] - rewards[1],
                "rewards/accuracies": (rewards[0] > rewards[1]).to(logps.dtype),
                "logps/chosen": chosen.policy,
                "logps/rejected": rejected.policy,
            }
        rows = {"loss": loss, **by_name}
        return {name: torch.where(present, row, 0.0).sum() for name, row in rows.items()}

    def _gain(self, answers: Answers) -> Tensor:
        if self.plan.loss in BY_MEANS:
            return answers.mean
        return answers.gain if self.plan.needs_reference else answers.policy

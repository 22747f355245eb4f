"""KTO: answers that are good or bad, each by itself, in pairs or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from expert.parallel.engine import Engine
from expert.planning.run_plan import ObjectivePlan
from expert.training.objectives.objective import MEAN_OF, Objective


class JudgedAnswers(Objective):
    """An objective over answers: a good one is to gain more, and a bad one less, than answers that
    belong to other prompts, whose mean gain estimates how far the model is from its start."""

    def __init__(self, plan: ObjectivePlan) -> None:
        self.plan = plan
        self._divergence: Tensor | None = None
        """Of the whole step; one tensor, since captured passes read it where it is."""

    def begin_step(self, engine: Engine, batches: Sequence[Any]) -> None:
        """Measure the divergence over all batches of the step, on all ranks."""
        if self._divergence is None:
            self._divergence = torch.zeros((), device=engine.device)
        total = torch.zeros(2, device=engine.device)
        for batch in batches:
            total += engine.evaluate(self._mismatched, batch)["sums"]
        gain, count = engine.summed(total).unbind()
        self._divergence.copy_((gain / count.clamp(min=1)).clamp(min=0))

    def weight(self, batch: Any) -> int:
        return int(batch.counts.answers)

    def loss_sum(self, model: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        if self._divergence is None:  # a batch that is only tried, before the first step
            self._divergence = torch.zeros((), device=batch.reference.device)
        sums = self._sums(model, batch, self._divergence)
        return sums["loss"], {name: s.detach() for name, s in sums.items() if name != "loss"}

    def evaluate(self, model: Any, batch: Any) -> dict[str, Tensor]:
        """Against the divergence of the batch, as no step has begun."""
        gain, count = self._mismatched(model, batch)["sums"].unbind()
        with model.answering():
            return self._sums(model, batch, (gain / count.clamp(min=1)).clamp(min=0))

    def _mismatched(self, model: Any, batch: Any) -> dict[str, Tensor]:
        """The gains of the answers of other rows, summed, and how many there are."""
        with model.answering():
            logps, tokens = model.answer_logps(batch)
        gains = (logps - batch.reference).view(-1, 3)[:, 2]
        present = tokens.view(-1, 3)[:, 2] > 0
        return {"sums": torch.stack((torch.where(present, gains, 0.0).sum(), present.sum()))}

    def _sums(self, model: Any, batch: Any, divergence: Tensor) -> dict[str, Tensor]:
        logps, tokens = model.answer_logps(batch)
        gains = (logps - batch.reference).view(-1, 3)
        present = tokens.view(-1, 3)[:, :2] > 0
        ahead = torch.stack((gains[:, 0] - divergence, divergence - gains[:, 1]), 1)
        good, bad = self.plan.desirable_weight, self.plan.undesirable_weight
        values = 1 - torch.sigmoid(self.plan.beta * ahead)
        losses = torch.stack((good * values[:, 0], bad * values[:, 1]), 1)
        found = {"loss": torch.where(present, losses, 0.0).sum()}
        for column, name in enumerate(("chosen", "rejected")):
            here, count = present[:, column], present[:, column].sum().to(losses.dtype)
            for metric, numbers in (
                (f"rewards/{name}", self.plan.beta * gains[:, column].detach()),
                (f"logps/{name}", logps.view(-1, 3)[:, column].detach()),
            ):
                found |= {metric: torch.where(here, numbers, 0.0).sum(), metric + MEAN_OF: count}
        answers = present.sum().to(losses.dtype)
        return {**found, "kl": divergence * answers, "kl" + MEAN_OF: answers}

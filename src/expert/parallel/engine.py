"""The single-device engine: forward, backward and update of one model on one card or CPU.

Engines are the only polymorphic part of training: the loop knows what is declared here and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from expert.parallel.graphs import GraphedPasses, Recorder

Phase = Callable[[str], AbstractContextManager[Any]]


class Batch(Protocol):
    """What the loop knows of a batch."""

    @property
    def targets(self) -> int: ...


class Model(Protocol):
    """A model that learns: sums of losses over the target tokens of a batch."""

    def loss_sum(self, batch: Any) -> Tensor: ...
    def evaluate(self, batch: Any) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class UpdateStats:
    """What an update did, still on the device."""

    grad_norm: Tensor
    applied: Tensor
    """1 where the weights were changed, 0 where the gradients were not finite."""


class Learner(Protocol):
    """Gradients to weights: the optimizer with all that belongs to it."""

    def computing(self) -> list[Tensor]: ...
    def backpropagate(self, loss: Tensor) -> None: ...
    def collect(self, loss: Tensor) -> None: ...
    def take(self, loss: Tensor, gradients: Sequence[Tensor | None]) -> None: ...
    def update(self, *, rate: float, max_norm: float) -> UpdateStats: ...
    def discard(self) -> None: ...
    def gradients(self) -> dict[str, Tensor]: ...
    def tensors(self) -> dict[str, dict[str, Tensor]]: ...
    def load(self, groups: Mapping[str, Mapping[str, Tensor]]) -> None: ...


class SingleDevice:
    """One model, one device."""

    def __init__(
        self,
        model: Model,
        learner: Learner,
        *,
        device: torch.device,
        autocast: torch.dtype | None = None,
        phase: Phase = lambda name: nullcontext(),
        after_update: Callable[[int], None] = lambda step: None,
        record: Recorder | None = None,
    ) -> None:
        """`record`: passes are recorded with it and replayed; None: they are run each time."""
        self.device = device
        self._model = model
        self._learner = learner
        self._autocast = autocast
        self._phase = phase
        self._after_update = after_update
        self._graphs = GraphedPasses(self, record) if record is not None else None

    def accumulate(self, batch: Batch, *, divisor: int) -> Tensor:
        """Add the gradient of the batch's summed loss over `divisor`; returns the sum."""
        recorded = self._graphs.of(batch) if self._graphs is not None else None
        if recorded is None:
            with self._phase("forward"):
                loss = self.forward(batch)
            with self._phase("backward"):
                share = loss / divisor
                self.backward(share)
                self._learner.collect(share.detach())
            return loss.detach()
        with self._phase("forward"):
            recorded.fill(batch, divisor)
            recorded.forward()
        with self._phase("backward"):
            recorded.backward()
            self._learner.take(recorded.share, recorded.gradients)
            return recorded.loss.clone()

    def forward(self, batch: Batch) -> Tensor:
        """The summed loss of a batch, in the precision of the run."""
        with self._precision():
            return self._model.loss_sum(batch)

    def backward(self, loss: Tensor) -> None:
        """Gradients of a loss where the parameters that compute have theirs."""
        self._learner.backpropagate(loss)

    def computing(self) -> list[Tensor]:
        """The parameters that get gradients from `backward`."""
        return self._learner.computing()

    def update(self, *, step: int, rate: float, max_norm: float) -> UpdateStats:
        """Change the weights by what was accumulated, and forget it."""
        with self._phase("optimizer"):
            stats = self._learner.update(rate=rate, max_norm=max_norm)
            self._after_update(step)  # AdaLoRA looks at the gradients once more
            self._learner.discard()
        return stats

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed loss and the number of targets that the model would have said."""
        with self._precision():
            return self._model.evaluate(batch)

    def discard(self) -> None:
        """Forget gradients that were accumulated and not used."""
        self._learner.discard()

    def gradients(self) -> dict[str, Tensor]:
        """What was accumulated and not used yet, by name."""
        return self._learner.gradients()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Everything that changes in training, by group and name."""
        return self._learner.tensors()

    def load(self, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go back to what `tensors` gave."""
        self._learner.load(groups)

    def _precision(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)

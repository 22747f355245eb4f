"""The engine: a model and its optimizer on one device, and what the training loop calls.

Replicas and shards on many devices override what communicates. Every rank makes the same calls in
the same order, so each call may communicate with the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from expert.core.world import SINGLE_PROCESS, World
from expert.parallel.graphs import Capture, CapturedPasses

Groups = Mapping[str, Mapping[str, Tensor]]
"""Tensors by group and name, as in a checkpoint."""
Phase = Callable[[str], AbstractContextManager[Any]]


class HasTargets(Protocol):
    """What the loop knows of a batch."""

    @property
    def targets(self) -> int: ...


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class StepResult:
    """The result of an optimizer step, still on the device."""

    grad_norm: Tensor
    """Of the gradients of all ranks."""
    applied: Tensor
    """1 if the weights were changed, 0 if the gradients were not finite."""


class Model(Protocol):
    """A trainable model: summed losses over the target tokens of a batch."""

    def loss_sum(self, batch: Any) -> Tensor: ...
    def evaluate(self, batch: Any) -> tuple[Tensor, Tensor]: ...


class Learner(Protocol):
    """From gradients to weights: the optimizer and everything around it."""

    def computing(self) -> list[Tensor]: ...
    def backpropagate(self, loss: Tensor) -> None: ...
    def collect(self, loss: Tensor) -> None: ...
    def take(self, loss: Tensor, gradients: Sequence[Tensor | None]) -> None: ...
    def gradients_to_reduce(self) -> list[Tensor]: ...
    def step(self, *, rate: float, max_norm: float) -> StepResult: ...
    def discard(self) -> None: ...
    def gradients(self) -> dict[str, Tensor]: ...
    def tensors(self) -> dict[str, dict[str, Tensor]]: ...
    def load(self, groups: Groups) -> None: ...


class Engine:
    """A model and its optimizer on one device; sums over ranks are its own numbers."""

    world: World = SINGLE_PROCESS

    def __init__(
        self,
        model: Model,
        learner: Learner,
        *,
        device: torch.device,
        autocast: torch.dtype | None = None,
        phase: Phase = lambda name: nullcontext(),
        after_step: Callable[[int], None] = lambda step: None,
        capture: Capture | None = None,
        warm_up_each_shape: bool = True,
    ) -> None:
        """`capture`: used to capture passes for replay; None: run them each time.
        `warm_up_each_shape`: run them for every shape first."""
        self.device = device
        self._model, self._learner = model, learner
        self._autocast, self._phase, self._after_step = autocast, phase, after_step
        self._captured = None
        if capture is not None:
            self._captured = CapturedPasses(self, capture, warm_up_each_shape=warm_up_each_shape)

    def total(self, *counts: int) -> tuple[int, ...]:
        """Sum host numbers over all ranks: what losses are divided by."""
        return counts

    def summed(self, number: Tensor) -> Tensor:
        """Sum a device number over all ranks, without synchronising."""
        return number

    def accumulate(self, batch: HasTargets, *, divisor: int) -> Tensor:
        """Add the gradient of the batch's summed loss / `divisor`; returns this rank's loss sum."""
        captured = self._captured.of(batch) if self._captured is not None else None
        if captured is None:
            with self._phase("forward"):
                loss = self.forward(batch)
            with self._phase("backward"):
                share = loss / divisor
                self.backward(share)
                self._learner.collect(share.detach())
            return loss.detach()
        with self._phase("forward"):
            captured.fill(batch, divisor)
            captured.forward()
        with self._phase("backward"):
            captured.backward()
            self._learner.take(captured.share, captured.gradients)
            return captured.loss.clone()

    def forward(self, batch: HasTargets) -> Tensor:
        """The summed loss of a batch, in the run's precision."""
        with self._precision():
            return self._model.loss_sum(batch)

    def backward(self, loss: Tensor) -> None:
        """Set the gradients of the computing parameters."""
        self._learner.backpropagate(loss)

    def computing(self) -> list[Tensor]:
        """The parameters that get gradients from `backward`."""
        return self._learner.computing()

    def step(self, *, step: int, rate: float, max_norm: float) -> StepResult:
        """Step with the gradients of all ranks, and clear them."""
        with self._phase("optimizer"):
            applied = self._learner.step(rate=rate, max_norm=max_norm)
            self._after_step(step)  # AdaLoRA needs the gradients once more
            self._learner.discard()
        return applied

    @torch.no_grad()
    def evaluate(self, batch: HasTargets) -> tuple[Tensor, Tensor]:
        """Summed loss and number of correct targets of this rank's batch."""
        with self._precision():
            return self._model.evaluate(batch)

    def discard(self) -> None:
        """Drop accumulated gradients."""
        self._learner.discard()

    def gradients(self) -> dict[str, Tensor]:
        """The accumulated gradients, by name."""
        return self._learner.gradients()

    def tensors(self, *, everywhere: bool = False) -> dict[str, dict[str, Tensor]]:
        """Everything that changes in training, by group and name; whole on rank 0, and on all ranks
        if `everywhere`."""
        return self._learner.tensors()

    def own_tensors(self) -> dict[str, dict[str, Tensor]]:
        """The same, as far as it is on this rank."""
        return self._learner.tensors()

    def load(self, groups: Groups) -> None:
        """Restore what `tensors` returned, for any number of ranks."""
        self._learner.load(groups)

    def _precision(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)

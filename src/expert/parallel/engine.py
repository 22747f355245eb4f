"""The engine: a model and its optimizer on one GPU or CPU, and what those of many devices share.

Only the engine differs between one device, replicas and shards (FSDP2). Every rank makes the same
calls in the same order, so each call may communicate with the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expert.core.world import SINGLE_PROCESS, World
from expert.parallel.graphs import Capture, Captured, CapturedPasses, LossSum

Groups = Mapping[str, Mapping[str, Tensor]]
"""Tensors by group and name, as in a checkpoint."""
Sums = Callable[[Any, Any], dict[str, Tensor]]
"""From model and batch to the sums of an evaluation."""
Phase = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class StepResult:
    """The result of an optimizer step, still on the device."""

    grad_norm: Tensor
    """Of the gradients of all ranks."""
    applied: Tensor
    """1 if the weights were changed, 0 if the gradients were not finite."""


class Engine:
    """A model and its optimizer on one device; sums over ranks are its own numbers."""

    world: World = SINGLE_PROCESS

    def __init__(
        self,
        model: Any,
        learner: Any,
        *,
        device: torch.device,
        autocast: torch.dtype | None = None,
        phase: Phase = lambda name: nullcontext(),
        after_step: Callable[[int], None] = lambda step: None,
        capture: Capture | None = None,
        warm_up_each_shape: bool = True,
    ) -> None:
        """`model`: what an objective computes its loss from. `learner`: the optimizer and
        everything around it. `capture`: used to capture passes for replay; None: run them each
        time. `warm_up_each_shape`: run them for every shape first."""
        self.device = device
        self._model, self._learner = model, learner
        self._autocast, self._phase, self._after_step = autocast, phase, after_step
        self._graphs: CapturedPasses | None = None
        self._replayed: Captured | None = None  # the graphs of the last forward, if it was a replay
        if capture is not None:
            self._graphs = CapturedPasses(
                self.compute, learner, capture, warm_up_each_shape=warm_up_each_shape
            )

    def total(self, *counts: int) -> tuple[int, ...]:
        """Sum host numbers over all ranks: what losses are divided by."""
        return counts

    def summed(self, number: Tensor) -> Tensor:
        """Sum a device number over all ranks, without synchronising."""
        return number

    def forward(self, loss_sum: LossSum, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The summed loss of this rank's batch and its metrics, in the run's precision."""
        self._replayed = self._graphs.of(loss_sum, batch) if self._graphs is not None else None
        with self._phase("forward"):
            if self._replayed is not None:
                return self._replayed.replay_forward(batch)
            return self.compute(loss_sum, batch)

    def backward(self, loss: Tensor, *, divisor: int) -> None:
        """Add the gradient of `loss` / `divisor`, where `loss` is that of the last forward."""
        with self._phase("backward"):
            if self._replayed is not None:
                self._learner.take(*self._replayed.replay_backward(divisor))
                return
            share = loss / divisor
            self._learner.backpropagate(share)
            self._learner.collect(share.detach())

    def compute(self, loss_sum: LossSum, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """A forward pass without a graph; what a graph is captured from."""
        with self.precision():
            return loss_sum(self._model, batch)

    def step(self, *, step: int, rate: float, max_norm: float) -> StepResult:
        """Sum the gradients of all ranks, clip them, step with them and clear them."""
        with self._phase("optimizer"):
            applied: StepResult = self._learner.step(rate=rate, max_norm=max_norm)
            self._after_step(step)  # AdaLoRA needs the gradients once more
            self._learner.discard()
        return applied

    @torch.no_grad()
    def evaluate(self, sums: Sums, batch: Any) -> dict[str, Tensor]:
        """The sums of this rank's batch."""
        with self.precision():
            return sums(self._model, batch)

    def discard(self) -> None:
        """Drop accumulated gradients."""
        self._learner.discard()

    def tensors(self, *, everywhere: bool = False) -> dict[str, dict[str, Tensor]]:
        """Everything that changes in training, by group and name; whole on rank 0, and on all ranks
        if `everywhere`."""
        return self.own_tensors()

    def own_tensors(self) -> dict[str, dict[str, Tensor]]:
        """The same, as far as it is on this rank."""
        found: dict[str, dict[str, Tensor]] = self._learner.tensors()
        return found

    def load(self, groups: Groups) -> None:
        """Restore what `tensors` returned, for any number of ranks."""
        self._learner.load(groups)

    def precision(self, *, keeps: bool = True) -> AbstractContextManager[Any]:
        """The precision that the model computes in. `keeps`: weights rounded to it, meanwhile."""
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast, cache_enabled=keeps)

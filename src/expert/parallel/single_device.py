"""The engine of one model on one GPU or CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from expert.core.world import SINGLE_PROCESS, World
from expert.parallel.engine import Groups, LossSum, StepResult, Sums
from expert.parallel.graphs import Capture, Captured, CapturedPasses

Phase = Callable[[str], AbstractContextManager[Any]]


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


class SingleDevice:
    """An Engine for one model on one device; sums over ranks are its own numbers."""

    world: World = SINGLE_PROCESS

    def __init__(
        self,
        model: Any,
        learner: Learner,
        *,
        device: torch.device,
        autocast: torch.dtype | None = None,
        phase: Phase = lambda name: nullcontext(),
        after_step: Callable[[int], None] = lambda step: None,
        capture: Capture | None = None,
        warm_up_each_shape: bool = True,
    ) -> None:
        """`model`: what an objective computes its loss from. `capture`: used to capture passes for
        replay; None: run them each time. `warm_up_each_shape`: run them for every shape first."""
        self.device = device
        self._model, self._learner = model, learner
        self._autocast, self._phase, self._after_step = autocast, phase, after_step
        self._graphs: CapturedPasses | None = None
        self._replayed: Captured | None = None  # the graphs of the last forward, if it was a replay
        if capture is not None:
            self._graphs = CapturedPasses(self, capture, warm_up_each_shape=warm_up_each_shape)

    def total(self, *counts: int) -> tuple[int, ...]:
        return counts

    def summed(self, number: Tensor) -> Tensor:
        return number

    def forward(self, loss_sum: LossSum, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        self._replayed = self._graphs.of(loss_sum, batch) if self._graphs is not None else None
        with self._phase("forward"):
            if self._replayed is not None:
                return self._replayed.replay_forward(batch)
            return self.compute(loss_sum, batch)

    def backward(self, loss: Tensor, *, divisor: int) -> None:
        with self._phase("backward"):
            if self._replayed is not None:
                self._learner.take(*self._replayed.replay_backward(divisor))
                return
            share = loss / divisor
            self._learner.backpropagate(share)
            self._learner.collect(share.detach())

    def compute(self, loss_sum: LossSum, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """A forward pass without a graph; what a graph is captured from."""
        with self._precision():
            return loss_sum(self._model, batch)

    def backpropagate(self, loss: Tensor) -> None:
        """Set the gradients of the computing parameters; what a graph is captured from."""
        self._learner.backpropagate(loss)

    def computing(self) -> list[Tensor]:
        """The parameters that get gradients."""
        return self._learner.computing()

    def step(self, *, step: int, rate: float, max_norm: float) -> StepResult:
        with self._phase("optimizer"):
            applied = self._learner.step(rate=rate, max_norm=max_norm)
            self._after_step(step)  # AdaLoRA needs the gradients once more
            self._learner.discard()
        return applied

    @torch.no_grad()
    def evaluate(self, sums: Sums, batch: Any) -> dict[str, Tensor]:
        with self._precision():
            return sums(self._model, batch)

    def discard(self) -> None:
        self._learner.discard()

    def gradients(self) -> dict[str, Tensor]:
        return self._learner.gradients()

    def tensors(self, *, everywhere: bool = False) -> dict[str, dict[str, Tensor]]:
        return self._learner.tensors()

    def own_tensors(self) -> dict[str, dict[str, Tensor]]:
        return self._learner.tensors()

    def load(self, groups: Groups) -> None:
        self._learner.load(groups)

    def _precision(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)

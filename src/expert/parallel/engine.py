"""The interface between the training loop and a model on its devices.

Only the engine differs between one device, replicas (DDP) and shards (FSDP2). Every rank makes the
same calls in the same order, so each call may communicate with the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from expert.core.world import World

Groups = Mapping[str, Mapping[str, Tensor]]
"""Tensors by group and name, as in a checkpoint."""


LossSum = Callable[[Any, Any], tuple[Tensor, dict[str, Tensor]]]
"""From model and batch to the summed loss, and sums of further metrics."""
Sums = Callable[[Any, Any], dict[str, Tensor]]
"""From model and batch to the sums of an evaluation."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class StepResult:
    """The result of an optimizer step, still on the device."""

    grad_norm: Tensor
    """Of the gradients of all ranks."""
    applied: Tensor
    """1 if the weights were changed, 0 if the gradients were not finite."""


class Engine(Protocol):
    """A model and its optimizer on one or many devices."""

    @property
    def device(self) -> torch.device: ...
    @property
    def world(self) -> World: ...

    def total(self, *counts: int) -> tuple[int, ...]:
        """Sum host numbers over all ranks: what losses are divided by."""

    def summed(self, number: Tensor) -> Tensor:
        """Sum a device number over all ranks, without synchronising."""

    def forward(self, loss_sum: LossSum, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The summed loss of this rank's batch and its metrics, in the run's precision."""

    def backward(self, loss: Tensor, *, divisor: int) -> None:
        """Add the gradient of `loss` / `divisor`, where `loss` is that of the last forward."""

    def step(self, *, step: int, rate: float, max_norm: float) -> StepResult:
        """Sum the gradients of all ranks, clip them, step with them and clear them."""

    def evaluate(self, sums: Sums, batch: Any) -> dict[str, Tensor]:
        """The sums of this rank's batch."""

    def discard(self) -> None:
        """Drop accumulated gradients."""

    def gradients(self) -> dict[str, Tensor]:
        """The accumulated gradients, by name."""

    def tensors(self, *, everywhere: bool = False) -> dict[str, dict[str, Tensor]]:
        """Everything that changes in training, by group and name; whole on rank 0, and on all ranks
        if `everywhere`."""

    def own_tensors(self) -> dict[str, dict[str, Tensor]]:
        """The same, as far as it is on this rank."""

    def load(self, groups: Groups) -> None:
        """Restore what `tensors` returned, for any number of ranks."""

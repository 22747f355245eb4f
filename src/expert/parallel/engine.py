"""The interface between the training loop and a model on its devices.

Only the engine differs between one device, replicas (DDP) and shards (FSDP2). Every rank makes the
same calls in the same order, so each call may communicate with the other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from expert.core.world import World

Groups = Mapping[str, Mapping[str, Tensor]]
"""Tensors by group and name, as in a checkpoint."""


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

    def accumulate(self, batch: Any, *, divisor: int) -> Tensor:
        """Add the gradient of the batch's summed loss / `divisor`; returns this rank's loss sum."""

    def step(self, *, step: int, rate: float, max_norm: float) -> StepResult:
        """Step with the gradients of all ranks, and clear them."""

    def evaluate(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Summed loss and number of correct targets of this rank's batch."""

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

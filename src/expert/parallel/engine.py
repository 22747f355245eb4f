"""What the training loop knows of a model on its devices: an `Engine`, and no more.

One device, replicas (DDP) or shards (FSDP2) differ here alone. Every rank makes the same calls in
the same order, so each of them may exchange numbers with the other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from expert.core.world import World

Groups = Mapping[str, Mapping[str, Tensor]]
"""Tensors by group and name, as a checkpoint keeps them."""


class HasTargets(Protocol):
    """What the loop knows of a batch."""

    @property
    def targets(self) -> int: ...


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Applied:
    """What an optimizer step did, still on the device."""

    grad_norm: Tensor
    """Of the gradients of all ranks together."""
    applied: Tensor
    """1 where the weights were changed, 0 where the gradients were not finite."""


class Engine(Protocol):
    """A model that trains, with its optimizer, on one device or many."""

    @property
    def device(self) -> torch.device: ...
    @property
    def world(self) -> World: ...

    def total(self, *counts: int) -> tuple[int, ...]:
        """Each number of the host, summed over all ranks: what losses are divided by."""

    def summed(self, number: Tensor) -> Tensor:
        """A number of the device, summed over all ranks; nothing waits for it."""

    def accumulate(self, batch: Any, *, divisor: int) -> Tensor:
        """Add the gradient of the batch's summed loss over `divisor`; returns this rank's sum."""

    def step(self, *, step: int, rate: float, max_norm: float) -> Applied:
        """Change the weights by what all ranks accumulated, and forget it."""

    def evaluate(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Summed loss and the number of targets predicted right, of this rank's batch."""

    def discard(self) -> None:
        """Forget gradients that were accumulated and not used."""

    def gradients(self) -> dict[str, Tensor]:
        """What was accumulated and not used yet, by name."""

    def tensors(self, *, everywhere: bool = False) -> dict[str, dict[str, Tensor]]:
        """Everything that changes in training, by group and name; whole on the first rank, and on
        the others where that is asked for."""

    def own_tensors(self) -> dict[str, dict[str, Tensor]]:
        """The same as far as it lies on this rank."""

    def load(self, groups: Groups) -> None:
        """Go back to what `tensors` gave, under whatever number of ranks."""

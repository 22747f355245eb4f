"""One update, for everything that is ever trained here."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expert.parallel.engine import Batch, SingleDevice
from expert.parallel.graphs import GraphsUnavailable


class UpdateTorn(Exception):
    """Something failed while the weights were being changed; its cause says what.

    Some may have been changed and others not: the update cannot simply be taken again.
    """


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class StepStats:
    """What an update did; the tensors are on the device and are read later."""

    loss_sum: Tensor
    grad_norm: Tensor
    applied: Tensor
    targets: int


def train_step(
    engine: SingleDevice,
    batches: Sequence[Batch],
    *,
    step: int,
    rate: float,
    max_norm: float,
) -> StepStats:
    """Losses summed over target tokens, divided once by all of them, then one change of weights."""
    targets = sum(batch.targets for batch in batches)
    sums = [engine.accumulate(batch, divisor=max(1, targets)) for batch in batches]
    try:
        update = engine.update(step=step, rate=rate, max_norm=max_norm)
    except GraphsUnavailable:  # while it was recorded; nothing has been changed
        raise
    except Exception as error:
        raise UpdateTorn(f"update {step} failed while it changed the weights: {error}") from error
    return StepStats(
        loss_sum=torch.stack(sums).sum(),
        grad_norm=update.grad_norm,
        applied=update.applied,
        targets=targets,
    )


def seed_update(seed: int, step: int) -> None:
    """Set every generator for one update.

    What is drawn in an update then depends on its number alone: a resumed run, and one that
    repeats an update after running out of memory, draw the same, and no random state is saved.
    """
    digest = hashlib.sha256(f"{seed} {step}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)

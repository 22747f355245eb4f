"""One optimizer step, for everything that is trained here."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expert.parallel.engine import Engine, HasTargets
from expert.parallel.graphs import GraphsUnavailable
from expert.parallel.group import PeerFailed


class StepInterrupted(Exception):
    """Something failed while the weights were being changed; its cause says what.

    Some may have been changed and others not: the step cannot simply be repeated.
    """


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class StepStats:
    """What a step did; the tensors are on the device and are read later."""

    loss_sum: Tensor
    grad_norm: Tensor
    applied: Tensor
    targets: int


def train_step(
    engine: Engine,
    batches: Sequence[HasTargets],
    *,
    step: int,
    rate: float,
    max_norm: float,
    targets: int | None = None,
) -> StepStats:
    """Losses summed over target tokens, divided once by those of all ranks, then one change of
    weights. `targets`: of all ranks, where that is known already."""
    if targets is None:
        (targets,) = engine.total(sum(batch.targets for batch in batches))
    sums = [engine.accumulate(batch, divisor=max(1, targets)) for batch in batches]
    try:
        done = engine.step(step=step, rate=rate, max_norm=max_norm)
    except (GraphsUnavailable, PeerFailed):  # before anything was changed
        raise
    except Exception as error:
        raise StepInterrupted(f"step {step} failed while changing the weights: {error}") from error
    return StepStats(
        loss_sum=engine.summed(torch.stack(sums).sum()),
        grad_norm=done.grad_norm,
        applied=done.applied,
        targets=targets,
    )


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Set every generator for one step.

    What is drawn in a step then depends on its number and the rank alone: a resumed run, and one
    that repeats a step after running out of memory, draw the same, and no random state is saved.
    """
    named = f"{seed} {step}" if not rank else f"{seed} {step} {rank}"
    digest = hashlib.sha256(named.encode()).digest()
    number = int.from_bytes(digest[:8], "little") >> 1
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.manual_seed(number)
    else:  # that one would format the stack for each kind of device that has not been used yet
        torch.default_generator.manual_seed(number)

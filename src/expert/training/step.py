"""One optimizer step."""

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
    """An error interrupted the optimizer step; see its cause.

    Some weights may have changed and others not, so the step cannot simply be repeated.
    """


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class StepStats:
    """Results of a step; the tensors are on the device and read later."""

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
    """Accumulate losses summed over target tokens, divided once by the targets of all ranks, then
    step. `targets`: of all ranks, if already known."""
    if targets is None:
        (targets,) = engine.total(sum(batch.targets for batch in batches))
    sums = [engine.accumulate(batch, divisor=max(1, targets)) for batch in batches]
    try:
        result = engine.step(step=step, rate=rate, max_norm=max_norm)
    except (GraphsUnavailable, PeerFailed):  # raised before any weight changed
        raise
    except Exception as error:
        raise StepInterrupted(f"step {step} failed while changing the weights: {error}") from error
    return StepStats(
        loss_sum=engine.summed(torch.stack(sums).sum()),
        grad_norm=result.grad_norm,
        applied=result.applied,
        targets=targets,
    )


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Seed every generator for one step.

    Random numbers then depend on seed, step and rank only: resuming, or repeating a step after
    running out of memory, draws the same ones, and no random state needs saving.
    """
    key = f"{seed} {step}" if not rank else f"{seed} {step} {rank}"
    digest = hashlib.sha256(key.encode()).digest()
    number = int.from_bytes(digest[:8], "little") >> 1
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.manual_seed(number)
    else:  # torch.manual_seed would format a stack trace for every device type not yet used
        torch.default_generator.manual_seed(number)

"""One optimizer step: forward and backward every micro-batch, clip, step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expert.parallel.engine import Engine
from expert.parallel.graphs import GraphsUnavailable
from expert.parallel.group import PeerFailed
from expert.training.objectives.objective import Objective


class StepInterrupted(Exception):
    """An error interrupted the optimizer step; see its cause.

    Some weights may have changed and others not, so the step cannot simply be repeated.
    """


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class StepStats:
    """Results of a step on all ranks; the tensors are on the device and read later."""

    loss_sum: Tensor
    metrics: dict[str, Tensor]
    grad_norm: Tensor
    applied: Tensor
    weight: int
    """What the loss was divided by: the target tokens of all ranks."""
    real_tokens: int
    places: int
    """Positions that the model computed, with padding."""
    examples: int


def train_step(
    engine: Engine,
    objective: Objective,
    batches: Sequence[Any],
    *,
    step: int,
    rate: float,
    max_norm: float,
) -> StepStats:
    """Take one step. Losses are summed, and divided once by the weight of all ranks, so that
    neither the micro-batch size nor the number of ranks changes the gradient."""
    weight, real_tokens, places, examples = engine.total(
        sum(objective.weight(batch) for batch in batches),
        sum(batch.counts.real_tokens for batch in batches),
        sum(batch.tokens.numel() for batch in batches),
        sum(batch.counts.examples for batch in batches),
    )
    objective.begin_step(engine, batches)
    passes = [
        forward_backward(engine, objective, batch, divisor=max(1, weight)) for batch in batches
    ]
    try:
        clipped = engine.step(step=step, rate=rate, max_norm=max_norm)
    except (GraphsUnavailable, PeerFailed):  # raised before any weight changed
        raise
    except Exception as error:
        raise StepInterrupted(f"step {step} failed while changing the weights: {error}") from error
    sums = {
        name: engine.summed(torch.stack([metrics[name] for _, metrics in passes]).sum())
        for name in passes[0][1]
    }
    return StepStats(
        loss_sum=engine.summed(torch.stack([loss for loss, _ in passes]).sum()),
        metrics=sums,
        grad_norm=clipped.grad_norm,
        applied=clipped.applied,
        weight=weight,
        real_tokens=real_tokens,
        places=places,
        examples=examples,
    )


def forward_backward(
    engine: Engine, objective: Objective, batch: Any, *, divisor: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Add the gradient of a micro-batch; returns its loss sum and metrics.

    A function of its own, so that the autograd graph is gone before the next micro-batch.
    """
    loss, metrics = engine.forward(objective.loss_sum, batch)
    engine.backward(loss, divisor=divisor)
    return loss.detach(), metrics


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

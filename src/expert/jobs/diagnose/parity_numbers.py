"""Two ways to compute one thing: how far they are apart, and how far rounding may put them.

Tolerances follow from rounding. A value passes about OPS_A_BLOCK operations in each block, and a
float32 sum of K terms is off by sqrt(K) roundings: u * sqrt(ops * blocks * K) in float32. In bf16
or fp16 sums are kept in float32 and each operation's result is rounded once: u * sqrt(ops *
blocks). The gradient passes the model twice and is multiplied on its way: GRADIENT times that. A
sum of losses over many targets averages errors out, up to AVERAGED: what rounds alike for all
stays. Where the same numbers twice differ by themselves (kernels that add in any order), three
times that spread is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from expert.data.feed.feed import Batch
    from expert.planning.run_plan import RunPlan
    from expert.run.build import Built

OPS_A_BLOCK = 16
GRADIENT = 4.0
AVERAGED = 8.0
KEPT_NUMBERS = 50_000_000
"""Gradients that are kept for comparing; of a larger model those of the first and last layers."""

State = Literal["equal", "differs", "left out"]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One claim, and how far it is from true."""

    claim: str
    state: State
    loss: float | None = None
    """Relative difference of the summed losses."""
    loss_tolerance: float | None = None
    gradient: float | None = None
    """Norm of the difference of the gradients over the norm of the plain one."""
    gradient_tolerance: float | None = None
    because: str = ""
    """Where the tolerance comes from, or why the claim was left out."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Learnt:
    """What a pass over the sequences gave: the summed loss, and gradients in float32 on the CPU."""

    loss: float
    targets: int
    gradients: list[Tensor]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    loss: float
    gradient: float
    because: str


def left_out(claim: str, because: str) -> Compared:
    return Compared(claim=claim, state="left out", because=because)


def kept_gradients(built: Built) -> list[Tensor]:
    """Gradients of what is trained, from both ends of the model until enough are kept."""
    found = list(built.engine.gradients().values())
    order = sorted(range(len(found)), key=lambda place: min(place, len(found) - 1 - place))
    kept, count = list["Tensor"](), 0
    for place in order:
        gradient = found[place]
        if count and count + gradient.numel() > KEPT_NUMBERS:
            break
        kept.append(gradient.detach().float().cpu().clone())
        count += gradient.numel()
    return kept


def differences(one: Learnt, other: Learnt) -> tuple[float, float]:
    """Relative differences of the losses and of the gradients."""
    loss = abs(one.loss - other.loss) / max(abs(other.loss), 1e-30)
    return loss, relative(one.gradients, other.gradients)


def relative(ours: list[Tensor], right: list[Tensor]) -> float:
    apart = math.sqrt(
        sum(float((a - b).double().pow(2).sum()) for a, b in zip(ours, right, strict=True))
    )
    size = math.sqrt(sum(float(b.double().pow(2).sum()) for b in right))
    return apart / size if size else (0.0 if apart == 0 else math.inf)


def tolerance(plan: RunPlan, blocks: int, width: int, targets: int) -> Tolerance:
    """What rounding alone may make of a loss and of a gradient; see the top of the file."""
    kernels = plan.kernels
    ops = OPS_A_BLOCK * blocks
    unit, name = {
        "bf16": (2.0**-9, "bf16 rounds at 2^-9"),
        "fp16": (2.0**-12, "fp16 rounds at 2^-12"),
        "fp32": (2.0**-24, "float32 rounds at 2^-24"),
    }[kernels.precision]
    if kernels.precision == "fp32" and kernels.tf32 and kernels.device == "cuda":
        unit, name = 2.0**-12, "TF32 rounds at 2^-12"
    terms = width if unit == 2.0**-24 else 1
    size = unit * math.sqrt(ops * terms)
    summed = f", sums of {width} terms" if terms > 1 else ""
    return Tolerance(
        loss=size / min(math.sqrt(max(1, targets)), AVERAGED),
        gradient=GRADIENT * size,
        because=f"{name}, {ops} operations in {blocks} blocks{summed}",
    )


def widened(allowed: Tolerance, loss: float, gradient: float) -> Tolerance:
    """Where the same numbers twice differ, three times that is allowed at least."""
    if 3 * loss <= allowed.loss and 3 * gradient <= allowed.gradient:
        return allowed
    return Tolerance(
        loss=max(allowed.loss, 3 * loss),
        gradient=max(allowed.gradient, 3 * gradient),
        because=f"{allowed.because}; three times the measured spread of the same pass twice "
        f"({loss:.1e}, {gradient:.1e})",
    )


# --- one document changed ------------------------------------------------------------------------


def first_document(batch: Batch) -> tuple[int, int] | None:
    """Where the first document of a one-row batch ends and where the last learnt place is."""
    edges = [int(edge) for edge in batch.boundaries.tolist()]
    end = edges[1]
    learnt = [int(place) for place in batch.target_places[: batch.targets].tolist()]
    if not any(place >= end for place in learnt) or not any(place < end for place in learnt):
        return None
    return 0, end


def spoilt(batch: Batch, document: tuple[int, int]) -> tuple[Batch, Batch, Batch, Batch]:
    """(others, own) with labels of the others and of the document alone, and both once more with
    every token of the document changed."""
    start, end = document
    others = with_labels(batch, lambda place: place >= end)
    own = with_labels(batch, lambda place: place < end)
    tokens = batch.tokens.clone()
    flat = tokens.view(-1)
    # Turned round: every token is one of the vocabulary, and few stay where they were.
    flat[start:end] = flat[start:end].flip(0)
    return others, own, replace(others, tokens=tokens), replace(own, tokens=tokens)


def with_labels(batch: Batch, keep: Callable[[int], bool]) -> Batch:
    """The batch with the labels of some places only."""
    import torch

    from expert.data.feed.batches import IGNORED

    labels = batch.labels.clone().view(-1)
    places = [int(each) for each in batch.target_places[: batch.targets].tolist()]
    kept = [place for place in places if keep(place)]
    for place in places:
        if not keep(place):
            labels[place] = IGNORED
    target_places = torch.full_like(batch.target_places, labels.numel() - 1)
    target_places[: len(kept)] = torch.tensor(kept, dtype=target_places.dtype)
    return replace(
        batch,
        labels=labels.view_as(batch.labels),
        target_places=target_places,
        counts=replace(batch.counts, targets=len(kept)),
    )

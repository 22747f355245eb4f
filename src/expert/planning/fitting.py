"""How many sequences go to the card at once, and what is given up so that they fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from expert.manifest.types import parse_size
from expert.planning.memory import Workload, estimate
from expert.planning.situation import Situation


@dataclass(frozen=True)
class Fit:
    """A workload that fits with as many rows as have room, or the least one, that does not."""

    work: Workload
    fits: bool


def find_fit(now: Situation, base: Workload, most: int) -> Fit:
    """The first choice with room for at least one sequence.

    Recomputing all blocks costs LoRA 1.35-1.46x of its time and NF4 costs precision and unpacking:
    so nothing is given up first, then as few blocks as needed are recomputed, and a 4-bit base
    comes last.
    """
    asked = now.config.micro_batch_size
    least = base
    for work in _choices(now, base):
        rows = asked if asked != "auto" else largest_batch(now, work, most)
        least = replace(work, rows=max(1, rows))
        if rows and fits(now, least):
            return Fit(least, True)
    return Fit(least, False)


def _choices(now: Situation, base: Workload) -> Iterator[Workload]:
    """Workloads from the fastest to the smallest."""
    may_quantise = now.model.quantization == "auto" and now.on_gpu and not base.trains_everything
    asked = now.config.micro_batch_size
    rows = asked if asked != "auto" else 1
    for quantization in ["none", "int4"] if may_quantise else [base.quantization]:
        work = replace(base, quantization=quantization)
        counts = recomputed_counts(now, base.shape.layers)
        enough = next(
            (n for n in counts if fits(now, replace(work, rows=rows, recomputed_blocks=n))),
            counts[-1],
        )
        yield replace(work, recomputed_blocks=enough)


def recomputed_counts(now: Situation, layers: int) -> range:
    """How many blocks may be recomputed, from the fewest to the most."""
    asked = now.config.gradient_checkpointing
    if asked == "auto":
        return range(0, layers + 1)
    if asked == "selective":
        return range(math.ceil(layers / 2), layers + 1)
    everything = asked is True or asked == "full"
    return range(layers, layers + 1) if everything else range(0, 1)


def budget_of(now: Situation) -> int:
    """What the run may take: the target's memory, or less where the manifest limits it."""
    limit = now.config.vram_limit
    asked = parse_size(limit) if limit and now.on_gpu else now.target.budget_bytes
    return min(asked, now.target.budget_bytes)


def peak_bytes(now: Situation, work: Workload) -> int:
    """The estimate for this device: a CPU has no CUDA context."""
    guess = estimate(work)
    return guess.total if now.on_gpu else guess.total - guess.cuda_context


def fits(now: Situation, work: Workload) -> bool:
    return peak_bytes(now, work) <= budget_of(now)


def largest_batch(now: Situation, work: Workload, most: int) -> int:
    """The most sequences, up to `most`, whose peak fits; 0 where not even one does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(now, replace(work, rows=middle)):
            low = middle
        else:
            high = middle - 1
    return low


def even_split(sequences: int, largest: int) -> tuple[int, int]:
    """(micro-batch, accumulation) that make up `sequences`, as even as possible.

    A divisor keeps every micro-batch the same shape; it is taken unless that costs half as many
    steps again.
    """
    steps = math.ceil(sequences / largest)
    divisor = next(d for d in range(min(largest, sequences), 0, -1) if sequences % d == 0)
    if sequences // divisor <= 1.5 * steps:
        return divisor, sequences // divisor
    return math.ceil(sequences / steps), steps


def eval_bytes(now: Situation, work: Workload) -> int:
    """Peak of an evaluation step: one block's tensors instead of all of them."""
    guess = estimate(work)
    one_block = replace(work, shape=replace(work.shape, layers=1), recomputed_blocks=0)
    peak = guess.total - guess.activations + estimate(one_block).activations
    return peak if now.on_gpu else peak - guess.cuda_context


def way_out(now: Situation, work: Workload) -> str:
    """The nearest change that would make it fit, tried in the order of what it costs."""
    everything = work.shape.layers
    thin = replace(work, rows=1, recomputed_blocks=everything)
    small = replace(thin, quantization="int4", adapter="lora", rank=work.rank or 16)
    small = small if work.trains_everything else replace(small, adapter=work.adapter)
    extra = " and adapter_type: lora" if work.trains_everything else ""
    tries = {
        "micro_batch_size: 1": replace(work, rows=1),
        "gradient_checkpointing: full": thin,
        f"quantization: int4{extra}": small,
    }
    for words, changed in tries.items():
        if changed != work and fits(now, changed):
            return f"{words} would fit"
    length = work.row_tokens // 2
    while length >= 64:
        if fits(now, replace(small, row_tokens=length)):
            return f"quantization: int4{extra} with max_seq_length: {length} would fit"
        length //= 2
    return "no setting makes this model fit here: take a smaller model or a larger card"

"""The micro-batch size, and what is given up to make it fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from expert.manifest.schema.kinds import OPTIMIZERS
from expert.manifest.schema.types import parse_size
from expert.planning.draft import PlanDraft
from expert.planning.memory.memory import MemoryEstimate, base_bytes, estimate
from expert.planning.memory.shards import host_bytes
from expert.planning.memory.workload import Workload

# Choices leave a twentieth of the budget free: the estimate is off by up to 4 %, and the
# allocator's overhead by more.
MARGIN = 0.95
# A micro-batch should stay in the caches of a CPU. On two cores `tiny` was fastest with 4
# sequences of 1,024 tokens: 1.1 times as fast as with 16, and evaluation took 6.3 s instead of the
# 10.7 s with 64 (docs/benchmarks/cpu-at-once.json); beside other processes the gap was wider.
CPU_TOKENS_PER_PASS = 4096
LONGEST_SEARCH = 10_000


def find_fit(draft: PlanDraft, base: Workload, most: int, *, limit: int) -> tuple[Workload, bool]:
    """The first choice with room for at least one sequence, with as many rows as fit, or the
    smallest one if nothing fits; and whether it fits. `most`: a rank's sequences per step.

    Checkpointing all blocks costs LoRA 1.35-1.46x of its time, and NF4 costs precision and
    unpacking: so first nothing is given up, then as few blocks as needed are checkpointed, and a
    4-bit base comes last. A choice should leave a margin; fitting without one is better than not
    fitting. All of that comes before sharding, which sends the weights for every micro-batch.
    """
    least: Workload | None = None
    for shared in _sharings(draft, base):
        for budget in (int(MARGIN * budget_of(draft)), budget_of(draft)):
            for work in _choices(draft, shared, most, budget):
                last = work
                if peak_bytes(draft, work) <= budget and has_host_memory(draft, work):
                    asked = draft.config.micro_batch_size
                    rows = work.rows
                    if asked == "auto":
                        rows = min(limit, largest_batch(draft, work, most, budget))
                    return replace(work, rows=rows, accumulates=rows < most), True
        if least is None or draft.cluster.ranks > 1:
            least = last
    assert least is not None
    return least, False


def _sharings(draft: PlanDraft, base: Workload) -> Iterator[Workload]:
    """The ways to share the work, from the least communication to the least memory."""
    cluster, asked = draft.cluster, draft.config.distributed
    if cluster.ranks == 1:
        yield base
    elif asked != "sharded":
        yield replace(base, engine="replicated")
    if asked == "replicated":
        return
    groups = dict.fromkeys((cluster.ranks_per_node, cluster.ranks))
    shards = [count for count in groups if count > 1] or [1]
    # 8-bit state cannot be sharded like its weights: it is quantised in blocks of 256 that do not
    # align with the shards, so a checkpoint would load only with this number of ranks.
    shardable, alone = base, cluster.ranks == 1
    if not alone and base.is_full_finetune and OPTIMIZERS[base.optimizer].not_shardable:
        plain = "adamw_torch_fused" if draft.on_gpu else "adamw_torch"
        shardable = replace(base, optimizer=plain)
    sharded = [replace(shardable, engine="sharded", shards=count) for count in shards]
    if not alone:
        yield from sharded
    # On one card only if all weights are trained: an adapter on a 4-bit base is the smaller change.
    # The optimizer step then runs on the CPU, on shards.
    trains = base.is_full_finetune or not alone
    if trains and draft.on_gpu and not OPTIMIZERS[shardable.optimizer].not_shardable:
        yield from (replace(work, offload=True) for work in sharded)


def has_host_memory(draft: PlanDraft, work: Workload) -> bool:
    """Whether the machine has room for what is offloaded; True if unknown."""
    free = draft.target.host_bytes
    return free is None or host_bytes_of_node(draft, work) <= free


def host_bytes_of_node(draft: PlanDraft, work: Workload) -> int:
    """Host memory for the shards of a machine's ranks."""
    return host_bytes(work, sum(base_bytes(work))) * draft.cluster.ranks_per_node


def _choices(draft: PlanDraft, base: Workload, most: int, budget: int) -> Iterator[Workload]:
    """Workloads from the fastest to the smallest, each with as few checkpointed blocks as fit. A
    micro-batch never exceeds a rank's share of a step, whatever the manifest says."""
    may_quantise = draft.model.quantization == "auto" and draft.on_gpu and not base.is_full_finetune
    may_quantise &= draft.config.adapter_init != "pissa"  # which changes the base's weights
    asked = draft.config.micro_batch_size
    rows = 1 if asked == "auto" else min(asked, most)
    base = replace(base, rows=rows, accumulates=rows < most)
    choices = [draft.kept.quantization] if draft.kept.quantization else ["none", "int4"]
    for quantization in choices if may_quantise else [base.quantization]:
        work = replace(base, quantization=quantization)
        yield with_fewest_checkpointed(draft, work, budget)


def with_fewest_checkpointed(draft: PlanDraft, work: Workload, budget: int) -> Workload:
    """The workload with as few checkpointed blocks as fit, or as many as allowed."""
    asked, layers = draft.config.gradient_checkpointing, work.shape.layers
    low, high = (layers, layers) if asked in (True, "full") else (0, 0)
    if asked in ("auto", "selective"):
        low, high = (0 if asked == "auto" else math.ceil(layers / 2)), layers
    if peak_bytes(draft, replace(work, recomputed_blocks=low)) <= budget:
        high = low
    while low < high:  # more recomputation never takes more memory
        middle = (low + high) // 2
        if peak_bytes(draft, replace(work, recomputed_blocks=middle)) <= budget:
            high = middle
        else:
            low = middle + 1
    return replace(work, recomputed_blocks=low)


def budget_of(draft: PlanDraft) -> int:
    """Memory the run may use: the target's, or less if the manifest limits it."""
    limit = draft.config.vram_limit
    asked = parse_size(limit) if limit and draft.on_gpu else draft.target.budget_bytes
    return min(asked, draft.target.budget_bytes)


def peak_bytes(draft: PlanDraft, work: Workload) -> int:
    """The estimated peak on this device."""
    return estimate_here(draft, work).total


def estimate_here(draft: PlanDraft, work: Workload) -> MemoryEstimate:
    """The estimate for this device."""
    return estimate(work).on(draft.target.device)


def largest_batch(draft: PlanDraft, work: Workload, most: int, budget: int) -> int:
    """The most sequences, up to `most`, whose peak fits; 0 if not even one does."""
    low, high = 0, most
    while low < high:  # more never takes less memory
        rows = (low + high + 1) // 2
        fits_here = peak_bytes(draft, replace(work, rows=rows, accumulates=rows < most)) <= budget
        low, high = (rows, high) if fits_here else (low, rows - 1)
    return low


def even_split(sequences: int, largest: int, *, on_gpu: bool = False) -> tuple[int, int]:
    """(micro-batch, accumulation) that make up `sequences`, as evenly as possible.

    A divisor gives every micro-batch the same shape; it is used if it takes at most half as many
    more passes. On a GPU the remainder of a micro-batch is computed as padding, so the split with
    the least padding is used: 4 × 4 of 16 rather than 6 + 6 + 4.
    """
    largest = min(largest, sequences)
    steps = math.ceil(sequences / largest)
    if on_gpu:
        more = range(steps, min(int(1.5 * steps), steps + LONGEST_SEARCH) + 1)
        steps = min(more, key=lambda count: count * math.ceil(sequences / count))
        return math.ceil(sequences / steps), steps
    nearest = max(1, math.ceil(2 * largest / 3), largest - LONGEST_SEARCH)
    for divisor in range(largest, nearest - 1, -1):
        if sequences % divisor == 0 and sequences // divisor <= 1.5 * steps:
            return divisor, sequences // divisor
    return math.ceil(sequences / steps), steps

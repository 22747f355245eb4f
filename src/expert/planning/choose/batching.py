"""The batch, quantisation and activation checkpointing, chosen by what fits."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

from expert.core.text import counted
from expert.planning.choose.fastest import (
    Way,
    choose_capture,
    max_rank_sequences,
    pass_limit,
    settle_graphs,
)
from expert.planning.choose.kernels import base_quantization
from expert.planning.choose.sequences import evaluated_sequences, held_out_sequences
from expert.planning.decisions import Source
from expert.planning.draft import KEPT, SET, PlanDraft
from expert.planning.machine.cards import AMPERE
from expert.planning.memory.fitting import (
    CPU_TOKENS_PER_PASS,
    MARGIN,
    budget_of,
    estimate_here,
    even_split,
    largest_batch,
    peak_bytes,
)
from expert.planning.memory.memory import GIB, base_bytes, estimate
from expert.planning.memory.shards import MASTER_BYTES
from expert.planning.memory.workload import Workload

LARGEST_EVAL_BATCH = 64
CHECKPOINTING = "kernels.checkpointing"
SLOT_BYTES_PER_SECOND = (12e9, 25e9)
"""Between a card and its machine: PCIe 3 before Ampere, PCIe 4, with 16 lanes."""


def settle_fit(draft: PlanDraft, base: Workload | None, sequences: int | None) -> Workload | None:
    """Settle quantisation, checkpointing, batches and CUDA graphs; returns the final workload."""
    most = max_rank_sequences(draft, sequences)
    if base is None:
        _settle_without_shape(draft, most, sequences)
        return None
    way, captured = choose_capture(draft, base, sequences)
    way = _with_fewer_micro_batches(draft, way, most)
    _settle_quantization(draft, way.work.quantization)
    _settle_checkpointing(draft, way)
    if way.fits:
        _advise(draft, way.work)
    settle_graphs(draft, captured)
    limit = pass_limit(draft, base.row_tokens, most)
    work = _settle_micro_batch(draft, way, most, limit, sequences)
    # Only training sequences are shortened to make whole steps; evaluation uses the full length.
    places = draft["data.max_seq_length"]
    largest = pass_limit(draft, places, LARGEST_EVAL_BATCH)
    rows = _settle_eval_batch(draft, replace(work, row_tokens=places), largest)
    if work.captured:
        evaluated = min(rows, held_out_sequences(draft) or rows) if draft.evaluates else 0
        work = replace(work, evaluated_rows=evaluated, evaluated_row_tokens=places)
    budget, peak = _settle_budget(draft), peak_bytes(draft, work)
    parts = dict(estimate_here(draft, work))
    first = sorted(parts.items(), key=lambda part: -part[1])[:3]
    words = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.1f}" for name, size in first)
    draft.settle("memory.peak_bytes", peak, f"estimate in GiB: {words}")
    stored = {**asdict(work), "targets": sorted(work.targets), "whole": sorted(work.whole)}
    draft.settle("memory.workload", stored, "the estimated workload")
    draft.settle("memory.parts", parts, "estimate by purpose")
    draft.settle("memory.fits", peak <= budget, f"{peak / GIB:.1f} of {budget / GIB:.1f} GiB")
    return work


def _with_fewer_micro_batches(draft: PlanDraft, way: Way, most: int) -> Way:
    """Offloaded weights are sent to the card for each micro-batch. If that takes longer than
    computing it, every block is checkpointed, provided that makes room for larger micro-batches."""
    work = way.work
    free = draft.config.gradient_checkpointing == draft.config.micro_batch_size == "auto"
    if not free or not way.fits or not work.offload or work.rows >= most or way.time is None:
        return way
    sent = 2 * sum(base_bytes(work))
    if work.is_full_finetune:  # weights for forward and backward, and gradients back
        sent = 3 * MASTER_BYTES * work.shape.parameters
    card = draft.target.card
    speed = SLOT_BYTES_PER_SECOND[card.capability >= AMPERE] if card is not None else math.inf
    if sent / work.shards / speed <= way.time.computing:
        return way
    work = replace(work, recomputed_blocks=work.shape.layers)
    rows = largest_batch(draft, work, most, int(MARGIN * budget_of(draft)))
    if rows <= way.work.rows:
        return way
    return replace(way, work=replace(work, rows=rows, accumulates=rows < most))


def _gib(draft: PlanDraft) -> str:
    return f"{budget_of(draft) / GIB:.1f} GiB"


def _settle_quantization(draft: PlanDraft, chosen: str) -> None:
    asked, path = draft.model.quantization, "model.quantization"
    if asked == "auto":
        because = "unquantised: 4 bits are only for adapters on a GPU that lacks room"
        if draft.resolved.shape is None:
            because = f"the size of the model is not known: {draft.resolved.shape_from}"
            draft.settle(path, chosen, because, "preset")
            return
        if draft.kept.quantization:
            because = KEPT
        elif chosen == "int4":
            because = f"the base does not fit {_gib(draft)} in 16 bits"
        draft.settle(path, chosen, because)
    elif asked == "fp8" and draft.kept.quantization == chosen:
        draft.settle(path, chosen, KEPT)
    elif asked == "fp8" and chosen != "fp8":
        because = "the card has no fp8 arithmetic; int8 takes the same memory"
        draft.settle(path, chosen, because, "fallback")
        draft.supersede(path, f"quantization fp8: {because}")
    else:
        draft.settle(path, asked if asked in ("bf16", "fp16") else chosen, SET, "manifest")


def _settle_checkpointing(draft: PlanDraft, way: Way) -> None:
    layers, count = way.work.shape.layers, way.work.recomputed_blocks
    kind = "none" if count == 0 else ("full" if count == layers else "selective")
    asked = draft.config.gradient_checkpointing
    because = f"everything fits {_gib(draft)} without it"
    source: Source = "machine"
    if asked != "auto":
        because, source = SET, "manifest"
    elif not way.fits:
        because = f"even checkpointing every block does not fit {_gib(draft)}"
    elif way.work.offload and count == layers and way.work.rows > 1:
        because = "sending weights takes longer than computing: a larger micro-batch sends less"
    elif count:
        free = draft.config.micro_batch_size == "auto"
        rows = way.checkpointed_for if free else way.work.rows
        because = f"as few blocks as needed to fit a micro-batch of {rows} in {_gib(draft)}"
    draft.settle(CHECKPOINTING, kind, because, source)
    draft.settle("kernels.recomputed_blocks", count, because, source)


def _advise(draft: PlanDraft, fitting: Workload) -> None:
    """Advise on what the manifest gives up needlessly, with changes that fit together."""
    work, budget = replace(fitting, rows=1), budget_of(draft)
    recomputes = draft.config.gradient_checkpointing != "auto" and work.recomputed_blocks > 0
    kept = replace(work, recomputed_blocks=0)
    if recomputes and peak_bytes(draft, kept) <= budget:
        work = kept
        rows = largest_batch(draft, work, fitting.rows, budget)
        text = f"a micro-batch of {rows} fits without it: gradient_checkpointing: false"
        draft.advise(CHECKPOINTING, f"{text} is up to 1.4x faster")
    plain = replace(work, quantization="none")
    quantised = draft.on_gpu and draft.model.quantization in ("int4", "int8")
    if quantised and peak_bytes(draft, plain) <= budget:
        rows = largest_batch(draft, plain, fitting.rows, budget)
        text = f"the base fits {_gib(draft)} unquantised with a micro-batch of {rows}"
        text += ": quantization: none is faster and more precise"
        draft.advise("model.quantization", text)


def _settle_micro_batch(
    draft: PlanDraft, way: Way, most: int, limit: int, sequences: int | None
) -> Workload:
    """`most`: a rank's sequences per step; `limit`: how many are worth computing in one pass."""
    whole = "a whole step" if draft.cluster.ranks == 1 else "a rank's share of a step"
    path, gib = "batch.micro_batch", _gib(draft)
    largest, asked = way.work.rows, draft.config.micro_batch_size
    source: Source = "machine"
    if asked != "auto":
        micro, because, source = asked, SET, "manifest"
        if asked > most:
            text = f"{whole} is only {counted(most, 'sequence')}: a micro-batch cannot have more"
            draft.warn(path, text)
            if not draft.packed or draft.packed_rows is not None:
                micro, because = most, f"{whole}; micro_batch_size {asked} is more"
    elif sequences is None:
        micro, because = largest, f"the most that fits {gib}; less if a step has fewer"
    else:
        share = draft.cluster.share_of(sequences)
        because = f"up to {largest} fit {gib}"
        if largest == most:
            because = f"{whole} fits {gib}"
        elif largest == limit:
            because = f"a CPU is fastest with about {CPU_TOKENS_PER_PASS:,} tokens per micro-batch"
        micro, _ = even_split(share, largest, on_gpu=draft.on_gpu)
    if not way.fits:
        because = f"not even this fits {gib}"
    draft.settle(path, micro, because, source)
    _settle_accumulation(draft, sequences, micro)
    rows = min(micro, most)  # before rows are counted, memory is planned for the expected number
    accumulates = sequences is None or rows < draft.cluster.share_of(sequences)
    return replace(way.work, rows=rows, accumulates=accumulates)


def _settle_accumulation(draft: PlanDraft, sequences: int | None, micro: int) -> None:
    path = "batch.accumulation"
    if sequences is None:
        draft.unknown("the sequences per step are not known yet", path)
        return
    share, ranks = draft.cluster.share_of(sequences), draft.cluster.ranks
    steps = math.ceil(share / micro)
    on_each = "" if ranks == 1 else f" on each of {ranks} ranks"
    because = f"{steps} × up to {micro}{on_each} make up the sequences of a step: {sequences}"
    draft.settle(path, steps, because)


def _settle_eval_batch(draft: PlanDraft, work: Workload, largest: int) -> int:
    path, budget = "batch.eval_batch", budget_of(draft)

    def too_large(rows: int) -> bool:
        if work.captured:  # its memory adds to that of the captured passes
            return peak_bytes(draft, replace(work, evaluated_rows=rows)) > budget
        step = replace(work, rows=rows)  # of which only one block keeps its tensors
        alone = replace(step, shape=replace(step.shape, layers=1), recomputed_blocks=0)
        parts = estimate_here(draft, step)
        kept = estimate(alone)["activations"]
        return parts.total - parts["activations"] + kept > budget

    if asked := evaluated_sequences(draft):
        rows, because = asked
        while rows > 1 and too_large(rows):
            rows //= 2
        if rows < asked[0]:
            because = f"{counted(asked[0], 'sequence')} would not fit {_gib(draft)}"
            draft.warn(path, f"eval_batch_size {draft.config.eval_batch_size}: {because}: {rows}")
        return int(draft.settle(path, rows, because, "manifest", "eval_batch_size"))
    rows, because = 1, f"no backward, so as many as fit, at most {largest}"
    if work.captured:
        # Beside captured passes: as many as in training, more if memory is plentiful.
        rows, budget = work.rows, budget // 2
        because = "CUDA graphs keep their memory during evaluation"
    while 2 * rows <= largest and not too_large(2 * rows):
        rows *= 2
    budget = budget_of(draft)
    if too_large(1):
        because = "not even one fits in evaluation"
    return int(draft.settle(path, rows, because))


def _settle_budget(draft: PlanDraft) -> int:
    budget = budget_of(draft)
    limited = budget < draft.target.budget_bytes
    because = "vram_limit" if limited else draft.target.budget_because
    draft.settle("memory.budget_bytes", budget, because, "manifest" if limited else "machine")
    if draft.on_gpu and (limited or because == "--vram"):
        draft.settle("memory.cap_bytes", budget, f"{because}: enforced in the run", "manifest")
    else:
        draft.settle("memory.cap_bytes", None, "no limit is set")
    return budget


def _settle_without_shape(draft: PlanDraft, most: int, sequences: int | None) -> None:
    """Without sizes nothing can be estimated: take the manifest's values and probe at the start."""
    reason, config = draft.resolved.shape_from, draft.config
    base = base_quantization(draft)
    _settle_quantization(draft, "none" if base == "auto" else base)
    asked = config.gradient_checkpointing
    if asked == "auto":
        because = f"memory cannot be estimated: {reason}"
        draft.settle(CHECKPOINTING, "none", because, "preset")
    else:
        kind = {"True": "full", "False": "none"}.get(str(asked), str(asked))
        draft.settle(CHECKPOINTING, kind, SET, "manifest")
    draft.unknown(reason, "kernels.recomputed_blocks")
    written = config.micro_batch_size if config.micro_batch_size != "auto" else config.batch_size
    micro = min(written, most) if written != "auto" else 1
    source: Source = "preset" if written == "auto" else "manifest"
    because = f"{'one' if written == 'auto' else 'as written'}; what fits is not known: {reason}"
    draft.settle("batch.micro_batch", micro, because, source)
    _settle_accumulation(draft, sequences, micro)
    evaluated, because = evaluated_sequences(draft) or (micro, "the same as in training")
    source = "preset" if config.eval_batch_size == "auto" else "manifest"
    draft.settle("batch.eval_batch", evaluated, because, source, "eval_batch_size")
    _settle_budget(draft)
    draft.unknown(reason, *(f"memory.{key}" for key in ("peak_bytes", "parts", "fits", "workload")))

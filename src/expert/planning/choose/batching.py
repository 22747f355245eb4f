"""The batch, the base's precision and the recomputation, settled by what fits."""

from __future__ import annotations

import math
from dataclasses import replace

from expert.core.text import counted
from expert.planning.decisions import Ledger, Source
from expert.planning.memory.calibration import workload_as_dict
from expert.planning.memory.fitting import (
    CPU_PLACES_AT_ONCE,
    Fit,
    budget_of,
    estimate_here,
    eval_bytes,
    even_split,
    find_fit,
    fits,
    largest_batch,
    peak_bytes,
    way_out,
    worth_at_once,
)
from expert.planning.memory.memory import GIB
from expert.planning.memory.workload import Workload
from expert.planning.situation import KEPT, Situation

LARGEST_EVAL_BATCH = 64
RECOMPUTING = "kernels.checkpointing"


def settle_fit(
    now: Situation, ledger: Ledger, base: Workload | None, *, examples: int, sequences: int | None
) -> Workload | None:
    """Settle quantisation, checkpointing and batches; returns the workload that will run."""
    most = min(sequences or examples, examples)
    if base is None:
        _settle_without_shape(now, ledger, most, sequences)
        return None
    even = ledger.decisions["data.packing"].value != "none" or now.is_char_model
    places = base.row_tokens
    limit = worth_at_once(on_gpu=now.on_gpu, even=even, row_tokens=places, most=most)
    fit = find_fit(now, base, most, limit=limit)
    _settle_quantization(now, ledger, fit)
    _settle_checkpointing(now, ledger, fit)
    _advise(now, ledger, fit)
    work = _settle_micro_batch(now, ledger, fit, (most, limit), sequences)
    # Only training rows are packed so that they make whole updates; others fill what they may.
    places = ledger.decisions["data.max_seq_length"].value
    largest = worth_at_once(
        on_gpu=now.on_gpu, even=even, row_tokens=places, most=LARGEST_EVAL_BATCH
    )
    _settle_eval_batch(now, ledger, replace(work, row_tokens=places), largest)
    _settle_memory(now, ledger, work)
    return work


def _settle_quantization(now: Situation, ledger: Ledger, fit: Fit) -> None:
    asked, path = now.model.quantization, "model.quantization"
    chosen, gib = fit.work.quantization, budget_of(now) / GIB
    if asked == "auto":
        because = "the base fits as it is; quantising would only cost time and precision"
        if fit.work.trains_everything:
            because = "every weight is trained, which needs them unquantised"
        if chosen == "int4" and fit.fits:
            because = f"the base does not fit {gib:.1f} GiB in 16 bits, in NF4 it does"
        elif not fit.fits:
            because = f"the smallest that may be chosen, and still above {gib:.1f} GiB"
        if now.kept.quantization:
            because = KEPT
        ledger.settle(path, chosen, because, "machine")
        return
    settled = asked if asked in ("bf16", "fp16") else chosen
    _settle_asked_quantization(ledger, asked, settled)


def _settle_asked_quantization(ledger: Ledger, asked: str, settled: str) -> None:
    path = "model.quantization"
    if asked == "fp8":
        because = "no fp8 kernels for the base yet; int8 takes the same memory"
        ledger.settle(path, settled, because, "fallback")
        ledger.supersede(path, f"quantization fp8: {because}")
    else:
        ledger.settle(path, settled, "set in the manifest", "manifest")


def _settle_checkpointing(now: Situation, ledger: Ledger, fit: Fit) -> None:
    layers, count = fit.work.shape.layers, fit.work.recomputed_blocks
    gib = budget_of(now) / GIB
    kind = "none" if count == 0 else ("full" if count == layers else "selective")
    asked, found = now.config.gradient_checkpointing, now.measured(RECOMPUTING)
    source: Source = "machine"
    if asked != "auto":
        because, source = "set in the manifest", "manifest"
        if asked == "selective":
            because = "selective: half of the blocks, more where that does not fit"
    else:
        because = f"everything fits {gib:.1f} GiB without recomputing"
        if found is not None and found[0] == kind:
            because, source = found[1], "measurement"
        elif count and fit.fits:
            rows = fit.work.rows if now.config.micro_batch_size != "auto" else 1
            because = f"as few blocks as let {rows} at once fit {gib:.1f} GiB"
        elif not fit.fits:
            because = f"even recomputing everything does not fit {gib:.1f} GiB"
    ledger.settle(RECOMPUTING, kind, because, source)
    ledger.settle("kernels.recomputed_blocks", count, because, source)


def _advise(now: Situation, ledger: Ledger, fit: Fit) -> None:
    """What the manifest gives up without need: only changes that fit together are advised."""
    if not fit.fits:
        return
    work, gib = replace(fit.work, rows=1), budget_of(now) / GIB
    recomputes = now.config.gradient_checkpointing != "auto" and work.recomputed_blocks > 0
    kept = replace(work, recomputed_blocks=0)
    if recomputes and fits(now, kept):
        work = kept
        rows = largest_batch(now, work, fit.work.rows, budget_of(now))
        text = f"{rows} at once fit without recomputing: gradient_checkpointing: false"
        ledger.advise(RECOMPUTING, f"{text} is up to 1.4x faster")
    plain = replace(work, quantization="none")
    if now.model.quantization in ("int4", "int8") and now.on_gpu and fits(now, plain):
        rows = largest_batch(now, plain, fit.work.rows, budget_of(now))
        text = f"the base fits {gib:.1f} GiB unquantised, with {rows} at once: quantization: none"
        ledger.advise("model.quantization", f"{text} is faster and more precise")


def _settle_micro_batch(
    now: Situation, ledger: Ledger, fit: Fit, bounds: tuple[int, int], sequences: int | None
) -> Workload:
    """`bounds`: the sequences of an update, and how many of them are worth computing at once."""
    most, limit = bounds
    path, gib = "batch.micro_batch", budget_of(now) / GIB
    largest, asked = fit.work.rows, now.config.micro_batch_size
    steps: int | None = None
    source: Source = "machine"
    if asked != "auto":
        micro, because, source = asked, "set in the manifest", "manifest"
        if asked > most:
            ledger.warn(path, f"a step has only {counted(most, 'sequence')}: no more at once")
            if ledger.decisions["data.packing"].value == "none" or now.survey.packed is not None:
                micro, because = most, f"all of a step; the manifest's {asked} are more"
    elif sequences is None:
        micro = largest
        because = f"as many as fit {gib:.1f} GiB; fewer where an update has fewer"
    else:
        micro, steps = even_split(sequences, largest)
        because = f"up to {largest} fit {gib:.1f} GiB"
        if largest == most:
            because = f"the whole update fits {gib:.1f} GiB"
        elif largest == limit:
            because = f"a CPU is fastest with about {CPU_PLACES_AT_ONCE:,} places at once"
        found = now.measured(path)
        if found is not None and fit.fits and found[0] < micro:
            micro, steps = even_split(sequences, found[0])
            because, source = f"{found[0]} at once were {found[1]}", "measurement"
    if not fit.fits:
        because = f"not even this fits {gib:.1f} GiB"
    ledger.settle(path, micro, because, source)
    _settle_accumulation(ledger, sequences, micro, steps)
    rows = min(micro, most)  # of what is not counted yet, memory is that of what is expected
    return replace(fit.work, rows=rows, accumulates=sequences is None or rows < sequences)


def _settle_accumulation(
    ledger: Ledger, sequences: int | None, micro: int, steps: int | None = None
) -> None:
    if sequences is None:
        ledger.unknown("batch.accumulation", "the sequences of an update are not known yet")
        return
    steps = steps or math.ceil(sequences / micro)
    each = f"{micro}" if steps * micro == sequences else f"at most {micro}"
    whole = "the one sequence" if sequences == 1 else f"the {sequences} sequences"
    because = f"{steps} × {each} make up {whole} of an update"
    ledger.settle("batch.accumulation", steps, because, "machine")


def _settle_eval_batch(now: Situation, ledger: Ledger, work: Workload, largest: int) -> None:
    path, budget = "batch.eval_batch", budget_of(now)
    asked = now.config.eval_batch_size
    if asked != "auto":
        ledger.settle(path, asked, "set in the manifest", "manifest")
        if eval_bytes(now, replace(work, rows=asked)) > budget:
            ledger.warn(path, f"{asked} at once will not fit at evaluation")
        return
    rows = 1
    while 2 * rows <= largest and eval_bytes(now, replace(work, rows=2 * rows)) <= budget:
        rows *= 2
    because = f"nothing is kept for a backward; as many as fit, at most {largest}"
    if eval_bytes(now, replace(work, rows=1)) > budget:
        because = "not even one fits at evaluation"
    ledger.settle(path, rows, because, "machine")


def _settle_budget(now: Situation, ledger: Ledger) -> int:
    budget = budget_of(now)
    limited = budget < now.target.budget_bytes
    because = "vram_limit" if limited else now.target.budget_because
    ledger.settle("memory.budget_bytes", budget, because, "manifest" if limited else "machine")
    path, capped = "memory.cap_bytes", limited or because == "--vram"
    if capped and now.on_gpu:
        ledger.settle(path, budget, f"{because}: the run is held to it", "manifest")
    else:
        ledger.settle(path, None, "no limit was asked for", "machine")
    return budget


def _settle_memory(now: Situation, ledger: Ledger, work: Workload) -> None:
    budget = _settle_budget(now, ledger)
    peak = peak_bytes(now, work)
    parts = estimate_here(now, work).parts()
    if not now.on_gpu:
        parts["cuda_context"] = 0
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    words = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.1f}" for name, size in largest)
    _, how = now.calibrations.of(work)
    source: Source = "measurement" if how.startswith("calibrated") else "machine"
    ledger.settle("memory.peak_bytes", peak, f"estimate in GiB: {words} ({how})", source)
    ledger.settle("memory.workload", workload_as_dict(work), "what was estimated", "machine")
    ledger.settle("memory.parts", parts, "estimate by purpose", "machine")
    ledger.settle(
        "memory.fits", peak <= budget, f"{peak / GIB:.1f} of {budget / GIB:.1f} GiB", "machine"
    )
    if peak > budget:
        text = f"needs {peak / GIB:.1f} GiB and has {budget / GIB:.1f}"
        ledger.warn("memory.fits", f"{text}: {way_out(now, work)}")


def _settle_without_shape(now: Situation, ledger: Ledger, most: int, sequences: int | None) -> None:
    """Nothing can be estimated: what was written is taken, and the start of the run will probe."""
    reason, config = now.resolved.shape_from, now.config
    asked_base = now.model.quantization
    if asked_base == "auto":
        because = f"its size is not known: {reason}"
        ledger.settle("model.quantization", "none", because, "preset")
    else:
        settled = "int8" if asked_base == "fp8" else asked_base
        _settle_asked_quantization(ledger, asked_base, settled)
    asked = config.gradient_checkpointing
    if asked == "auto":
        because = f"memory cannot be estimated: {reason}"
        ledger.settle(RECOMPUTING, "none", because, "preset")
    else:
        kind = {"True": "full", "False": "none"}.get(str(asked), str(asked))
        ledger.settle(RECOMPUTING, kind, "set in the manifest", "manifest")
    ledger.unknown("kernels.recomputed_blocks", reason)
    written = config.micro_batch_size if config.micro_batch_size != "auto" else config.batch_size
    micro = min(written, most) if written != "auto" else 1
    source: Source = "preset" if written == "auto" else "manifest"
    because = f"{'one' if written == 'auto' else 'as written'}; what fits is not known: {reason}"
    ledger.settle("batch.micro_batch", micro, because, source)
    _settle_accumulation(ledger, sequences, micro)
    if config.eval_batch_size == "auto":
        ledger.settle("batch.eval_batch", micro, "as many as in training", "preset")
    else:
        now.pass_on(ledger, "batch.eval_batch", "eval_batch_size")
    _settle_budget(now, ledger)
    for key in ("peak_bytes", "parts", "fits", "workload"):
        ledger.unknown(f"memory.{key}", reason)

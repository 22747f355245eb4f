"""Faults in how the arithmetic is done: kernels, precision, recomputation, compilation."""

from __future__ import annotations

from dataclasses import replace

from pydantic import ValidationError

from expert.core.text import gib, percent, span
from expert.insight.findings.evidence import Evidence
from expert.insight.findings.finding import Finding
from expert.planning.choose.kernels import COMPILE_PAYS_AFTER_SECONDS, COMPILED, NOT_RECOMPUTED
from expert.planning.machine.cards import card_named
from expert.planning.memory.calibration import workload_of
from expert.planning.memory.memory import activation_bytes
from expert.planning.run_plan import RunPlan

ROOM_LEFT = 0.95
"""As the planner: a twentieth of the budget stays free, for what no estimate knows."""
RECOMPILES_PER_UPDATE = 0.1
LEAST_RECOMPILES = 3
"""A handful of graphs after the warm-up are odd last batches; one in ten updates is a habit."""
MANY_WEIGHTS = 10_000_000
"""Below, the optimizer of an adapter takes under a hundredth of an update whichever it is."""
OPTIMIZER_SHARE = 0.05
LOSS_SHARE = 0.1
"""Logits that take a tenth of the budget would hold more rows at once."""


def eager_attention(found: Evidence) -> Finding | None:
    if found.run.planned("kernels.attention") != "eager":
        return None
    return Finding(
        name="eager-attention",
        severity="warning",
        title="attention runs as plain matrix products",
        evidence=f"{found.who('kernels.attention')}; sequences of "
        f"{found.amount('data.max_seq_length') or 0:,.0f} tokens",
        consequence="every score is written to memory and kept: time and memory grow with the "
        "square of the length",
        fix="training.config.attention: auto",
        overrides=("training.config.attention=auto",),
        numbers={"max_seq_length": found.amount("data.max_seq_length") or 0.0},
    )


def needless_recomputing(found: Evidence) -> Finding | None:
    """Recomputation although everything would have had room."""
    if not found.recomputes:
        return None
    budget, peak = found.amount("memory.budget_bytes"), found.peak_bytes
    advice = found.advice("kernels.checkpointing")
    if budget is None or peak is None:
        return None
    more = _freed_by_recomputing(found)
    fits = more is not None and peak + more <= ROOM_LEFT * budget
    if not advice and not fits:
        return None
    why = f"the planner said: {advice}"
    if fits and more is not None:
        why = f"without recomputing it would hold {gib(peak + more)}"
    return Finding(
        name="needless-recomputing",
        severity="warning",
        title="activations are computed twice although memory is free",
        evidence=f"{found.who('kernels.checkpointing')}; the run holds {gib(peak)} of "
        f"{gib(budget)}; {why}",
        consequence="the forward pass of every recomputed block runs twice",
        fix="training.config.gradient_checkpointing: auto",
        overrides=("training.config.gradient_checkpointing=auto",),
        gain=NOT_RECOMPUTED
        if found.run.planned("kernels.checkpointing") == "full"
        else 1 + (NOT_RECOMPUTED - 1) / 2,
        numbers={"peak_bytes": peak, "budget_bytes": budget},
    )


def _freed_by_recomputing(found: Evidence) -> float | None:
    """Bytes that keeping all activations would take; None where the plan does not tell."""
    try:
        work = workload_of(RunPlan.model_validate(found.run.plan))
    except (ValidationError, KeyError, TypeError):
        work = None
    if work is not None:
        kept = replace(work, recomputed_blocks=0)
        return float(activation_bytes(kept) - activation_bytes(work))
    # One block's activations are at most all that is kept now: more is not known of older plans.
    blocks, now = found.amount("kernels.recomputed_blocks"), found.part("activations")
    return blocks * now if blocks and now else None


def recompiling(found: Evidence) -> Finding | None:
    storm = found.fell_back("RecompileStorm")
    graphs = found.last("recompiles") or 0.0
    updates = sum(line.updates for line in found.anatomy.lines)
    often = graphs >= LEAST_RECOMPILES and graphs >= RECOMPILES_PER_UPDATE * updates
    if storm is None and not often:
        return None
    seen = f"{graphs:.0f} graphs were compiled after the warm-up in {updates} updates"
    if storm is not None:
        seen = str(storm.get("reason") or seen) + "; the run went on uncompiled"
    return Finding(
        name="recompiling",
        severity="warning",
        title="graphs are compiled again and again",
        evidence=f"{seen}; {found.who('kernels.compile')}",
        consequence="an update that compiles takes seconds instead of milliseconds",
        fix="training.config.packing: true, so that every batch has one shape; else torch_compile: "
        "false",
        overrides=("training.config.packing=true",)
        if found.run.planned("data.packing") == "none"
        else ("training.config.torch_compile=false",),
        numbers={"recompiles": graphs, "updates": float(updates)},
    )


def compile_failed(found: Evidence) -> Finding | None:
    failed = found.fell_back("CompileFailed")
    if failed is None:
        return None
    return Finding(
        name="compile-failed",
        severity="warning",
        title="compilation failed and the run went on without",
        evidence=str(failed.get("reason") or "the reason was not told"),
        consequence=f"compiled blocks run {COMPILED:g}x to 2x as fast on a card",
        fix="install a C compiler and a matching triton, or set torch_compile: false",
        gain=COMPILED if found.run.on_gpu else None,
    )


def kernel_fell_back(found: Evidence) -> Finding | None:
    """Another kernel or precision took the place of the planned one."""
    lost = found.fell_back("KernelUnavailable") or found.fell_back("PrecisionUnsupported")
    if lost is None:
        return None
    return Finding(
        name="kernel-fell-back",
        severity="warning",
        title="a kernel of the plan does not run here",
        evidence=str(lost.get("reason") or "the reason was not told"),
        consequence="a slower one took its place",
        fix="expert diagnose tries every kernel and says what is missing",
    )


def compiled_too_briefly(found: Evidence) -> Finding | None:
    spent = found.anatomy.run
    ended = bool(found.run.of("finished"))
    short = spent.training < COMPILE_PAYS_AFTER_SECONDS
    if not ended or not short or spent.compiling <= spent.training or spent.compiling < 1:
        return None
    return Finding(
        name="too-short-to-compile",
        severity="warning" if found.asked("kernels.compile") else "note",
        title="compiling took longer than the training",
        evidence=f"{span(spent.compiling)} of compiling for {span(spent.training)} of training; "
        f"{found.who('kernels.compile')}",
        consequence="so short a run never wins the time back",
        fix="training.config.torch_compile: auto",
        overrides=("training.config.torch_compile=auto",),
        gain=spent.total / max(1e-9, spent.total - spent.compiling),
        numbers={"compiling": spent.compiling, "training": spent.training},
    )


def compile_off(found: Evidence) -> Finding | None:
    long_enough = found.anatomy.run.training >= COMPILE_PAYS_AFTER_SECONDS
    off = found.run.planned("kernels.compile") is False and found.asked("kernels.compile")
    if not (off and long_enough and found.run.on_gpu):
        return None
    return Finding(
        name="compile-off",
        severity="warning",
        title="blocks are not compiled",
        evidence=f"{found.who('kernels.compile')}; {span(found.anatomy.run.training)} of training",
        consequence="each operation is launched by itself",
        fix="training.config.torch_compile: auto",
        overrides=("training.config.torch_compile=auto",),
        gain=COMPILED,
    )


def full_precision(found: Evidence) -> Finding | None:
    if not found.run.on_gpu or found.run.planned("kernels.precision") != "fp32":
        return None
    if not found.has_bf16:
        return None
    card = card_named(str(found.gpu_fact("name")), int(found.gpu_fact("memory_total_bytes") or 0))
    gain = None
    if card and card.bf16_tflops and card.tf32_tflops and found.run.planned("kernels.tf32"):
        gain = card.bf16_tflops / card.tf32_tflops
    return Finding(
        name="fp32-on-a-bf16-card",
        severity="warning",
        title="float32 arithmetic on a card with bf16 units",
        evidence=f"precision fp32 on {found.gpu_fact('name')}; "
        f"{found.decision('kernels.precision').get('because', '')}".rstrip("; "),
        consequence="half of the speed at most, and twice the memory for activations",
        fix="training.config.bf16: auto and fp16: auto",
        overrides=("training.config.bf16=auto", "training.config.fp16=auto"),
        gain=gain,
    )


def tf32_off(found: Evidence) -> Finding | None:
    if not found.run.on_gpu or found.run.planned("kernels.tf32") is not False:
        return None
    if not found.has_bf16:
        return None
    matters = found.run.planned("kernels.precision") == "fp32"
    return Finding(
        name="tf32-off",
        severity="warning" if matters else "note",
        title="float32 products leave the tensor cores unused",
        evidence=f"{found.who('kernels.tf32')}; precision {found.run.planned('kernels.precision')}",
        consequence="float32 products run on the shaders, several times slower",
        fix="training.config.use_tf32: auto",
        overrides=("training.config.use_tf32=auto",),
    )


def plain_optimizer(found: Evidence) -> Finding | None:
    weights = found.amount("adapter.trainable_parameters")
    plain = found.run.planned("optim.optimizer") == "adamw_torch"
    if not found.run.on_gpu or not plain or (weights or 0) < MANY_WEIGHTS or found.step is None:
        return None
    share = found.step.share("optimizer")
    return Finding(
        name="plain-optimizer",
        severity="warning" if share >= OPTIMIZER_SHARE else "note",
        title="AdamW runs as many small kernels",
        evidence=f"{found.who('optim.optimizer')} for {weights:,.0f} weights; the optimizer takes "
        f"{percent(share)} of an update",
        consequence="one fused kernel reads and writes the weights once",
        fix="training.config.optim: adamw_torch_fused",
        overrides=("training.config.optim=adamw_torch_fused",),
        numbers={"optimizer_share": share},
    )


def whole_logits(found: Evidence) -> Finding | None:
    if found.run.planned("kernels.fused_loss") is not False:
        return None
    taken, budget = found.part("loss"), found.amount("memory.budget_bytes")
    heavy = bool(budget and taken >= LOSS_SHARE * budget)
    return Finding(
        name="whole-logits",
        severity="warning" if heavy else "note",
        title="the loss keeps the whole logits",
        evidence=f"{found.who('kernels.fused_loss')}; {gib(taken)} for them at the peak",
        consequence="memory that could hold more rows, and a pass over it forward and backward",
        fix="training.config.fused_loss: auto",
        overrides=("training.config.fused_loss=auto",),
        numbers={"loss_bytes": taken},
    )


RULES = (
    eager_attention,
    needless_recomputing,
    recompiling,
    compile_failed,
    kernel_fell_back,
    compiled_too_briefly,
    compile_off,
    full_precision,
    tf32_off,
    plain_optimizer,
    whole_logits,
)

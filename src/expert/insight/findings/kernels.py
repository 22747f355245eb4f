"""How the arithmetic runs: kernels, precision, activation checkpointing, compilation."""

from __future__ import annotations

import math

from expert.core.text import gib, percent, span
from expert.insight.findings.evidence import Evidence
from expert.insight.findings.finding import CONFIG, Answer, Noted
from expert.insight.record import mapping
from expert.planning.choose.kernels import COMPILE_SPEEDUP, NO_CHECKPOINTING_SPEEDUP
from expert.planning.choose.rates import COLD_COMPILE
from expert.planning.machine.cards import card_by_nvml_name
from expert.planning.memory.fitting import MARGIN

RECOMPILES_PER_UPDATE = 0.1
MIN_RECOMPILES = 3
"""A few graphs after warm-up come from odd last batches; one per ten steps is a pattern."""
MANY_WEIGHTS = 10_000_000
"""Below this, an adapter's optimizer takes under 1 % of a step, whichever it is."""
OPTIMIZER_SHARE = 0.05
FUSED_GAIN, TF32_GAIN, BF16_GAIN, CARD_GAIN = 1.05, 1.5, 2.0, 10.0
"""What guides to the RTX 4080 Super, 4090 and 5090 state for one switch alone; not measured."""
COMPILE_PAYS_OFF_SECONDS = COLD_COMPILE / (1 - 1 / COMPILE_SPEEDUP)
"""Seconds of uncompiled training after which compiling would have paid off."""


def eager_attention(found: Evidence) -> Answer:
    if found.planned("kernels.attention") != "eager":
        return None
    length = found.amount("data.max_seq_length") or 0.0
    return f"{found.setting_words('kernels.attention')}; sequences of {length:,.0f} tokens"


def needless_recomputing(found: Evidence) -> Answer:
    """Activation checkpointing although all activations would fit."""
    budget, peak = found.amount("memory.budget_bytes"), found.peak_bytes
    if not found.recomputes or budget is None or peak is None:
        return None
    if found.before is not None:
        return None  # the plan says so
    # A block's activations are at most everything that is kept now.
    blocks, now = found.amount("kernels.recomputed_blocks"), found.part("activations")
    whole = peak + blocks * now if blocks and now else math.inf
    if whole > MARGIN * budget:
        return None
    text = f"{found.setting_words('kernels.checkpointing')}; the run holds {gib(peak)} of "
    text += f"{gib(budget)}; without checkpointing it would hold at most {gib(whole)}"
    return Noted(text, gain=gain_without_checkpointing(found))


def gain_without_checkpointing(found: Evidence) -> float:
    """The speedup from keeping all activations; half as much if some blocks keep theirs."""
    if found.planned("kernels.checkpointing") == "full":
        return NO_CHECKPOINTING_SPEEDUP
    return 1 + (NO_CHECKPOINTING_SPEEDUP - 1) / 2


def recompiling(found: Evidence) -> Answer:
    graphs = found.last("recompiles") or 0.0
    updates = sum(line.updates for line in found.anatomy.lines)
    if graphs < MIN_RECOMPILES or graphs < RECOMPILES_PER_UPDATE * updates:
        return None
    what = f"{graphs:.0f} graphs were compiled after the warm-up in {updates} steps"
    alone = found.planned("data.packing") == "none"
    return Noted(
        f"{what}; {found.setting_words('kernels.compile')}",
        keys=("packing=true",) if alone else ("torch_compile=false",),
        fix=f"{CONFIG}.packing: true, so that every batch has one shape; else torch_compile: false",
    )


def compile_failed(found: Evidence) -> Answer:
    failed = found.fell_back("CompileFailed")
    if failed is None:
        return None
    gain = COMPILE_SPEEDUP if found.on_gpu else None
    return Noted(str(failed.get("reason") or "the reason is unknown"), gain=gain)


def kernel_fell_back(found: Evidence) -> Answer:
    """A different kernel or precision replaced the planned one."""
    lost = found.fell_back("KernelUnavailable") or found.fell_back("PrecisionUnsupported")
    return str(lost.get("reason") or "the reason is unknown") if lost else None


def compile_off(found: Evidence) -> Answer:
    off = found.planned("kernels.compile") is False and found.requested("kernels.compile")
    trained = found.anatomy.run.training
    if not off or not found.on_gpu or trained < COMPILE_PAYS_OFF_SECONDS:
        return None
    text = f"{found.setting_words('kernels.compile')}; {span(trained)} of training"
    return Noted(text, gain=COMPILE_SPEEDUP)


def fp32_on_a_bf16_card(found: Evidence) -> Answer:
    if not found.has_bf16 or found.planned("kernels.precision") != "fp32":
        return None
    place = found.gpu_fact("name") or found.run.plan.get("target")
    card = card_by_nvml_name(str(place), found.gpu_bytes or 0)
    gain = BF16_GAIN if found.before is not None else None
    if card and card.bf16_tflops and card.tf32_tflops and found.planned("kernels.tf32"):
        gain = card.bf16_tflops / card.tf32_tflops
    because = found.decision("kernels.precision").get("because", "")
    return Noted(f"precision fp32 on {place}; {because}".rstrip("; "), gain=gain)


def tf32_off(found: Evidence) -> Answer:
    if found.planned("kernels.tf32") is not False or not found.has_bf16:
        return None
    precision = found.planned("kernels.precision")
    matters = precision == "fp32"
    return Noted(
        f"{found.setting_words('kernels.tf32')}; precision {precision}",
        severity="warning" if matters else "note",
        gain=TF32_GAIN if matters and found.before is not None else None,
    )


def plain_optimizer(found: Evidence) -> Answer:
    if not found.on_gpu or found.planned("optim.optimizer") != "adamw_torch":
        return None
    setting = found.setting_words("optim.optimizer")
    if found.before is not None:
        return Noted(setting, gain=FUSED_GAIN)
    weights = found.amount("adapter.trainable_parameters") or 0
    if weights < MANY_WEIGHTS or found.step is None:
        return None
    share = found.step.share("optimizer")
    return Noted(
        f"{setting} for {weights:,.0f} weights; the optimizer takes {percent(share)} of a step",
        severity="warning" if share >= OPTIMIZER_SHARE else "note",
    )


def cpu_asked(found: Evidence) -> Answer:
    here = found.before.gpu_here if found.before is not None else ""
    config = mapping(mapping(found.run.manifest.get("training")).get("config"))
    if not here or found.on_gpu or config.get("device") != "cpu":
        return None
    return Noted(f"device: cpu, and this machine has {here}", gain=CARD_GAIN)


def gpu_unused(found: Evidence) -> Answer:
    if found.on_gpu or not found.gpus or found.planned("kernels.device") != "cpu":
        return None
    text = f"{found.gpu_fact('name') or 'a GPU'} is there; {found.setting_words('kernels.device')}"
    cuda = "" if found.run.environment.get("cuda") else "; torch is installed without CUDA"
    return f"{text}{cuda}"

"""Precision, TF32, fused or compiled blocks, attention, loss, optimizer: the card's best."""

from __future__ import annotations

import math
from dataclasses import replace

from expert.core.install import pip_install
from expert.manifest.schema.kinds import LOW_RANK, ON_POLICY
from expert.planning.choose.fastest import choose_capture
from expert.planning.choose.rates import COLD_COMPILE
from expert.planning.choose.sequences import FULL_ENOUGH
from expert.planning.decisions import Source
from expert.planning.draft import KEPT, SET, PlanDraft
from expert.planning.machine.cards import ADA, AMPERE, HOPPER, VOLTA
from expert.planning.machine.host import linear_kernels_lacking, package_version
from expert.planning.memory.fitting import budget_of
from expert.planning.memory.memory import loss_chunk_for_budget
from expert.planning.memory.workload import Workload
from expert.planning.models.architectures import FUSED_TYPES
from expert.planning.models.shapes import UNKNOWN_EXPERTS

FLASH4_WIDTHS = (64, 128)
FLASH_WIDTH = 256
"""Head sizes for which outputs and gradients were correct on an H200 (4.0.0b36). With 16 the
gradient of queries was off by 1.1; others were not tried."""
FLASH4_PAYS_FROM = 1024
"""Tokens of a document on average from which FlashAttention 4 is expected to be faster than our
kernels: they read 64 queries at a time and multiply at 200 to 270 TFLOP/s, it at up to 600."""
COMPILE_SPEEDUP = 1.3
"""Compiled blocks ran 1.24x (8B), 1.33x (1B) and 2.16x (0.6B) as fast on an H200 with LoRA, side by
side (choose/rates.py). One card only: on others run expert benchmark."""
NO_CHECKPOINTING_SPEEDUP = 1.35
"""Checkpointing all blocks cost LoRA 1.35-1.46x of the time (docs/benchmarks/memory-h200.json)."""
FUSED, COMPILE = "kernels.fused_blocks", "kernels.compile"
FEW_EXAMPLES = 1000
FEW_STEPS = 50


def choose_precision(draft: PlanDraft) -> None:
    """bf16 if the card has it, else fp16 with loss scaling; fp32 on a CPU or on request."""
    bf16, fp16, path = draft.config.bf16, draft.config.fp16, "kernels.precision"
    able, kept = draft.has_capability(AMPERE), draft.kept.precision
    runs_here = kept == "fp32" or (draft.on_gpu and kept == "fp16")
    if kept == "bf16":
        runs_here = able or not draft.on_gpu
    source: Source = "machine"
    if bf16 == fp16 == "auto" and kept and runs_here:
        chosen, because = kept, KEPT
    elif bf16 is True and draft.on_gpu and not able:
        because = f"bf16: true, but {draft.card_label} has no bf16: fp16 with loss scaling"
        chosen, source = "fp16", "fallback"
    elif bf16 is True:
        chosen, because, source = "bf16", SET, "manifest"
        if not draft.on_gpu:
            draft.warn(path, "bf16 on a CPU is slower than fp32 unless it has AMX or bf16 units")
    elif fp16 is True and not draft.on_gpu:
        because = "fp16: true, but fp16 trains only on a GPU"
        chosen, source = "fp32", "fallback"
    elif fp16 is True:
        chosen, because, source = "fp16", SET, "manifest"
        if able:
            text = f"bf16: true is as fast on {draft.target.name} and needs no loss scaling"
            draft.advise(path, text)
    elif bf16 is False and fp16 is False:
        chosen, because, source = "fp32", "bf16 and fp16 are both false", "manifest"
        if draft.on_gpu:
            draft.warn(path, "fp32 uses the tensor cores only through TF32 and doubles the memory")
    elif not draft.on_gpu:
        chosen, because = "fp32", "fastest on most CPUs"
    elif able and bf16 == "auto":
        chosen, because = "bf16", f"{draft.card_label} has bf16 tensor cores"
        if draft.target.capability is None:
            because = "no card is named; every one since 2020 has bf16 tensor cores"
    elif fp16 == "auto":
        ruled_out = "bf16 is false" if bf16 is False else f"{draft.card_label} has no bf16"
        chosen, because = "fp16", f"{ruled_out}; with loss scaling"
    else:
        chosen, because = "fp32", f"{draft.card_label} has no bf16, and fp16 is switched off"
    draft.settle(path, chosen, because, source)
    if source == "fallback":
        draft.warn(path, because)
    scaling = chosen == "fp16"
    because = "fp16 gradients underflow without it" if scaling else f"not needed with {chosen}"
    draft.settle("kernels.loss_scaling", scaling, because)


def choose_tf32(draft: PlanDraft) -> None:
    """TF32 for the remaining float32 products, from Ampere on."""
    path, able = "kernels.tf32", draft.has_capability(AMPERE)
    if draft.config.use_tf32 is True and not able:
        because = f"TF32 was requested, but {draft.card_label} has none"
        draft.warn(path, because)
        draft.settle(path, False, because, "fallback")
    elif draft.kept.tf32 is not None and (able or not draft.kept.tf32):
        draft.choose(path, "use_tf32", draft.kept.tf32, KEPT)
    else:
        because = "no cost from capability 8.0 on" if able else f"{draft.card_label} has no TF32"
        draft.choose(path, "use_tf32", able, because)


def base_quantization(draft: PlanDraft) -> str:
    """The requested quantisation; int8 instead of FP8 on cards before Ada, or if a resumed run
    started on such a card."""
    asked = str(draft.model.quantization)
    able = not draft.on_gpu or draft.has_capability(ADA)
    able = able and draft.kept.quantization != "int8"
    return "int8" if asked == "fp8" and not able else asked


def choose_attention(draft: PlanDraft) -> None:
    """Kernels that keep packed documents apart; SDPA for unpacked rows, older cards and fp32.

    What replaces use_sdpa depends on the card, which is only known here.
    """
    path = "kernels.attention"
    chosen, because, source = _attention(draft)
    draft.settle(path, chosen, because, source)
    if source == "fallback":
        draft.warn(path, because)
    if chosen == "eager" and source == "manifest":
        draft.warn(path, "eager attention keeps every score: memory grows quadratically")
    if draft.config.use_sdpa is True and draft.config.attention == "auto" and chosen != "sdpa":
        text = f"use_sdpa: {chosen} attention keeps packed rows apart; SDPA would need a mask of"
        draft.supersede(path, f"{text} every pair of tokens")


def _attention(draft: PlanDraft) -> tuple[str, str, Source]:
    """The attention, why, and the source of that choice."""
    config, packed, hopper = draft.config, draft.packed, draft.target.capability == HOPPER
    able, without4 = draft.has_capability(AMPERE), _why_not_flash4(draft)
    flashes = able and draft["kernels.precision"] != "fp32"
    asked, shape = config.attention, draft.resolved.shape
    if asked == "auto" and config.flash_attention_2:
        asked = "flash"
    if asked == "auto" and config.use_sdpa is True and not packed:
        return "sdpa", "use_sdpa in the manifest", "manifest"
    if (asked in ("flash", "flash4") and not flashes) or (asked == "flex" and not able):
        lacking = f"{draft.card_label} has no kernel for it" if not able else "it needs 16 bits"
        return "sdpa", f"{asked} was requested, but {lacking}", "fallback"
    kept = draft.kept.attention
    runs_here = {"flash": flashes, "flash4": flashes and not without4, "flex": able}
    if asked == "auto" and kept and runs_here.get(kept, True):
        return kept, KEPT, "machine"
    if asked == "flash4" and without4:
        return "flash", f"flash4 was requested, but {without4}", "fallback"
    if asked != "auto":
        own = config.attention != "auto"
        because = SET if own else "flash_attention_2 in the manifest; no package is needed"
        return asked, because, "manifest"
    if shape is not None and shape.own_scores:
        because = f"the model {shape.own_scores}, which flash kernels and SDPA do not"
        return "flex" if packed and able and draft.on_gpu else "eager", because, "machine"
    if shape is not None and shape.widest_head > FLASH_WIDTH:
        because = f"flash kernels take heads of up to {FLASH_WIDTH}, not {shape.widest_head}"
        return "sdpa", because, "machine"
    if not packed:
        return "sdpa", "rows are not packed: SDPA picks its fastest kernel", "machine"
    if flashes and hopper and not without4 and _mean_tokens(draft) >= FLASH4_PAYS_FROM:
        because = f"documents of {_mean_tokens(draft):,.0f} tokens suit FlashAttention 4"
        return "flash4", because, "machine"
    if hopper and draft["kernels.compile"]:
        # docs/benchmarks/training-speed-h200.json: 117,143 against 108,998 tokens/s at 0.6B in one
        # run; at 8B, in two runs, 16,415 against 16,229.
        because = "FlexAttention compiles with the blocks; 1.07x as fast as torch's flash (0.6B)"
        return "flex", because, "measurement"
    if not flashes:
        lacking = "variable-length flash attention needs Ampere or later, and 16 bits"
        return "sdpa", f"{lacking}: SDPA with a document mask", "machine"
    return "flash", "variable-length flash attention keeps packed documents apart", "machine"


def _mean_tokens(draft: PlanDraft) -> float:
    """Of a document; 0 if unknown."""
    return min(draft.survey.mean_tokens or 0.0, float(draft["data.max_seq_length"] or 0))


def _why_not_flash4(draft: PlanDraft) -> str:
    """Why FlashAttention 4 cannot be used, or ""."""
    if not draft.has_capability(HOPPER):
        return f"{draft.card_label} is older than Hopper"
    if package_version("flash-attn-4").value is None:
        return f"it is not installed ({pip_install('flash4')})"
    shape = draft.resolved.shape
    if shape is not None and shape.head_dim not in FLASH4_WIDTHS:
        return f"it was only correct for heads of 64 and 128, not {shape.head_dim}"
    return "it does not work in compiled blocks" if draft["kernels.compile"] else ""


def choose_switches(draft: PlanDraft) -> None:
    """The fused loss with its chunks, the optimizer, determinism and cuDNN's autotuner."""
    path, because = "kernels.fused_loss", "the full logits are never stored"
    fused, shape = draft.choose(path, "fused_loss", True, because, "preset"), draft.resolved.shape
    if not fused:
        text = "the full logits are stored: 12 bytes for each token and vocabulary entry"
        draft.warn(path, text)
    path, because, rows = "kernels.loss_chunk", "by the vocabulary", None
    if shape is not None and draft.on_gpu and fused:  # fewer rows of logits if memory is scarce
        budget = budget_of(draft)
        rows = loss_chunk_for_budget(shape.vocab, budget)
        because = f"logits take a small part of {budget / 2**30:.1f} GiB" if rows else because
        draft.settle(path, rows, because)
    else:
        draft.settle(path, None, because, "preset")
    chosen = ("adamw_torch_fused", "one kernel for all weights")
    chosen = chosen if draft.on_gpu else ("adamw_torch", "no GPU")
    draft.choose("optim.optimizer", "optim", *chosen)
    draft.settle_from_config("kernels.deterministic", "deterministic")
    path, because = "kernels.cudnn_benchmark", "shapes are fixed" if draft.on_gpu else "no GPU"
    if draft.config.deterministic:
        because = "deterministic: the fastest algorithm may differ from run to run"
        draft.settle(path, False, because, "manifest")
        if draft.config.cudnn_benchmark is True:
            draft.supersede(path, f"cudnn_benchmark: {because}")
    else:
        draft.choose(path, "cudnn_benchmark", draft.on_gpu, because)


# --- blocks: by fused kernels, compiled, or as the model has them --------------------------------


def choose_fused_blocks(draft: PlanDraft, work: Workload | None, sequences: int | None) -> None:
    """As fast as compiled blocks from the first step, with less memory: wherever possible."""
    asked = draft.config.fused_blocks
    if asked == "auto" and draft.kept.fused_blocks is False:
        draft.settle(FUSED, False, KEPT)
        return
    obstacle = _cannot_fuse(draft) or ("" if work is not None else draft.resolved.shape_from)
    if not obstacle and work is not None:
        # The attention is chosen later; what matters here is its memory.
        attention = str(draft.config.attention)
        if attention == "auto":
            flashes = draft.packed and draft["kernels.precision"] != "fp32"
            attention = "flash" if flashes else "sdpa"
        fused = replace(work, fused_blocks=True, attention=attention)
        way, _ = choose_capture(draft, fused, sequences)
        if not way.work.is_sharded:
            because = "as fast as compiled blocks on an H200, without the time to compile"
            draft.choose(FUSED, "fused_blocks", True, because)
            return
        obstacle = "sharded weights cannot be fused"
    draft.settle(FUSED, False, obstacle, "fallback" if asked is True else "machine")
    if asked is True:
        draft.warn(FUSED, f"fused_blocks: true, but {obstacle}")


def _cannot_fuse(draft: PlanDraft) -> str:
    """Why the kernels do not support this model, adapter or card, or ""."""
    shape, targets = draft.resolved.shape, draft["adapter.target_modules"]
    if draft.config.adapter_type not in LOW_RANK:
        return f"made for {' and '.join(LOW_RANK)}"
    if not draft.on_gpu and draft.config.fused_blocks == "auto":
        return "no GPU"
    able = draft.has_capability(AMPERE) or not draft.on_gpu
    if not able or draft["kernels.precision"] == "fp16":
        return "needs bf16"
    if shape is None or not shape.fused:
        return f"made for the blocks of {', '.join(FUSED_TYPES)}"
    names = {name.rsplit(".", 1)[-1] for name in targets or ()}
    if targets != "all-linear" and not names & set(shape.linear_sizes):
        return "no linear layer of a block has an adapter"
    if draft.config.torch_compile is True:
        return "torch_compile: true compiles the model's own blocks"
    return ""


def choose_compile(draft: PlanDraft, work: Workload | None, sequences: int | None) -> None:
    """Per-block compilation where it pays; `sequences`: per step, if known."""
    config = draft.config
    padded = not draft.packed and not draft.is_char_model  # character blocks have one length
    obstacle = "" if draft.on_gpu else "compiling is not worth it on a CPU"
    if draft.config.method == ON_POLICY:
        obstacle = "answers vary in length: each width would be compiled again"
    shape = draft.resolved.shape
    if shape is not None and shape.untried:
        obstacle = obstacle or f"it was not tried with {shape.untried}"
        lacking = linear_kernels_lacking(draft.target.capability)
        if shape.recurrent == "linear_attention" and draft.on_gpu and lacking:
            text = f"its linear attention runs in plain torch, which is slow: {lacking}"
            draft.warn("kernels.attention", text)
    if UNKNOWN_EXPERTS in draft.resolved.shape_from:
        obstacle = obstacle or "experts would be compiled again in every step"
    if draft.on_gpu and not draft.has_capability(VOLTA):
        obstacle = f"{draft.card_label} is older than Triton supports (7.0)"
    if config.torch_compile != "auto":
        draft.settle(COMPILE, config.torch_compile, SET, "manifest")
        if config.torch_compile and obstacle:
            draft.warn(COMPILE, f"{obstacle}: compilation may fall back")
        if config.torch_compile and padded:
            text = "padded rows vary in width, and each width is compiled again: use packing"
            draft.warn(COMPILE, text)
    elif draft["kernels.fused_blocks"]:
        draft.settle(COMPILE, False, "fused blocks need no compiling")
    elif draft.kept.attention == "flash4" and config.attention == "auto":
        because = "FlashAttention 4, which the run keeps, does not work in compiled blocks"
        draft.settle(COMPILE, False, because)
    elif obstacle or padded:
        obstacle = obstacle or "padded rows vary in width: each width would be compiled again"
        draft.settle(COMPILE, False, obstacle)
    else:
        _compile_if_it_pays(draft, work, sequences)
    because = "more effort gains little on single blocks"
    draft.choose("kernels.compile_mode", "torch_compile_mode", "default", because, "preset")
    draft.settle_from_config("kernels.compile_backend", "torch_compile_backend")


def _compile_if_it_pays(draft: PlanDraft, work: Workload | None, sequences: int | None) -> None:
    """Compile if the whole run ends sooner, compile time included, by the table of rates."""
    steps, rows = draft["length.total_steps"], draft.survey.rows
    eager = compiled = math.inf
    if work is not None and steps and draft["length.tokens_per_epoch"]:
        eager, compiled = (
            steps * choose_capture(draft, replace(work, compiled=on), sequences)[0].step_seconds
            for on in (False, True)
        )
    known, total = math.isfinite(eager + compiled), compiled + COLD_COMPILE
    if known:
        because = f"about {total:.0f} s compiled, {COLD_COMPILE:.0f} s of it compiling, and "
        because += f"{eager:.0f} s uncompiled"
        packed = draft.packed_rows
        if packed is not None and packed.fill < FULL_ENOUGH:
            because += f" (sequences are {packed.fill:.0%} full, compiled batches of one width)"
        draft.settle(COMPILE, total < eager, because)
    else:
        few = steps is not None and steps < FEW_STEPS
        few = few or (rows is not None and rows * draft.config.epochs < FEW_EXAMPLES)
        because = "fixed shapes: 1.2-2.2x as fast on an H200, after about 30 s of compiling"
        draft.settle(COMPILE, not few, "the run is too short" if few else because)

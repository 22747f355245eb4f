"""How blocks are computed: by Expert's fused kernels, compiled, or as the model has them."""

from __future__ import annotations

import math
from dataclasses import replace

from expert.planning.choose.fastest import choose_capture
from expert.planning.choose.rates import COLD_COMPILE
from expert.planning.choose.sequences import FULL_ENOUGH
from expert.planning.draft import KEPT, SET, PlanDraft
from expert.planning.machine.cards import AMPERE, VOLTA
from expert.planning.memory.workload import Workload
from expert.planning.models.shapes import PROJECTIONS

FUSED, COMPILE = "kernels.fused_blocks", "kernels.compile"
FEW_EXAMPLES = 1000
FEW_STEPS = 50


def choose_fused_blocks(
    draft: PlanDraft, work: Workload | None, sequences: int | None
) -> float | None:
    """As fast as compiled blocks from the first step, with less memory: chosen wherever possible.
    Returns the expected training time with them, if known."""
    asked = draft.config.fused_blocks
    if asked == "auto" and draft.kept.fused_blocks is False:
        draft.settle(FUSED, False, KEPT)
        return None
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
            chosen = draft.choose(FUSED, "fused_blocks", True, because)
            seconds = (draft["length.total_steps"] or math.nan) * way.step_seconds
            return seconds if chosen and math.isfinite(seconds) else None
        obstacle = "sharded weights cannot be fused"
    draft.settle(FUSED, False, obstacle, "fallback" if asked is True else "machine")
    if asked is True:
        draft.warn(FUSED, f"fused_blocks: true, but {obstacle}")
    return None


def _cannot_fuse(draft: PlanDraft) -> str:
    """Why the kernels do not support this model, adapter or card, or ""."""
    shape, targets = draft.resolved.shape, draft["adapter.target_modules"]
    if draft.config.adapter_type not in ("lora", "dora"):
        return "made for LoRA and DoRA"
    if not draft.on_gpu and draft.config.fused_blocks == "auto":
        return "no GPU"
    able = draft.has_capability(AMPERE) or not draft.on_gpu
    if not able or draft["kernels.precision"] == "fp16":
        return "needs bf16"
    if shape is None or not shape.llama_blocks or shape.head_dim & (shape.head_dim - 1):
        return "made for blocks like those of Llama, Mistral and Qwen"
    names = {name.rsplit(".", 1)[-1] for name in targets or ()}
    if targets != "all-linear" and not names & set(PROJECTIONS):
        return "no linear layer of a block has an adapter"
    if draft.config.torch_compile is True:
        return "torch_compile: true compiles the model's own blocks"
    return ""


def choose_compile(draft: PlanDraft, work: Workload | None, sequences: int | None) -> None:
    """Per-block compilation where it pays; `sequences`: per step, if known."""
    config = draft.config
    padded = not draft.packed and not draft.is_char_model  # character blocks have one length
    obstacle = "" if draft.on_gpu else "compiling is not worth it on a CPU"
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

"""Whether blocks with LoRA or DoRA use Expert's fused kernels."""

from __future__ import annotations

import math
from dataclasses import replace

from expert.planning.choose.cuda_graphs import choose_capture
from expert.planning.draft import KEPT, PlanDraft
from expert.planning.machine.cards import AMPERE
from expert.planning.memory.workload import Workload
from expert.planning.models.shapes import PROJECTIONS

PATH = "kernels.fused_blocks"


def choose_fused_blocks(
    draft: PlanDraft, work: Workload | None, sequences: int | None
) -> float | None:
    """As fast as compiled blocks from the first step, with less memory: chosen wherever possible.
    Returns the expected training time with them, if known."""
    asked, kept, way = draft.config.fused_blocks, draft.kept.fused_blocks, None
    measured = draft.measured(PATH)
    if asked == "auto" and kept is False:
        draft.settle(PATH, False, KEPT)
        return None
    if asked == "auto" and kept is None and measured is not None and not measured[0]:
        draft.settle(PATH, *measured, "measurement")
        return None
    obstacle = _obstacle(draft) or ("" if work is not None else draft.resolved.shape_from)
    if not obstacle and work is not None:
        fused = replace(work, fused_blocks=True, attention=_likely_attention(draft))
        way = choose_capture(draft, fused, sequences).way
        if way.fit.work.is_sharded:
            obstacle = "sharded weights cannot be fused"
    if not obstacle and way is not None:
        because = "as fast as compiled blocks on an H200, without the time to compile"
        chosen = draft.choose(PATH, "fused_blocks", True, because)
        seconds = (draft["length.total_steps"] or math.nan) * way.step_seconds
        return seconds if chosen and math.isfinite(seconds) else None
    fell_back = asked is True
    draft.settle(PATH, False, obstacle, "fallback" if fell_back else "machine")
    if fell_back:
        draft.warn(PATH, f"fused_blocks: true, but {obstacle}")
    return None


def _obstacle(draft: PlanDraft) -> str:
    """Why the kernels do not support this model, adapter or card, or ""."""
    shape, targets = draft.resolved.shape, draft["adapter.target_modules"]
    if draft.config.adapter_type not in ("lora", "dora"):
        return "made for LoRA and DoRA"
    if not draft.on_gpu and draft.config.fused_blocks == "auto":
        return "no GPU"
    if draft.on_gpu and draft.target.windows:
        return "Triton does not ship for Windows"
    able = draft.has_capability(AMPERE) or not draft.on_gpu
    if not able or draft["kernels.precision"] == "fp16":
        return "needs bf16"
    if shape is None or not shape.llama_blocks or shape.head_dim & (shape.head_dim - 1):
        return "made for blocks like those of Llama, Mistral and Qwen"
    if targets != "all-linear" and not {_last(name) for name in targets or ()} & set(PROJECTIONS):
        return "no linear layer of a block has an adapter"
    if draft.config.torch_compile is True:
        return "torch_compile: true compiles the model's own blocks"
    return ""


def _likely_attention(draft: PlanDraft) -> str:
    """The attention chosen later, as far as memory is concerned."""
    if draft.config.attention != "auto":
        return str(draft.config.attention)
    return "flash" if draft.packed and draft["kernels.precision"] != "fp32" else "sdpa"


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]

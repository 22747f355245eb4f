"""Chooses the next plan to try after a failure, with a reason for every change."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from expert.manifest.schema.kinds import OPTIMIZERS
from expert.manifest.schema.manifest import CHAR_GPT
from expert.planning.choose.sequences import VARLEN_ATTENTION
from expert.planning.decisions import REQUESTED, Decision
from expert.planning.run_plan import RunPlan

ATTENTION_AFTER = {"flex": "flash", "flash4": "flash", "flash": "sdpa", "sdpa": "eager"}
PLAIN_OPTIMIZER = "adamw_torch"
SWITCHES = ("fused_loss", "compile", "tf32", "cudnn_benchmark", "cuda_graphs")
"""Kernels that can be switched off without changing anything else."""


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    where: Literal["training", "evaluation", "probe"]
    message: str
    blocks: int | None = None
    """The model's number of blocks, if it was loaded; plans do not contain it."""


@dataclass(frozen=True, kw_only=True)
class CompileFailed:
    reason: str


@dataclass(frozen=True, kw_only=True)
class KernelUnavailable:
    kernel: str
    """`attention` or its kind, the optimizer's name, `fused_loss`, `compile`, `tf32`, ..."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class PrecisionUnsupported:
    precision: Literal["bf16", "fp16", "fp32"]
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorkersUnavailable:
    reason: str


@dataclass(frozen=True, kw_only=True)
class NotFinite:
    step: int
    bins: tuple[int, ...] = ()
    """The packed sequences of that step."""


@dataclass(frozen=True, kw_only=True)
class LossSpike:
    """Losses far above the previous ones."""

    step: int
    """The first such step."""
    loss: float
    """Of that step."""
    median: float
    z: float


Failure = (
    OutOfMemory
    | CompileFailed
    | KernelUnavailable
    | PrecisionUnsupported
    | WorkersUnavailable
    | NotFinite
    | LossSpike
)
Changes = dict[str, Any]


def plan_after(plan: RunPlan, failure: Failure) -> RunPlan | None:
    """The plan to try next; None if no other plan helps.

    The rows of a step never change, so neither does the training. Spikes and values that are not
    finite are not the plan's fault: `spikes.py` decides about those.
    """
    values, because = _changes_after(plan, failure)
    return plan.with_values(values, because, "fallback") if values else None


def changes(before: RunPlan, after: RunPlan) -> list[Decision]:
    """The decisions of `after` that are not in `before`."""
    known = {decision.path: decision for decision in before.decisions}
    return [decision for decision in after.decisions if known.get(decision.path) != decision]


def _changes_after(plan: RunPlan, failure: Failure) -> tuple[Changes, str]:
    """New values by path, and the reason; no values if nothing is left to try."""
    values: Changes
    match failure:
        case OutOfMemory(where="evaluation", message=message):
            rows = plan.batch.eval_batch
            values = {"batch.eval_batch": rows // 2} if rows > 1 else {}
            ran_out = f"out of memory in evaluation with micro-batch size {rows}"
            return values, f"{ran_out}: {_first_line(message)}"
        case OutOfMemory():
            return _smaller_training(plan, failure)
        case CompileFailed(reason=reason):
            values = {"kernels.compile": False} if plan.kernels.compile else {}
            return values, f"compilation failed: {_first_line(reason)}"
        case KernelUnavailable():
            return _without_kernel(plan, failure)
        case PrecisionUnsupported():
            return _other_precision(plan, failure)
        case WorkersUnavailable(reason=reason):
            values = {"loader.workers": 0} if plan.loader.workers else {}
            return values, f"no worker processes can be started: {_first_line(reason)}"
        case NotFinite() | LossSpike():
            return {}, ""


def _smaller_training(plan: RunPlan, failure: OutOfMemory) -> tuple[Changes, str]:
    """First no CUDA graphs; then a smaller micro-batch; then more activation checkpointing; then a
    4-bit base, unless the manifest sets its quantization."""
    micro, sequences = plan.batch.micro_batch, plan.batch.sequences_per_update
    ran_out = f"out of memory in {failure.where} with micro-batch size {micro}"
    because = f"{ran_out}: {_first_line(failure.message)}"
    if plan.kernels.cuda_graphs:  # graphs would keep their memory whatever is tried next
        return {"kernels.cuda_graphs": False}, because
    if micro > 1:
        share = plan.parallel.share_of(sequences) if sequences is not None else None
        fewer = min(micro // 2, share or micro)
        values: Changes = {"batch.micro_batch": fewer}
        if share is not None:
            values["batch.accumulation"] = math.ceil(share / fewer)
        return values, because
    recomputing = _more_checkpointing(plan, failure.blocks)
    if recomputing:
        return recomputing, because
    if _may_quantise(plan):
        return {"model.quantization": "int4"}, because
    return {}, because


def _more_checkpointing(plan: RunPlan, blocks: int | None) -> Changes:
    """Half of the blocks, then all; a count of None means half, or all, of an unknown number."""
    kind, count = plan.kernels.checkpointing, plan.kernels.recomputed_blocks
    if kind == "full":
        return {}
    half = None if blocks is None or blocks < 2 else math.ceil(blocks / 2)
    fewer_than_half = half is not None and count is not None and count < half
    if blocks != 1 and (kind == "none" or fewer_than_half):
        return {"kernels.checkpointing": "selective", "kernels.recomputed_blocks": half}
    return {"kernels.checkpointing": "full", "kernels.recomputed_blocks": blocks}


def _may_quantise(plan: RunPlan) -> bool:
    """Whether the manifest left it open, the base stays as it is, and the GPU has kernels."""
    source = next((d.source for d in plan.decisions if d.path == "model.quantization"), "manifest")
    return (
        source not in REQUESTED
        and plan.model.quantization == "none"
        and plan.model.name != CHAR_GPT
        and plan.adapter.type != "full"
        and plan.adapter.init != "pissa"
        and plan.kernels.device == "cuda"
    )


def _without_kernel(plan: RunPlan, failure: KernelUnavailable) -> tuple[Changes, str]:
    kernel, kernels = failure.kernel, plan.kernels
    values: Changes = {}
    if kernel in ("attention", kernels.attention):
        kernel = kernels.attention
        following = ATTENTION_AFTER.get(kernels.attention)
        values = {"kernels.attention": following} if following else {}
        if plan.data.flat and following and following not in VARLEN_ATTENTION:
            values["data.flat"] = False  # a mask over all places of one long row
    elif kernel in ("fused_optimizer", plan.optim.optimizer):
        kernel = plan.optim.optimizer
        if kernel != PLAIN_OPTIMIZER and "AdamW" in OPTIMIZERS[kernel].update:
            values = {"optim.optimizer": PLAIN_OPTIMIZER}
    elif kernel in ("triton", "fused_blocks") and kernels.fused_blocks:
        # Blocks that are not fused are compiled, unless Triton itself does not work.
        values = {"kernels.fused_blocks": False}
        if kernel == "fused_blocks" and plan.data.packing != "none" and kernels.device == "cuda":
            values["kernels.compile"] = True
    elif kernel in SWITCHES and getattr(kernels, kernel):
        values = {f"kernels.{kernel}": False}
    return values, f"{kernel} cannot run here: {_first_line(failure.reason)}"


def _other_precision(plan: RunPlan, failure: PrecisionUnsupported) -> tuple[Changes, str]:
    """fp16 with loss scaling on a GPU, else fp32, which works everywhere."""
    because = f"{failure.precision} cannot run here: {_first_line(failure.reason)}"
    if failure.precision != plan.kernels.precision or failure.precision == "fp32":
        return {}, because
    if failure.precision == "bf16" and plan.kernels.device == "cuda":
        values: Changes = {"kernels.precision": "fp16", "kernels.loss_scaling": True}
        if plan.kernels.fused_blocks:  # they need adapters in the base's precision
            values["kernels.fused_blocks"] = False
        return values, because
    return {"kernels.precision": "fp32", "kernels.loss_scaling": False}, because


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0].strip()

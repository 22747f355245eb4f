"""Sets torch's process-wide switches from the plan, and lists every switch with its reason."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from expert.manifest.schema.kinds import LOW_RANK, OPTIMIZERS
from expert.model.loss import kernel_for
from expert.planning.run_plan import KernelPlan, RunPlan

ATTENTION = {
    "flash": "flash attention for packed documents",
    "flash4": "FlashAttention 4 for packed documents",
    "flex": "FlexAttention with a document mask",
    "sdpa": "SDPA attention",
    "eager": "eager attention",
}
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
ONLY_ON_A_GPU = {
    "TF32 matmuls": "TF32",
    **{name: name for name in ("fused blocks", "compile", "CUDA graphs", "cuDNN autotuning")},
    "expandable memory segments": "",
    "pinned buffers, asynchronous copies": "",
}
"""Switches that a CPU does not have, and what they are called in one line."""
PRECISION = {
    "bf16": "bfloat16",
    "fp16": "float16 with loss scaling",
    "fp32": "float32",
}


@dataclass(frozen=True, kw_only=True)
class Switch:
    name: str
    on: bool
    because: str = ""

    def __str__(self) -> str:
        mark = "✓" if self.on else "–"
        return f"{mark} {self.name}" + (f": {self.because}" if self.because else "")


def set_switches(kernels: KernelPlan) -> None:
    torch.set_float32_matmul_precision("high" if kernels.tf32 else "highest")
    torch.backends.cudnn.benchmark = kernels.cudnn_benchmark
    if kernels.deterministic:
        # cuBLAS reads this when it starts, at the first matrix product on the GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(kernels.deterministic)
    if not fixed_segments(kernels.device):
        # The name in torch.cuda is deprecated since 2.11, and the only one before.
        settle = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        settle = settle or torch.cuda.memory._set_allocator_settings
        settle("expandable_segments:True")


def fixed_segments(device: str, environ: Mapping[str, str] = os.environ) -> str:
    """Why the allocator cannot use expandable segments; empty if it can.

    Fixed segments fragment: LoRA runs with activation checkpointing reserved 4-27 % more than they
    used on an H200, 2-6 % with expandable segments; small cards run out of memory from that.
    """
    if device != "cuda":
        return "no GPU"
    if sys.platform == "win32":
        return "not on Windows"
    variable = next((name for name in ALLOCATOR_VARIABLES if environ.get(name)), None)
    return f"{variable} is set" if variable else ""


def list_switches(plan: RunPlan, device: torch.device) -> list[Switch]:
    """Every switch; on a CPU, those for GPUs that are off are one."""
    switches = _all_switches(plan, device)
    if device.type == "cuda":
        return switches
    unused = [each.name for each in switches if each.name in ONLY_ON_A_GPU and not each.on]
    kept = [each for each in switches if each.name not in unused]
    names = ", ".join(filter(None, map(ONLY_ON_A_GPU.get, unused)))
    return [*kept, Switch(name="not used on a CPU", on=False, because=names)]


def _all_switches(plan: RunPlan, device: torch.device) -> list[Switch]:
    kernels = plan.kernels
    why = {decision.path: decision.because for decision in plan.decisions}

    def kernel(title: str, name: str) -> Switch:
        return _switch(title, getattr(kernels, name), why.get(f"kernels.{name}", ""))

    loss = f"fused loss ({kernel_for(device)} kernel)" if kernels.fused_loss else "fused loss"
    lines = [
        Switch(name=f"{PRECISION[kernels.precision]} arithmetic", on=True),
        kernel("TF32 matmuls", "tf32"),
        Switch(name=ATTENTION[kernels.attention], on=kernels.attention != "eager"),
        kernel(loss, "fused_loss"),
        *([kernel("fused blocks", "fused_blocks")] if plan.adapter.type in LOW_RANK else []),
        kernel("compile", "compile"),
        kernel("CUDA graphs", "cuda_graphs"),
        Switch(name=OPTIMIZERS[plan.optim.optimizer].title, on=True),
        *_recomputation(plan, why.get("kernels.checkpointing", "")),
        kernel("cuDNN autotuning", "cudnn_benchmark"),
        *([Switch(name="deterministic kernels", on=True)] if kernels.deterministic else []),
        _switch("expandable memory segments", not (fixed := fixed_segments(device.type)), fixed),
        _switch(
            "pinned buffers, asynchronous copies",
            plan.loader.pin_memory and device.type == "cuda",
            "" if device.type == "cuda" else "no GPU",
        ),
        _switch("packing", plan.data.packing != "none", why.get("data.packing", "")),
        *([] if plan.optim.max_grad_norm else [Switch(name="gradient clipping", on=False)]),
    ]
    kinds = {"int4": "NF4 with double quantisation", "int8": "int8", "fp8": "FP8"}
    if plan.model.quantization in kinds:
        kind = kinds[plan.model.quantization]
        lines.insert(1, Switch(name=f"base weights in {kind}", on=True))
    return lines


def _switch(name: str, on: bool, because: str) -> Switch:
    """A switch, with its reason if it is off."""
    return Switch(name=name, on=on, because="" if on else because)


def _recomputation(plan: RunPlan, because: str) -> list[Switch]:
    kind, count = plan.kernels.checkpointing, plan.kernels.recomputed_blocks
    if kind == "none":
        return []
    blocks = "all blocks" if kind == "full" or count is None else f"{count} blocks"
    return [Switch(name=f"{blocks} with activation checkpointing", on=False, because=because)]

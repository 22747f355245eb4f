"""The settings of `expert benchmark`: from a common baseline to everything a plan can do.

A setting is a few keys of training.config. It changes one thing on top of the settings kept so far.
To benchmark another kernel, add an entry to `SETTINGS`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from expert.planning.run_plan import RunPlan

# Micro-batch size if the manifest sets none: the default of transformers' Trainer.
DEFAULT_MICRO_BATCH = 8
# Relative tolerance for the loss against that of the previous setting. float32 in another order:
# sums differ in the last bits, 1.2e-7 each, and grow step by step; 6e-8 was seen after 14 steps of
# the built-in model on a CPU. A high rate amplifies this, hence the margin; other rows or a wrong
# mask show in percent. 16 bits: one rounding of bfloat16 is 2**-8, 0.4 %.
TOLERANCE_FP32 = 0.001
TOLERANCE_16_BITS = 0.01


@dataclass(frozen=True)
class Setting:
    """One change to the settings before it."""

    name: str
    adds: str
    """The change, in words."""
    values: Mapping[str, Any]
    """Keys of training.config."""
    about: tuple[str, ...] = ()
    """Plan values it should change; if none changes, the first gives the reason."""


def baseline(*, on_gpu: bool, micro_batch: int, tokenize: str = "late") -> Setting:
    """What most people start with."""
    return Setting(
        BASELINE,
        "rows tokenised on the fly, eager kernels, all activations checkpointed",
        {
            "tokenize": tokenize,
            "packing": False,
            "group_by_length": False,
            "dataloader_num_workers": 0,
            "dataloader_persistent_workers": False,
            "dataloader_prefetch_factor": 1,
            "dataloader_pin_memory": False,
            "bf16": False,
            "fp16": on_gpu,
            "use_tf32": False,
            "cudnn_benchmark": False,
            "attention": "eager",
            "optim": "adamw_torch",
            "fused_loss": False,
            "fused_blocks": False,
            "torch_compile": False,
            "use_cuda_graphs": False,
            "micro_batch_size": micro_batch,
            "gradient_checkpointing": "full",
        },
    )


BASELINE, PRE_TOKENISED, PACKING, COMPILE = "baseline", "pre-tokenised", "packing", "compile"
_LOADER = ("num_workers", "persistent_workers", "prefetch_factor", "pin_memory")
_PRECISION = ("bf16", "fp16", "use_tf32", "cudnn_benchmark")
SETTINGS: tuple[Setting, ...] = (
    Setting(
        PRE_TOKENISED,
        "tokens prepared once and memory-mapped",
        {"tokenize": "ahead"},
        ("data.tokenize",),
    ),
    Setting(
        "loader",
        "batches prepared ahead, in pinned memory if there is a GPU",
        {f"dataloader_{key}": "auto" for key in _LOADER},
        ("loader.workers", "loader.pin_memory", "loader.prefetch"),
    ),
    Setting(
        PACKING,
        "several rows to a sequence, no padding, copies on a separate stream",
        # Packing needs the lengths in advance.
        {"packing": True, "group_by_length": "auto", "tokenize": "ahead"},
        ("data.packing",),
    ),
    Setting(
        "bf16 + TF32",
        "bfloat16 arithmetic without loss scaling, TF32 for what is left",
        dict.fromkeys(_PRECISION, "auto"),
        ("kernels.precision", "kernels.tf32"),
    ),
    Setting(
        "attention",
        "the plan's attention kernel",
        {"attention": "auto"},
        ("kernels.attention",),
    ),
    Setting(
        "fused AdamW",
        "one kernel for the optimizer step of all weights",
        {"optim": "auto"},
        ("optim.optimizer",),
    ),
    Setting(
        "fused loss",
        "cross-entropy in chunks, the whole logits are never stored",
        {"fused_loss": "auto"},
        ("kernels.fused_loss",),
    ),
    Setting(COMPILE, "each block compiled", {"torch_compile": True}, ("kernels.compile",)),
    Setting(
        "fused blocks",
        "fused kernels instead of compiled blocks with LoRA",
        {"fused_blocks": "auto", "torch_compile": "auto"},
        ("kernels.fused_blocks",),
    ),
    Setting(
        "batch size",
        "the largest micro-batch size that fits",
        {"micro_batch_size": "auto"},
        ("batch.micro_batch",),
    ),
    Setting(
        "no checkpointing",
        "as few checkpointed blocks as fit",
        {"gradient_checkpointing": "auto"},
        ("kernels.checkpointing", "kernels.recomputed_blocks"),
    ),
    Setting(
        "CUDA graphs",
        "forward, backward and optimizer step captured, each replayed with one launch",
        {"use_cuda_graphs": "auto"},
        ("kernels.cuda_graphs",),
    ),
)

# Plan values that affect the speed of a step.
_DECIDES = (
    *("model.quantization", "optim.optimizer", "batch.micro_batch"),
    *("data.packing", "data.group_by_length", "data.tokenize"),
    *("loader.workers", "loader.prefetch", "loader.persistent_workers", "loader.pin_memory"),
    *("kernels.device", "kernels.precision", "kernels.loss_scaling", "kernels.tf32"),
    *("kernels.attention", "kernels.fused_loss", "kernels.compile", "kernels.compile_mode"),
    *("kernels.cuda_graphs", "kernels.fused_blocks"),
    *("kernels.checkpointing", "kernels.recomputed_blocks", "kernels.cudnn_benchmark"),
)
# These alone are not worth a measurement.
_BESIDE = ("loader.prefetch", "loader.persistent_workers", "kernels.loss_scaling")


def as_overrides(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of training.config in the syntax of `--set`."""
    return tuple(f"training.config.{key}={json.dumps(value)}" for key, value in values.items())


def changes(before: RunPlan, after: RunPlan) -> dict[str, tuple[Any, Any]]:
    """The differences to another plan, by path: the value before and after."""
    pairs = {path: (attrgetter(path)(before), attrgetter(path)(after)) for path in _DECIDES}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}


def why_unchanged(setting: Setting, before: RunPlan, after: RunPlan) -> str:
    """Why a setting would not change this plan, or ""."""
    if any(path not in _BESIDE for path in changes(before, after)):
        return ""
    path = setting.about[0]
    because = next(decision.because for decision in after.decisions if decision.path == path)
    return f"{path} is {json.dumps(attrgetter(path)(after))} already: {because}"


def tolerance(before: RunPlan, after: RunPlan) -> float | None:
    """How far two losses may differ; None if the weights differ although both settings compute
    correctly, so that the losses are only shown: with packing other rows share a step, and other
    kernels draw other numbers for dropout."""
    if "data.packing" in changes(before, after):
        return None
    if after.adapter.dropout or (after.model.architecture or {}).get("dropout"):
        return None
    exact = {before.kernels.precision, after.kernels.precision} == {"fp32"}
    return TOLERANCE_FP32 if exact and not after.kernels.tf32 else TOLERANCE_16_BITS

"""The settings of `expert benchmark`: from a common baseline to everything a plan can do.

A setting is a few keys of training.config. It changes one thing on top of the settings kept so far.
To benchmark another kernel, add an entry to `SETTINGS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from expert.planning.run_plan import RunPlan

# Micro-batch size if the manifest sets none: the default of transformers' Trainer.
DEFAULT_MICRO_BATCH = 8
# Relative tolerance for the held-out loss against that of the previous setting.
# float32 in another order: sums differ in the last bits, 1.2e-7 each, and grow step by step;
# 6e-8 was seen after 14 steps of the built-in model on a CPU (eager or SDPA, plain or fused loss,
# rate 2e-4). A high rate amplifies this, hence the margin; other rows or a wrong mask show in
# percent. 16 bits: one rounding of bfloat16 is 2**-8, 0.4 %.
TOLERANCE_FP32 = 0.001
TOLERANCE_16_BITS = 0.01
# From this factor on a setting counts as using more memory: less is the error of the estimate (the
# worst of 96 peaks was off by 5.1 %). Below half of the budget memory is plentiful.
MORE_MEMORY = 1.1
PLENTY = 0.5


@dataclass(frozen=True, kw_only=True)
class SettingContext:
    """What the settings depend on: device, model and rows."""

    on_gpu: bool
    characters: bool
    """The built-in character model, whose corpus is cut into blocks."""
    rows_at_once: int
    """Micro-batch size in rows."""
    rows_per_sequence: float
    """Mean rows in a packed sequence."""
    sequences_per_update: int
    """Packed sequences per step."""
    packed: bool
    """Whether the settings so far pack the rows."""
    not_late: str = ""
    """Why rows cannot be tokenised on the fly, or ""."""


@dataclass(frozen=True)
class Setting:
    """One change to the settings before it."""

    name: str
    adds: str
    """The change, in words."""
    settings: Mapping[str, Any]
    """Keys of training.config; values may be functions of the ground."""
    about: tuple[str, ...]
    """Plan values it should change; if none changes, the first gives the reason."""
    needs: Callable[[SettingContext], str] = lambda ground: ""
    """Why it cannot be tried on this ground, or ""."""

    def values(self, ground: SettingContext) -> dict[str, Any]:
        """Its keys and values on this ground."""
        return {
            key: value(ground) if callable(value) else value for key, value in self.settings.items()
        }


def _compiles(ground: SettingContext) -> str:
    if not ground.on_gpu:
        return "compiling is not worth it on a CPU"
    if not (ground.packed or ground.characters):
        return "widths of padded rows vary: each would be compiled again"
    return ""


def _packed_micro_batch(ground: SettingContext) -> int:
    """As many packed sequences as hold the rows of the earlier micro-batch."""
    sequences = round(ground.rows_at_once / ground.rows_per_sequence)
    return max(1, min(ground.sequences_per_update, sequences))


BASELINE = Setting(
    name="baseline",
    adds="rows tokenised on the fly, eager kernels, all activations checkpointed",
    settings={
        "tokenize": lambda ground: "ahead" if ground.not_late else "late",
        "packing": False,
        "group_by_length": False,
        "dataloader_num_workers": 0,
        "dataloader_persistent_workers": False,
        "dataloader_prefetch_factor": 1,
        "dataloader_pin_memory": False,
        "bf16": False,
        "fp16": lambda ground: ground.on_gpu,
        "use_tf32": False,
        "cudnn_benchmark": False,
        "attention": "eager",
        "optim": "adamw_torch",
        "fused_loss": False,
        "fused_blocks": False,
        "torch_compile": False,
        "use_cuda_graphs": False,
        "micro_batch_size": lambda ground: ground.rows_at_once,
        "gradient_checkpointing": "full",
    },
    about=(),
)
_LOADER = ("num_workers", "persistent_workers", "prefetch_factor", "pin_memory")
_PRECISION = ("bf16", "fp16", "use_tf32", "cudnn_benchmark")
_PACKING = {"packing": True, "group_by_length": "auto", "micro_batch_size": _packed_micro_batch}
SETTINGS: tuple[Setting, ...] = (
    Setting(
        "pre-tokenised",
        "tokens prepared once and memory-mapped",
        {"tokenize": "ahead"},
        ("data.tokenize",),
        needs=lambda ground: ground.not_late,
    ),
    Setting(
        "loader",
        "batches prepared ahead, in pinned memory if there is a GPU",
        {f"dataloader_{key}": "auto" for key in _LOADER},
        ("loader.workers", "loader.pin_memory", "loader.prefetch"),
    ),
    Setting(
        "packing",
        "several rows to a sequence, no padding, copies on a separate stream",
        {**_PACKING, "tokenize": "ahead"},  # packing needs the lengths in advance
        ("data.packing",),
        needs=lambda ground: "a corpus of characters is cut into blocks" * ground.characters,
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
    Setting(
        "compile",
        "each block compiled",
        {"torch_compile": True},
        ("kernels.compile",),
        needs=_compiles,
    ),
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

THE_REST = "the rest"


def together(
    chosen: Sequence[Setting],
    values: Mapping[str, Any],
    ground_of: Callable[[Mapping[str, Any]], SettingContext],
) -> Setting:
    """Several settings as one, on top of those kept."""
    settings: dict[str, Any] = {}
    names = []
    for setting in chosen:
        ground = ground_of({**values, **settings})
        if not setting.needs(ground):
            settings |= setting.values(ground)
            names.append(setting.name)
    return Setting(name=THE_REST, adds=f"{', '.join(names)}, together", settings=settings, about=())


# Plan values that affect the speed of a step.
_DECIDES = (
    *("model.quantization", "optim.optimizer", "batch.micro_batch"),
    *("data.packing", "data.group_by_length", "data.tokenize"),
    *("loader.workers", "loader.prefetch", "loader.persistent_workers", "loader.pin_memory"),
    *("kernels.device", "kernels.precision", "kernels.loss_scaling", "kernels.tf32"),
    *("kernels.attention", "kernels.fused_loss", "kernels.compile", "kernels.compile_mode"),
    "kernels.cuda_graphs",
    "kernels.fused_blocks",
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


def tolerance(before: RunPlan, after: RunPlan) -> tuple[float | None, str]:
    """How far two losses may differ, and why; None if the weights differ although both settings
    compute correctly, so that the losses are only shown: after ten steps of expert-json with other
    seeds the loss was between 0.35 and 0.61."""
    if "data.packing" in changes(before, after):
        return None, "other rows share a step"
    if after.adapter.dropout or (after.model.architecture or {}).get("dropout"):
        return (
            None,
            "dropout draws other numbers",
        )  # as other kernels call the generator differently
    if {before.kernels.precision, after.kernels.precision} == {"fp32"} and not after.kernels.tf32:
        return TOLERANCE_FP32, "the same rows in float32"
    return TOLERANCE_16_BITS, "the same rows in 16 bits"


def cost_of(before: RunPlan, after: RunPlan) -> str:
    """What a setting costs besides time, as `needs …` or `computes …`; "" if nothing.

    A setting that is no faster is kept only if it costs nothing.
    """
    bits = {"fp32": 32, "fp16": 16, "bf16": 16}
    if bits[after.kernels.precision] < bits[before.kernels.precision]:
        return f"computes in {after.kernels.precision} instead of {before.kernels.precision}"
    if after.kernels.tf32 and not before.kernels.tf32 and before.kernels.precision == "fp32":
        return "computes in TF32 instead of fp32"
    less, more = before.memory.peak_bytes, after.memory.peak_bytes
    if less and more and more > max(MORE_MEMORY * less, PLENTY * after.memory.budget_bytes):
        return f"needs {more / 2**30:.2f} GiB instead of {less / 2**30:.2f}"
    return ""


def find_setting(name: str) -> Setting | None:
    """The setting with this name, ignoring case and punctuation, or None."""

    def plain(text: str) -> str:
        return "".join(filter(str.isalnum, text.lower()))

    settings = (BASELINE, *SETTINGS)
    return next((entry for entry in settings if plain(entry.name) == plain(name)), None)

"""Optimizers, schedules, quantisations, adapters, engines, prompt templates and trackers: their
names in a manifest and their properties. A test checks that every name has properties."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from expert.manifest.schema.types import NonNegativeFloat, PositiveNumber, StrictSection

# --- optimizers: built in training/optim.py ------------------------------------------------------

Optimizer = Literal["adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit", "sgd"]


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    title: str
    state_bytes: float
    """Bytes of optimizer state per trainable weight."""
    update: str = "AdamW"
    """Its update rule: a run can be resumed with another optimizer of the same rule."""
    not_shardable: str = ""
    """Why its state cannot be sharded like the weights, if so: another one is used there."""
    rate_factor: float = 1.0
    """Default learning rate, over that of AdamW."""
    most_rate: float = 0.1
    """Learning rate from which nearly every run diverges."""


# Two 8-bit moments, and a float32 scale per 256 of each.
_EIGHT_BIT, _EIGHT = 2 + 8 / 256, "8-bit AdamW"
_IN_BLOCKS = "8-bit state is quantised in blocks that cannot be sharded"
OPTIMIZERS = {
    "adamw_torch": OptimizerKind(title="AdamW", state_bytes=8),
    "adamw_torch_fused": OptimizerKind(title="fused AdamW", state_bytes=8),
    "adamw_bnb_8bit": OptimizerKind(
        title="8-bit AdamW", state_bytes=_EIGHT_BIT, update=_EIGHT, not_shardable=_IN_BLOCKS
    ),
    "paged_adamw_8bit": OptimizerKind(
        title="paged 8-bit AdamW", state_bytes=_EIGHT_BIT, update=_EIGHT, not_shardable=_IN_BLOCKS
    ),
    "sgd": OptimizerKind(title="SGD", state_bytes=4, update="SGD", most_rate=math.inf),  # momentum
}

# --- learning-rate schedules: their curves are in training/schedule.py ---------------------------

Scheduler = Literal["linear", "cosine", "constant", "polynomial", "cosine_with_restarts"]


class SchedulerOptions(StrictSection):
    """Options of a learning-rate schedule."""

    num_cycles: PositiveNumber | None = None
    """Cosine waves over the run (cosine, cosine_with_restarts)."""
    power: PositiveNumber | None = None
    """Exponent of the decay (polynomial)."""
    lr_end: NonNegativeFloat | None = None
    """Rate at the end (polynomial)."""
    min_lr: NonNegativeFloat | None = None
    """Lowest rate (cosine)."""


@dataclass(frozen=True, kw_only=True)
class ScheduleKind:
    options: tuple[str, ...] = ()
    needs_end: bool = True
    """Whether the number of steps must be known."""


SCHEDULES = {
    "linear": ScheduleKind(),
    "cosine": ScheduleKind(options=("num_cycles", "min_lr")),
    "cosine_with_restarts": ScheduleKind(options=("num_cycles", "min_lr")),
    "polynomial": ScheduleKind(options=("power", "lr_end")),
    "constant": ScheduleKind(needs_end=False),
}

# --- quantisations of the base: applied in model/quantised.py, counted in planning/memory/memory.py

Quantization = Literal["int4", "int8", "fp8", "fp16", "bf16", "none"]
QUANTISED = ("int4", "int8", "fp8")
"""Those that store frozen weights in fewer than 16 bits."""

# --- adapters: built in model/adapters.py --------------------------------------------------------

AdapterName = Literal["lora", "dora", "ia3", "lokr", "adalora"]
AdapterType = Literal[AdapterName, "full", "none"]
ReleasedAdapter = Literal[AdapterName, "lora-fa"]


@dataclass(frozen=True, kw_only=True)
class AdapterKind:
    """Properties of an adapter; the defaults are LoRA's."""

    weights: Callable[[int, int, int], int]
    """Trainable weights of a layer, by rank, inputs and outputs."""
    rate: float = 2e-4
    """Default learning rate."""
    options: tuple[str, ...] = ("rank", "alpha", "dropout")
    """Keys of training.config that it uses, besides target_modules."""
    quantised: bool = True
    """Works on a quantised base."""
    transposed: bool = True
    """Works on weights stored as [in, out], such as GPT-2's."""
    in_float32: bool = False
    """Trained in float32, whatever the precision of the base."""
    not_captured: str = ""
    """Why its passes cannot be captured as CUDA graphs; empty: they can."""


def _pair(rank: int, inputs: int, outputs: int) -> int:
    return rank * (inputs + outputs)


def _pair_with_singular_values(rank: int, inputs: int, outputs: int) -> int:
    """AdaLoRA starts with 1.5 times the rank and prunes the least useful ranks during the run."""
    first = rank + (rank + 1) // 2
    return _pair(first, inputs, outputs) + first


def _kronecker_factors(rank: int, inputs: int, outputs: int) -> int:
    """Two factors near the square root of the layer's size, one of low rank."""
    left_in, left_out = _divisor(inputs), _divisor(outputs)
    right_in, right_out = inputs // left_in, outputs // left_out
    return left_in * left_out + min(right_in * right_out, rank * (right_in + right_out))


def _divisor(width: int) -> int:
    """The divisor of `width` nearest below its square root."""
    return next(d for d in range(math.isqrt(width), 0, -1) if width % d == 0)


ADAPTERS = {
    "lora": AdapterKind(weights=_pair),
    "dora": AdapterKind(weights=lambda *sizes: _pair(*sizes) + sizes[-1]),  # magnitudes
    "ia3": AdapterKind(
        weights=lambda rank, inputs, outputs: outputs,
        rate=5e-3,
        options=("feedforward_modules",),
    ),
    "lokr": AdapterKind(weights=_kronecker_factors, quantised=False, transposed=False),
    "adalora": AdapterKind(
        weights=_pair_with_singular_values,
        in_float32=True,  # its pruning reads the trained weights and gradients themselves
        not_captured="AdaLoRA's penalty depends on the targets of each batch",
    ),
}

IN_FLOAT32 = tuple(name for name, kind in ADAPTERS.items() if kind.in_float32)
LOW_RANK = ("lora", "dora")
"""Those with layers of our own, which can be fused, and with all of LoRA's keys."""


def takes(adapter: str, option: str) -> bool:
    """Whether an adapter uses an option; full and none are not adapters and use none."""
    return adapter in ADAPTERS and option in ADAPTERS[adapter].options


# --- methods: their losses are in training/objectives/, chosen in planning/choose/recipe.py -------

Method = Literal["sft", "dpo", "ipo", "apo_zero", "simpo", "orpo", "cpo", "kto", "grpo"]
ON_POLICY = "grpo"
"""The method that learns from answers which the weights in training give: a round of `expert
improve`."""
ON_POLICY_RATE = 3e-6
"""Its default learning rate for all weights; ten times as much for an adapter."""
PreferenceLoss = Literal[
    "sigmoid", "robust", "hinge", "ipo", "apo_zero", "apo_down", "simpo", "orpo", "cpo", "kto"
]


@dataclass(frozen=True, kw_only=True)
class PreferenceKind:
    """Properties of a method that trains on preferences; the defaults are DPO's."""

    loss: PreferenceLoss
    rows: str = "pairs"
    """Default of `preference_rows`."""
    beta: float = 0.1
    sft_weight: float = 0.0
    full_rate: float = 5e-7
    """Default learning rate for all weights; ten times as much for an adapter."""


PREFERENCES: dict[str, PreferenceKind] = {
    "dpo": PreferenceKind(loss="sigmoid"),
    "ipo": PreferenceKind(loss="ipo"),
    "apo_zero": PreferenceKind(loss="apo_zero"),
    "simpo": PreferenceKind(loss="simpo", beta=2.0),
    "orpo": PreferenceKind(loss="orpo", sft_weight=1.0, full_rate=5e-6),
    "cpo": PreferenceKind(loss="cpo", sft_weight=1.0),
    "kto": PreferenceKind(loss="kto", rows="judged"),
}
"""Methods that train on preferred and rejected answers: in pairs, and kto also one by one."""
WITHOUT_REFERENCE = ("simpo", "orpo", "cpo")
"""Losses that do not compare with the weights that training starts from."""
DPO_LOSSES = ("sigmoid", "robust", "hinge", "ipo", "apo_zero", "apo_down")
"""Values of `loss_type` with method dpo."""
OF_LOSSES = {
    "label_smoothing": ("sigmoid", "robust"),
    "simpo_gamma": ("simpo",),
    **dict.fromkeys(("desirable_weight", "undesirable_weight"), ("kto",)),
}
"""Keys of training.config that only some losses have."""

# --- engines: in parallel/, built in run/build.py, chosen in planning/choose/parallel.py ---------

Engine = Literal["single", "replicated", "sharded"]
SPLITS_WEIGHTS = frozenset({"sharded"})
"""Engines whose ranks each hold a part of the weights and gather them for every pass."""

# --- prompt templates: their layouts are in data/template/templates.py ---------------------------

PromptTemplate = Literal[
    "tokenizer", "alpaca", "chatml", "llama", "mistral", "phi", "deepseek", "gemma"
]


def is_jinja(template: str | None) -> bool:
    """Whether a prompt template is the text of a chat template, not a name."""
    return bool(template) and ("{{" in str(template) or "{%" in str(template))


# --- trackers: opened in telemetry/trackers.py ---------------------------------------------------

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]

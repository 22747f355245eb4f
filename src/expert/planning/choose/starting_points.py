"""Starting settings for a base model by its size, and detection of settings made for `tiny`."""

from __future__ import annotations

from dataclasses import dataclass

from expert.manifest.schema.config import TrainingConfig
from expert.manifest.schema.kinds import ADAPTERS, takes
from expert.manifest.schema.manifest import BaseModelSpec
from expert.planning.choose.recipe import DEFAULT_RANK
from expert.planning.models.resolve import TINY
from expert.planning.models.shapes import ModelShape

SMALL_PARAMETERS = 1_000_000_000
SMALL_RATE = 5e-4
"""The learning rate of this repository's experts on SmolLM2-135M."""
LIKE_TINY_PARAMETERS = 30_000_000
"""`tiny` has 4 million parameters; models up to this size also need large learning steps."""
USUAL_SCALE, LARGEST_SCALE = 2.0, 8.0
"""alpha / r: 2 is usual, 4 occurs; `tiny` uses 16."""


@dataclass(frozen=True)
class StartingPoint:
    """What a new manifest sets for its base model."""

    rank: int
    alpha: int
    learning_rate: float
    because: str


def starting_point(name: str, shape: ModelShape | None) -> StartingPoint:
    """Rank, alpha and learning rate for LoRA on a base model."""
    if name == TINY:
        # With 360 rows of dates it answers all held-out rows at this scale; alpha 64 does not train
        # it far enough in as many steps.
        toy = "4 million parameters, to try things out; choose a real one with --model"
        return StartingPoint(32, 512, SMALL_RATE, f"{toy} Qwen/Qwen3-0.6B")
    twice, rate = int(USUAL_SCALE * DEFAULT_RANK), ADAPTERS["lora"].rate
    usual = f"rank {DEFAULT_RANK} and alpha {twice}, usual for LoRA"
    if shape is None:
        unknown = f"{usual}; not a model known by name, so check its spelling"
        return StartingPoint(DEFAULT_RANK, twice, rate, unknown)
    size = f"{usual} on {shape.parameters / 1e9:.2g} billion parameters"
    rate = SMALL_RATE if shape.parameters < SMALL_PARAMETERS else rate
    return StartingPoint(DEFAULT_RANK, twice, rate, size)


def tiny_alpha_warning(
    spec: BaseModelSpec, config: TrainingConfig, shape: ModelShape | None
) -> str:
    """Whether the scale of the adapter suits `tiny` but not this base, with a fix; "" if not."""
    is_small = shape is not None and shape.parameters <= LIKE_TINY_PARAMETERS
    if spec.name == TINY or is_small or not takes(config.adapter_type, "alpha"):
        return ""
    released = spec.adapters[0] if spec.adapters else None
    rank = config.rank if config.rank != "auto" else (released.r if released else None)
    rank = rank or DEFAULT_RANK
    alpha = config.alpha if config.alpha != "auto" else (released.alpha if released else None)
    if alpha is None or alpha / rank < LARGEST_SCALE:
        return ""
    return (
        f"alpha {alpha:g} with rank {rank} scales the adapter by {alpha / rank:g}, which suits "
        f"the built-in tiny; on {spec.name} training is likely to diverge  (--set "
        f"alpha={round(USUAL_SCALE * rank)}, twice the rank)"
    )

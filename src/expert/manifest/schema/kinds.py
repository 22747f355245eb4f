"""Optimizers, schedules and adapters by name: one row each, with all that other files ask of them.

The names that a manifest may use are the Literals of config.py; a test holds both together.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """An optimizer as people call it, and what it keeps for every trained weight."""

    title: str
    state_bytes: float


@dataclass(frozen=True, kw_only=True)
class ScheduleKind:
    """The options a schedule takes, and whether it can be followed without a known last step."""

    options: tuple[str, ...] = ()
    needs_end: bool = True


@dataclass(frozen=True, kw_only=True)
class AdapterKind:
    """Whether an adapter has a rank (and so an alpha)."""

    rank: bool = True


# Two 8-bit moments, and a float32 scale per 256 of each.
_EIGHT_BIT = 2 + 8 / 256
OPTIMIZERS = {
    "adamw_torch": OptimizerKind(title="AdamW", state_bytes=8),
    "adamw_torch_fused": OptimizerKind(title="fused AdamW", state_bytes=8),
    "adamw_bnb_8bit": OptimizerKind(title="8-bit AdamW", state_bytes=_EIGHT_BIT),
    "paged_adamw_8bit": OptimizerKind(title="paged 8-bit AdamW", state_bytes=_EIGHT_BIT),
    "sgd": OptimizerKind(title="SGD", state_bytes=4),  # momentum
}
SCHEDULES = {
    "linear": ScheduleKind(),
    "cosine": ScheduleKind(options=("num_cycles", "min_lr")),
    "cosine_with_restarts": ScheduleKind(options=("num_cycles", "min_lr")),
    "polynomial": ScheduleKind(options=("power", "lr_end")),
    "constant": ScheduleKind(needs_end=False),
}
ADAPTERS = {
    "lora": AdapterKind(),
    "dora": AdapterKind(),
    "lokr": AdapterKind(),
    "adalora": AdapterKind(),
    "ia3": AdapterKind(rank=False),
}
WITH_RANK = tuple(name for name, kind in ADAPTERS.items() if kind.rank)

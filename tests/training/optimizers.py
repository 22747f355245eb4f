"""Parameters of every kind, and optimizers that step on them."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from expert.training.optim import build_optimizer, clip, step_if_finite
from tests.training.toys import CPU, optim_plan

SHAPES = {
    # 8-bit states begin at 4096 weights; below, bitsandbytes keeps float32.
    "blocks.0.q_proj.lora_A.default.weight": (8, 640),
    "blocks.0.q_proj.lora_B.default.weight": (48, 96),
    "blocks.0.up.weight": (16, 16),
    "blocks.0.norm.weight": (16,),
    "blocks.0.up.bias": (16,),
    "embed_tokens.weight": (32, 16),
}


def parameters() -> list[tuple[str, Parameter]]:
    draw = torch.Generator().manual_seed(0)
    return [(name, Parameter(torch.randn(shape, generator=draw))) for name, shape in SHAPES.items()]


def give_gradients(named: list[tuple[str, Parameter]], seed: int) -> None:
    draw = torch.Generator().manual_seed(1000 + seed)
    for _, parameter in named:
        parameter.grad = torch.randn(parameter.shape, generator=draw)


def made(kind: str, named: list[tuple[str, Parameter]], **changes):
    values = {"optimizer": kind, "weight_decay": 0.1, "learning_rate": 1e-2, **changes}
    return build_optimizer(named, optim_plan(**values), device=CPU)


def train(optimizer, named, seeds) -> None:
    for seed in seeds:
        give_gradients(named, seed)
        step_if_finite(optimizer, clip([p for _, p in named], 1.0))


def bits(tensors) -> dict[str, bytes]:
    """Every tensor as its bytes: equal means equal to the last bit, NaN included."""
    return {name: t.detach().contiguous().numpy().tobytes() for name, t in dict(tensors).items()}

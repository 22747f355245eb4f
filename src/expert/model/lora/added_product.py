"""x W + s low B^T, rounded once: the product is accumulated onto the low-rank part in float32.

`low`: x times the adapter's first factor; `second`: its second factor; W: the frozen base weight
[in, out]. Once as an autograd function, which has little host overhead, and once as an operator
that torch.compile does not trace into.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def computed_in(tensor: Tensor) -> torch.dtype:
    """The dtype under autocast, which does not cast in-place operations."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def start(low: Tensor, second: Tensor) -> Tensor:
    """The low-rank part, whose memory the sum reuses."""
    return low @ second.t()


def gradients_of_low(
    gradient: Tensor, low: Tensor, second: Tensor, factor: float, needed: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Of `low` and `second`; these get the factor because they are the smallest tensors."""
    return (
        (gradient @ second).mul_(factor) if needed[0] else None,
        (gradient.t() @ low).mul_(factor) if needed[1] else None,
    )


class AddedProduct(torch.autograd.Function):
    """For eager mode."""

    @staticmethod
    def forward(
        ctx: Any, low: Tensor, second: Tensor, x: Tensor, weight: Tensor, factor: float
    ) -> Tensor:
        ctx.save_for_backward(low, second, weight)
        ctx.factor = factor
        return start(low, second).addmm_(x, weight, beta=factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        low, second, weight = ctx.saved_tensors
        of_low = gradients_of_low(gradient, low, second, ctx.factor, ctx.needs_input_grad)
        of_x = gradient @ weight.t() if ctx.needs_input_grad[2] else None
        return *of_low, of_x, None, None


@torch.library.custom_op("expert::added_product", mutates_args=())
def added_product(low: Tensor, second: Tensor, x: Tensor, weight: Tensor, factor: float) -> Tensor:
    """For compiled code."""
    return start(low, second).addmm_(x, weight, beta=factor)


@added_product.register_fake
def _(low: Tensor, second: Tensor, x: Tensor, weight: Tensor, factor: float) -> Tensor:
    return low.new_empty(low.shape[0], second.shape[0])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    low, second, _, weight, ctx.factor = inputs
    ctx.save_for_backward(low, second, weight)


added_product.register_autograd(AddedProduct.backward, setup_context=_keep)

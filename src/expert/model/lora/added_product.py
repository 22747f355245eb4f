"""x W + s low B^T, rounded once: the low part is where the product is added to, in float32.

`low` is what the first factor of an adapter makes of x, `second` its second factor, W the weight
[in, out] of the base, which does not learn. Once as a function of autograd, which costs the host
little, and once as an operator that compilers do not look into.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def start(low: Tensor, second: Tensor) -> Tensor:
    """What is added to the product; its memory becomes that of the sum."""
    return low @ second.t()


def gradients_of_low(
    gradient: Tensor, low: Tensor, second: Tensor, factor: float, needed: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Those of `low` and `second`; the factor goes to them, as they are smaller."""
    return (
        (gradient @ second).mul_(factor) if needed[0] else None,
        (gradient.t() @ low).mul_(factor) if needed[1] else None,
    )


class AddedProduct(torch.autograd.Function):
    """For what is run as it is."""

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
    """For what is compiled."""
    return start(low, second).addmm_(x, weight, beta=factor)


@added_product.register_fake
def _(low: Tensor, second: Tensor, x: Tensor, weight: Tensor, factor: float) -> Tensor:
    return low.new_empty(low.shape[0], second.shape[0])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    low, second, _, weight, ctx.factor = inputs
    ctx.save_for_backward(low, second, weight)


added_product.register_autograd(AddedProduct.backward, setup_context=_keep)

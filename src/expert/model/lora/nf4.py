"""Products with NF4 weights that add the adapter before rounding.

Custom operators, opaque to torch.compile: otherwise it would save every dequantised weight from the
forward for the backward.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from expert.model.lora.added_product import gradients_of_low, start

AS_FLOATS = torch.float32
"""The dtype under which packed weights are sharded: FSDP2 of torch 2.11 refuses integers, and only
copies what it gathers. Not a 16-bit one: CUDA copies lists of those through float32, which turns
every NaN into the same one. int8 weights viewed as bfloat16 changed the loss by 1 % on an H200.
Copies of float32 keep all bits."""


@torch.library.custom_op("expert::nf4_added", mutates_args=())
def nf4_added(
    low: Tensor,
    second: Tensor,
    x: Tensor,
    packed: Tensor,
    scales: list[Tensor],
    sizes: list[int],
    factor: float,
) -> Tensor:
    """x @ W.T + factor * low @ second.T, rounded once; W exists only during the product.

    `scales` and `sizes`: from `parts_of`.
    """
    weight = _weight(packed, scales, sizes, x.dtype)
    return start(low, second).addmm_(x, weight.t(), beta=factor)


@torch.library.custom_op("expert::nf4_input", mutates_args=())
def _gradient_of_input(
    gradient: Tensor, packed: Tensor, scales: list[Tensor], sizes: list[int]
) -> Tensor:
    return gradient @ _weight(packed, scales, sizes, gradient.dtype)


@nf4_added.register_fake
def _(
    low: Tensor,
    second: Tensor,
    x: Tensor,
    packed: Tensor,
    scales: list[Tensor],
    sizes: list[int],
    factor: float,
) -> Tensor:
    return low.new_empty(low.shape[0], second.shape[0])


@_gradient_of_input.register_fake
def _(gradient: Tensor, packed: Tensor, scales: list[Tensor], sizes: list[int]) -> Tensor:
    return gradient.new_empty(gradient.shape[0], sizes[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    low, second, _, packed, scales, ctx.sizes, ctx.factor = inputs
    ctx.save_for_backward(low, second, packed, *scales)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    low, second, packed, *scales = ctx.saved_tensors
    of_low = gradients_of_low(gradient, low, second, ctx.factor, ctx.needs_input_grad)
    wanted = ctx.needs_input_grad[2]
    of_x = _gradient_of_input(gradient, packed, scales, ctx.sizes) if wanted else None
    return *of_low, of_x, None, [None] * len(scales), None, None


nf4_added.register_autograd(_backward, setup_context=_keep)


def parts_of(layer: Any) -> tuple[Tensor, list[Tensor], list[int]]:
    """The packed codes of a bitsandbytes layer, the (quantised) scales of its blocks, and the sizes
    of both."""
    state = state_of(layer)
    scales = [state.absmax, state.offset, state.state2.absmax, state.state2.code]
    rows, columns = state.shape
    packed = layer.weight.data
    if packed.dtype == AS_FLOATS:
        packed = packed.view(torch.uint8).reshape(-1, 1)
    return packed, scales, [rows, columns, state.blocksize, state.state2.blocksize]


def state_of(layer: Any) -> Any:
    """The layer's quant_state: of its weight, or of the layer if the weight is a plain tensor."""
    return getattr(layer.weight, "quant_state", None) or layer.quant_state


def to_plain_tensors(layer: Any) -> None:
    """Store the packed weight as a plain tensor, which can be sharded; the scales, 3 % of it, are
    not. The forward is replaced, because bitsandbytes requires its own tensor class."""
    state = layer.weight.quant_state
    rows = layer.weight.data.view(layer.out_features, -1)
    layer.weight = torch.nn.Parameter(rows.view(AS_FLOATS), requires_grad=False)
    layer.quant_state = state

    def forward(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(layer.compute_dtype or x.dtype)
        no_adapter = rows.new_empty(len(rows), 0), rows.new_empty(layer.out_features, 0)
        out: Tensor = nf4_added(*no_adapter, rows, *parts_of(layer), 1.0)
        out = out if layer.bias is None else out + layer.bias.to(out.dtype)
        return out.view(*x.shape[:-1], -1).to(x.dtype)

    layer.forward = forward


def is_doubly_quantised(layer: Any) -> bool:
    """Whether a layer is NF4 with quantised scales, the only kind that Expert creates."""
    state = getattr(layer.weight, "quant_state", None)
    return state is not None and state.nested and state.quant_type == "nf4"


def _weight(packed: Tensor, scales: list[Tensor], sizes: list[int], dtype: torch.dtype) -> Tensor:
    """The dequantised weight [out, in]."""
    functional: Any = importlib.import_module("bitsandbytes").functional
    absmax, offset, absmax2, code2 = scales
    rows, columns, blocksize, blocksize2 = sizes
    second = functional.QuantState(
        absmax=absmax2, code=code2, blocksize=blocksize2, dtype=torch.float32
    )
    state = functional.QuantState(
        absmax=absmax,
        shape=torch.Size((rows, columns)),
        blocksize=blocksize,
        quant_type="nf4",
        dtype=dtype,
        offset=offset,
        state2=second,
    )
    weight: Tensor = functional.dequantize_4bit(packed, state)
    return weight

"""Products with NF4 weights to which something is added before they are rounded.

Operators of their own, which the compiler does not look into: it would keep every unpacked weight
from the forward for the backward.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from expert.model.lora.added_product import gradients_of_low, start

AS_FLOATS = torch.float32
"""What packed weights that are spread over ranks call themselves: FSDP2 of torch 2.11 takes no
whole numbers, and what it gathers it only copies. CUDA copies a list of 16-bit floats by way of
float32, which makes every NaN the same one: int8 weights that called themselves bfloat16 lost 1 %
of the loss on an H200. Copies of float32 keep all bits."""


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
    """x @ W.T + factor * low @ second.T, rounded once; W lives only while it is multiplied.

    `scales` and `sizes` are those of `parts_of`.
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
    """What a layer of bitsandbytes keeps of its weight: the packed digits, the scales of its
    blocks, which are quantised themselves, and the sizes of both."""
    state = state_of(layer)
    scales = [state.absmax, state.offset, state.state2.absmax, state.state2.code]
    rows, columns = state.shape
    packed = layer.weight.data
    if packed.dtype == AS_FLOATS:
        packed = packed.view(torch.uint8).reshape(-1, 1)
    return packed, scales, [rows, columns, state.blocksize, state.state2.blocksize]


def state_of(layer: Any) -> Any:
    """What is known of a layer's packed weight: the weight's own, or the layer's where the weight
    is a plain tensor, spread over ranks."""
    return getattr(layer.weight, "quant_state", None) or layer.quant_state


def make_plain(layer: Any) -> None:
    """Keep the packed weight as a plain tensor, which can be spread over ranks; the scales, 3 % of
    it, stay whole. The layer of bitsandbytes wants its own kind of tensor, so it is not asked."""
    state = layer.weight.quant_state
    rows = layer.weight.data.view(layer.out_features, -1)
    layer.weight = torch.nn.Parameter(rows.view(AS_FLOATS), requires_grad=False)
    layer.quant_state = state

    def forward(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(layer.compute_dtype or x.dtype)
        nothing = rows.new_empty(len(rows), 0), rows.new_empty(layer.out_features, 0)
        made: Tensor = nf4_added(*nothing, rows, *parts_of(layer), 1.0)
        made = made if layer.bias is None else made + layer.bias.to(made.dtype)
        return made.view(*x.shape[:-1], -1).to(x.dtype)

    layer.forward = forward


def is_doubly_quantised(layer: Any) -> bool:
    """Whether a layer is NF4 with scales that are quantised, as all are that Expert makes."""
    state = getattr(layer.weight, "quant_state", None)
    return state is not None and state.nested and state.quant_type == "nf4"


def _weight(packed: Tensor, scales: list[Tensor], sizes: list[int], dtype: torch.dtype) -> Tensor:
    """The weight [out, in] in numbers of this dtype."""
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

"""DoRA that computes row norms without building the matrix.

Every forward needs the norm of each row of W + s B A. PEFT builds that matrix: B A through an
identity, a copy of W, their sum and its norm, each as large as W. Here the square is expanded:

    |W_i + s B_i A|^2 = |W_i|^2 + 2 s (W A^T)_i . B_i + s^2 B_i (A A^T) B_i^T

The first term is constant, and the others need only matrices as wide as the rank.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expert.model.lora.nf4 import parts_of, state_of
from expert.model.quantised import Float8Linear, dequantised, int8_parts, weight_only_class

ReadWeight = Callable[[Any, torch.dtype], Tensor]


def replace_dora_layers(wrapped: nn.Module, adapter: str) -> None:
    """Replace PEFT's DoRA layers of `adapter` on linear layers by the faster class.

    Parameters and names stay; the base must not change afterwards. Magnitudes are set again from
    the norms that the forward computes, so that a fresh adapter changes nothing at all.
    """
    theirs = importlib.import_module("peft.tuners.lora.dora").DoraLinearLayer
    for module in wrapped.modules():
        layers: Any = getattr(module, "lora_magnitude_vector", {})
        if adapter not in layers or type(layers[adapter]) is not theirs:
            continue
        wrapper: Any = module
        new = fast_dora_class()(layers[adapter], wrapper.get_base_layer())
        with torch.no_grad():
            new.weight.copy_(new.base_squares.sqrt())
        layers[adapter] = new


def row_norms(
    base_squares: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float
) -> Tensor:
    """[out]: norms of the rows of weight + scaling * lora_b @ lora_a, without gradient.
    `base_squares`: squared row norms of the weight alone; the result has their dtype."""
    exact = base_squares.dtype
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        # In the weight's dtype: a float32 copy of the weight would be the largest matrix here.
        cross = (weight @ lora_a.to(weight.dtype).T).to(exact)
        a, b = lora_a.to(exact), lora_b.to(exact)
        change = ((2 * scaling * cross + scaling**2 * (b @ (a @ a.T))) * b).sum(1)
        # Where the adapter cancels a row, only rounding error remains, which may be negative.
        limits = torch.finfo(exact)
        least = base_squares * limits.eps + limits.tiny
        return torch.maximum(base_squares + change, least).sqrt()


@functools.cache
def fast_dora_class() -> type[Any]:
    """A subclass of PEFT's layer, so that PEFT can merge, save and load it."""
    parent: Any = importlib.import_module("peft.tuners.lora.dora").DoraLinearLayer

    class FasterDora(parent):  # type: ignore[misc]
        base_squares: Tensor

        def __init__(self, old: Any, base_layer: Any) -> None:
            super().__init__(old.fan_in_fan_out)
            self.weight = old.weight
            self.train(old.training)
            self.read_weight, self.is_quantised = reader_of(base_layer)
            weight = self.read_weight(base_layer, torch.float32).detach()
            exact = torch.promote_types(weight.dtype, torch.float32)
            squares = torch.linalg.vector_norm(weight, dim=1, dtype=exact).square()
            self.register_buffer("base_squares", squares, persistent=False)

        def forward(
            self,
            x: Tensor,
            *,
            lora_A: Any,
            lora_B: Any,
            scaling: float,
            base_layer: Any,
            base_result: Tensor | None = None,
            adapter_name: str = "default",
        ) -> Tensor:
            """What DoRA adds to the base layer's result. If that is None, `x` has been through
            dropout, and the base layer is applied to it here."""
            scale = self.row_scale(base_layer, lora_A, lora_B, scaling)
            lora_result = lora_B(lora_A(x))
            if base_result is None:
                plain_result = self._of_dropped(x, base_layer)
            else:
                plain_result = _less_bias(base_result, base_layer)
            dtype = torch.promote_types(plain_result.dtype, lora_result.dtype)
            more, whole = (scale - 1).to(dtype), (scale * scaling).to(dtype)
            added: Tensor = more * plain_result + whole * lora_result
            return added

        def row_scale(self, base_layer: Any, lora_A: Any, lora_B: Any, scaling: float) -> Tensor:
            """[out]: the factor of every row of W + s B A."""
            weight = self.read_weight(base_layer, lora_A.weight.dtype)
            norms = row_norms(self.base_squares, weight, lora_A.weight, lora_B.weight, scaling)
            # Rounded like the magnitudes: a fresh adapter in bfloat16 then scales by exactly 1. The
            # quotient is not rounded: near 1, bfloat16 has steps of 0.4 and 0.8 %.
            magnitudes: Tensor = self.weight
            return magnitudes.to(norms.dtype) / norms.to(magnitudes.dtype).to(norms.dtype)

        def _of_dropped(self, x: Tensor, base_layer: Any) -> Tensor:
            if self.is_quantised:  # its operator saves no full weight for the backward pass
                return _less_bias(base_layer(x), base_layer)
            return F.linear(x, self.read_weight(base_layer, x.dtype).to(x.dtype))

    return FasterDora


def _less_bias(result: Tensor, base_layer: Any) -> Tensor:
    bias = base_layer.bias
    return result if bias is None else result - bias.to(result.dtype)


def reader_of(base_layer: Any) -> tuple[ReadWeight, bool]:
    """(function that returns the layer's weight [out, in], whether the weight is quantised). The
    function's dtype is for weights that have none."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(base_layer, Conv1D):
        return lambda layer, dtype: layer.weight.T, False
    if isinstance(base_layer, Float8Linear):
        return _int8_weight, True
    bnb: Any = sys.modules.get("bitsandbytes")  # if not imported, no layer is quantised by it
    if bnb is not None:
        if isinstance(base_layer, bnb.nn.Linear4bit):
            read: Any = bnb.functional.dequantize_4bit
            return lambda layer, dtype: read(parts_of(layer)[0], state_of(layer)), True
        if isinstance(base_layer, weight_only_class()):
            return _int8_weight, True
    return lambda layer, dtype: layer.weight, False


def _int8_weight(base_layer: Any, dtype: torch.dtype) -> Tensor:
    return dequantised(*int8_parts(base_layer), dtype)

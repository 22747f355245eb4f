"""LoRA and DoRA added inside the base layer's product, before rounding.

PEFT rounds W x to the model's dtype and adds s B A x. In bfloat16 that sum is rounded back to W x
wherever the change is below 0.2 to 0.4 % of it: of changes of 0.1 %, 55 % survive, of 0.01 %, 6 %.
So a fresh adapter has almost no effect, and a trained one less than it should. Here W x is
accumulated onto s B A x in float32, which matrix kernels do at no cost, and the sum is rounded
once: bfloat16 then trains like float32 (docs/benchmarks/lora-rounding-h200.json). It also saves two
kernels per layer: compiled 0.6B reaches 122,994 tokens/s on an H200 instead of 115,686. A bias is
added afterwards and rounded again.

Dropout applies to the adapter's input only. For DoRA, PEFT also passes the dropped input through
the base layer a second time, to scale it by the change of the magnitudes: the same on average, but
with more noise and twice the products.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import torch
from torch import Tensor, nn

from expert.model.lora.added_product import AddedProduct, added_product, computed_in
from expert.model.lora.dora import fast_dora_class
from expert.model.lora.nf4 import is_doubly_quantised, nf4_added, parts_of
from expert.model.quantised import Float8Linear, int8_added, int8_parts, weight_only_class

FEW_ROWS = 64
"""Up to this many rows without gradients, as in generation, bitsandbytes' NF4 kernels are faster
than dequantising the weight."""


def replace_lora_layers(wrapped: nn.Module, adapter: str) -> None:
    """Make the LoRA layers of this adapter on linear layers add inside the base's product."""
    theirs: Any = importlib.import_module("peft.tuners.lora")
    kinds = [getattr(theirs, kind, None) for kind in ("Linear", "Linear8bitLt", "Linear4bit")]
    for module in wrapped.modules():
        layer: Any = module
        if type(layer) not in kinds:
            continue
        product = _product_of(layer.get_base_layer())
        if product is not None and adapter in layer.lora_A and _is_known(layer, adapter):
            layer.__class__ = added_class(type(layer).__name__)
            layer.product, layer.adapter = product, adapter


@functools.cache
def added_class(kind: str) -> type[Any]:
    """A subclass of PEFT's layer, so that PEFT can merge, save and load it."""
    parent: Any = getattr(importlib.import_module("peft.tuners.lora"), kind)

    class AddedLora(parent):  # type: ignore[misc]
        product: Any
        adapter: str

        def forward(self, x: Tensor, *args: Any, **more: Any) -> Tensor:
            plain = self.disable_adapters or self.merged or self.active_adapters != [self.adapter]
            if plain or args or more:
                whole: Tensor = super().forward(x, *args, **more)
                return whole
            name, base = self.adapter, self.get_base_layer()
            rows = x.reshape(-1, x.shape[-1])
            if self.product is _nf4 and len(rows) <= FEW_ROWS and not torch.is_grad_enabled():
                bitsandbytes_result: Tensor = super().forward(x)
                return bitsandbytes_result
            first, second = self.lora_A[name], self.lora_B[name]
            read = self.lora_dropout[name](self._cast_input_dtype(rows, first.weight.dtype))
            result: Tensor = self.product(
                base, rows, first(read), second.weight, self.scaling[name]
            )
            if name in self.lora_magnitude_vector:
                dora = self.lora_magnitude_vector[name]
                excess = dora.row_scale(base, first, second, self.scaling[name]) - 1
                result = torch.addcmul(result, result, excess.to(result.dtype))
            if base.bias is not None:
                result = result + base.bias.to(result.dtype)
            return result.view(*x.shape[:-1], result.shape[-1])

    return AddedLora


def _is_known(layer: Any, adapter: str) -> bool:
    """Whether an adapter is plain LoRA, or DoRA prepared by `replace_dora_layers`."""
    dora = layer.lora_magnitude_vector
    if layer.lora_B[adapter].bias is not None:
        return False
    if adapter in dora:
        return isinstance(dora[adapter], fast_dora_class())
    return adapter not in layer.lora_variant


def _product_of(base: Any) -> Any:
    """The function that multiplies by a base layer's weight and adds the adapter, rounded once;
    None if its kernels cannot do that."""
    from transformers.pytorch_utils import Conv1D

    if type(base) is nn.Linear:
        return _plain
    if type(base) is Conv1D:
        return _transposed
    if type(base) is Float8Linear:
        return _int8
    bnb: Any = sys.modules.get("bitsandbytes")  # if not imported, no layer is quantised by it
    if bnb is not None and type(base) is weight_only_class():
        return _int8
    if bnb is not None and isinstance(base, bnb.nn.Linear4bit) and is_doubly_quantised(base):
        return _nf4
    return None


def _plain(base: Any, rows: Tensor, low: Tensor, second: Tensor, scaling: float) -> Tensor:
    return _sum(rows, base.weight.t(), low, second, scaling)


def _transposed(base: Any, rows: Tensor, low: Tensor, second: Tensor, scaling: float) -> Tensor:
    return _sum(rows, base.weight, low, second, scaling)


def _sum(rows: Tensor, weight: Tensor, low: Tensor, second: Tensor, scaling: float) -> Tensor:
    dtype = computed_in(weight)
    args = (low.to(dtype), second.to(dtype), rows.to(dtype), weight.to(dtype), scaling)
    # An opaque operator: Inductor would split the sum again, and torch 2.9's would lose the factor.
    if torch.compiler.is_compiling():
        compiled: Tensor = added_product(*args)
        return compiled
    run: Any = AddedProduct.apply
    eager: Tensor = run(*args)
    return eager


def _int8(base: Any, rows: Tensor, low: Tensor, second: Tensor, scaling: float) -> Tensor:
    dtype = computed_in(rows)
    args = (low.to(dtype), second.to(dtype), rows.to(dtype))
    whole: Tensor = int8_added(*args, *int8_parts(base), scaling)
    return whole


def _nf4(base: Any, rows: Tensor, low: Tensor, second: Tensor, scaling: float) -> Tensor:
    dtype = base.compute_dtype or computed_in(rows)
    args = (low.to(dtype), second.to(dtype), rows.to(dtype))
    whole: Tensor = nf4_added(*args, *parts_of(base), scaling)
    return whole if torch.is_autocast_enabled(rows.device.type) else whole.to(rows.dtype)

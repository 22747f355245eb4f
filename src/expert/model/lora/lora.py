"""LoRA and DoRA that are added inside the product of the base layer, before that is rounded.

PEFT rounds W x to the dtype of the model and adds s B A x to it. In bfloat16 that sum is rounded
back to W x wherever the change is less than 0.2 to 0.4 % of it: of changes of 0.1 % 55 % arrive, of
0.01 % 6 %. A fresh adapter does next to nothing, and a grown one less than it has learnt. Here W x
is added to s B A x while it is still in float32, as matrix kernels do for nothing, and the sum is
rounded once: bfloat16 then learns as float32 does (docs/benchmarks/lora-rounding-h200.json). It is
also two kernels less a layer: 0.6B, compiled, makes 122,994 tokens/s on an H200 instead of 115,686.
A bias, where a layer has one, is added afterwards and rounds again.

Dropout is of what the adapter reads. PEFT lets what is left go through the base of DoRA too, beside
all of it, to scale that by what magnitudes have changed: the same on average, with more noise, and
twice the products.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import torch
from torch import Tensor, nn

from expert.model.lora.added_product import AddedProduct, added_product
from expert.model.lora.dora import faster_class
from expert.model.lora.nf4 import is_doubly_quantised, nf4_added, parts_of
from expert.model.quantised import Float8Linear, int8_added, int8_parts, weight_only_class

FEW_ROWS = 64
"""That are only looked at, as the tokens of answers are: kernels of bitsandbytes multiply them with
NF4 weights as these are, which is faster than to unpack them."""


def settle_lora(wrapped: nn.Module, adapter: str) -> None:
    """Let every LoRA layer of this name on a linear layer add inside the base's product."""
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
    """The layer's class: one of PEFT's, so that PEFT merges, saves and loads it as its own."""
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
                few: Tensor = super().forward(x)
                return few
            first, second = self.lora_A[name], self.lora_B[name]
            read = self.lora_dropout[name](self._cast_input_dtype(rows, first.weight.dtype))
            result: Tensor = self.product(
                base, rows, first(read), second.weight, self.scaling[name]
            )
            if name in self.lora_magnitude_vector:
                dora = self.lora_magnitude_vector[name]
                above = dora.row_scale(base, first, second, self.scaling[name]) - 1
                result = torch.addcmul(result, result, above.to(result.dtype))
            if base.bias is not None:
                result = result + base.bias.to(result.dtype)
            return result.view(*x.shape[:-1], result.shape[-1])

    return AddedLora


def _is_known(layer: Any, adapter: str) -> bool:
    """Whether an adapter is LoRA as such, or DoRA with the norms of `settle_dora`."""
    dora = layer.lora_magnitude_vector
    if layer.lora_B[adapter].bias is not None:
        return False
    if adapter in dora:
        return isinstance(dora[adapter], faster_class())
    return adapter not in layer.lora_variant


def _product_of(base: Any) -> Any:
    """What multiplies rows with a base layer's weight and adds something to that, rounded once;
    None for layers whose kernels cannot."""
    from transformers.pytorch_utils import Conv1D

    if type(base) is nn.Linear:
        return _plain
    if type(base) is Conv1D:
        return _turned
    if type(base) is Float8Linear:
        return _int8
    bnb: Any = sys.modules.get("bitsandbytes")  # where it is not loaded, no layer is one of its own
    if bnb is not None and type(base) is weight_only_class():
        return _int8
    if bnb is not None and isinstance(base, bnb.nn.Linear4bit) and is_doubly_quantised(base):
        return _nf4
    return None


def _plain(base: Any, rows: Tensor, low: Tensor, second: Tensor, scaling: float) -> Tensor:
    return _sum(rows, base.weight.t(), low, second, scaling)


def _turned(base: Any, rows: Tensor, low: Tensor, second: Tensor, scaling: float) -> Tensor:
    return _sum(rows, base.weight, low, second, scaling)


def _sum(rows: Tensor, weight: Tensor, low: Tensor, second: Tensor, scaling: float) -> Tensor:
    dtype = _computed_in(weight)
    given = (low.to(dtype), second.to(dtype), rows.to(dtype), weight.to(dtype), scaling)
    # Inductor would take the sum apart again, and torch 2.9's would lose the factor: it is not
    # shown what it compiles.
    if torch.compiler.is_compiling():
        whole: Tensor = added_product(*given)
        return whole
    run: Any = AddedProduct.apply
    found: Tensor = run(*given)
    return found


def _int8(base: Any, rows: Tensor, low: Tensor, second: Tensor, scaling: float) -> Tensor:
    dtype = _computed_in(rows)
    given = (low.to(dtype), second.to(dtype), rows.to(dtype))
    whole: Tensor = int8_added(*given, *int8_parts(base), scaling)
    return whole


def _nf4(base: Any, rows: Tensor, low: Tensor, second: Tensor, scaling: float) -> Tensor:
    dtype = base.compute_dtype or _computed_in(rows)
    given = (low.to(dtype), second.to(dtype), rows.to(dtype))
    whole: Tensor = nf4_added(*given, *parts_of(base), scaling)
    return whole if torch.is_autocast_enabled(rows.device.type) else whole.to(rows.dtype)


def _computed_in(tensor: Tensor) -> torch.dtype:
    """autocast lets no operation in place through, so it is done by hand."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype

"""Packs PEFT layers into products: weights and adapters side by side, once."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from expert.model.fused.float8 import ALIGNED as WHOLE
from expert.model.fused.float8 import KIND, Float8Weight
from expert.model.fused.launching import kernel, uses_triton
from expert.model.fused.magnitudes import Magnitudes
from expert.model.fused.product import ALIGNED, BESIDE, Product, ends
from expert.model.lora.dora import fast_dora_class, reader_of
from expert.model.lora.nf4 import is_doubly_quantised, parts_of
from expert.model.quantised import Float8Linear, weight_only_class

tl: Any = None  # set by `kernel`
_BYTES = 1024
"""Packed bytes that one program unpacks."""


@torch.no_grad()
def pack(layers: Sequence[Any], adapter: str, like: Tensor, *, for_swiglu: bool = False) -> Product:
    """Pack layers into one product; their adapters and unquantised weights become views of it.

    Layers may have no adapter; if none has one, the dtype is that of `like`. `for_swiglu`: the
    outputs go to SwiGLU."""
    bases = [base_of(layer) for layer in layers]
    rows = ends(base.out_features for base in bases)
    adapted = [index for index, layer in enumerate(layers) if has_adapter(layer, adapter)]
    firsts = [layers[index].lora_A[adapter].weight for index in adapted]
    seconds = [layers[index].lora_B[adapter].weight for index in adapted]
    inputs, outputs = bases[0].in_features, rows[-1][1]
    plain, zeros = type(bases[0]) is nn.Linear, (firsts or [like])[0].new_zeros
    unit = BESIDE if plain else ALIGNED
    ranks = -(-sum(first.shape[0] for first in firsts) // unit) * unit
    if plain:
        matrix = zeros(outputs + ranks, inputs + ranks)
        first, second = matrix[outputs:, :inputs], matrix[:outputs, inputs:]
        for base, (start, end) in zip(bases, rows, strict=True):
            _move(base.weight, matrix[start:end, :inputs])
    else:
        matrix, first, second = None, zeros(ranks, inputs), zeros(outputs, ranks)
    float8 = _joined_float8(bases, rows) if isinstance(bases[0], Float8Linear) else None
    places = [rows[index] for index in adapted]
    columns = ends(each.shape[0] for each in firsts)
    for index, ((left, right), (start, end)) in enumerate(zip(columns, places, strict=True)):
        _move(firsts[index], first[left:right])
        _move(seconds[index], second[start:end, left:right])
    return Product(
        first=first,
        second=second,
        weight=functools.partial(unpacked, bases, second.dtype)
        if matrix is None
        else lambda: matrix[:outputs, :inputs],
        matrix=matrix,
        float8=float8,
        scaling=layers[adapted[0]].scaling[adapter] if adapted else 1.0,
        firsts=firsts,
        seconds=seconds,
        places=places,
        bias=_joined([base.bias for base in bases], [end - start for start, end in rows]),
        magnitudes=_magnitudes([layers[index] for index in adapted], places, outputs, adapter),
        dropout=getattr(layers[adapted[0]].lora_dropout[adapter], "p", 0.0) if adapted else 0.0,
        for_swiglu=for_swiglu,
    )


def _joined_float8(bases: Sequence[Any], rows: Sequence[tuple[int, int]]) -> Float8Weight:
    """Concatenate the layers' weights, which become views of the result."""
    codes = torch.cat([base.weight for base in bases])
    scales = torch.cat([base.scales for base in bases])
    for base, (start, end) in zip(bases, rows, strict=True):
        base.weight.data, base.scales = codes[start:end], scales[start:end]
    return Float8Weight(codes=codes.view(KIND), scales=scales)


def base_of(layer: Any) -> Any:
    """The base layer, with or without an adapter around it."""
    return layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer


def has_adapter(layer: Any, adapter: str) -> bool:
    return adapter in getattr(layer, "lora_A", {})


def is_quantised(base: Any) -> bool:
    """Whether the weights can be dequantised: double-quantised NF4, int8 or FP8."""
    if isinstance(base, Float8Linear):
        return not (base.in_features % WHOLE or base.out_features % WHOLE)
    bnb: Any = sys.modules.get("bitsandbytes")  # if not imported, no layer is quantised by it
    if bnb is None:
        return False
    if isinstance(base, bnb.nn.Linear4bit):
        return is_doubly_quantised(base)
    return type(base) is weight_only_class()


def _magnitudes(
    layers: Sequence[Any], places: Sequence[tuple[int, int]], outputs: int, adapter: str
) -> Magnitudes | None:
    """Of the adapted layers, whose outputs are these `places`."""
    dicts = [layer.lora_magnitude_vector for layer in layers]
    if not dicts or adapter not in dicts[0]:
        return None
    vectors = [vectors_of[adapter] for vectors_of in dicts]
    assert all(isinstance(vector, fast_dora_class()) for vector in vectors)
    lengths = vectors[0].weight.new_ones(outputs)
    squares = vectors[0].base_squares.new_ones(outputs)
    for vector, (start, end) in zip(vectors, places, strict=True):
        _move(vector.weight, lengths[start:end])
        squares[start:end] = vector.base_squares
    return Magnitudes(
        vectors=[vector.weight for vector in vectors], all=lengths, squares=squares, places=places
    )


def _joined(biases: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """The layers' biases as one, zero where a layer has none."""
    like = next((bias for bias in biases if bias is not None), None)
    if like is None:
        return None
    pairs = zip(biases, sizes, strict=True)
    return torch.cat([like.new_zeros(size) if bias is None else bias for bias, size in pairs])


def _move(parameter: nn.Parameter, place: Tensor) -> None:
    place.copy_(parameter)
    parameter.data = place


def unpacked(bases: list[Any], dtype: torch.dtype) -> Tensor:
    """Dequantised weights of the layers, concatenated, in this dtype.

    Double-quantised NF4 takes one kernel per layer here. bitsandbytes needs three, and some hundred
    microseconds of host time: for the seven layers of a block, twice per pass, that is more than
    the GPU needs for a block of 0.6B.
    """
    if not (is_doubly_quantised(bases[0]) and uses_triton(bases[0].weight)):
        parts = [reader_of(base)[0](base, dtype).to(dtype) for base in bases]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    sizes = [base.out_features for base in bases]
    whole = torch.empty(
        sum(sizes), bases[0].in_features, dtype=dtype, device=bases[0].weight.device
    )
    for base, part in zip(bases, torch.split_with_sizes(whole, sizes), strict=True):
        _unpack(base, part)
    return whole


def _unpack(base: Any, out: Tensor) -> None:
    packed, (absmax, offset, absmax2, code2), (*_, block, block2) = parts_of(base)
    size = packed.numel()
    kernel(_unpack_nf4)[(-(-size // _BYTES),)](
        packed, absmax, offset, absmax2, code2, _digits(out.device), out, size,
        BLOCK=block // 2, BLOCK2=block2, BYTES=_BYTES, num_warps=4,
    )  # fmt: skip


@functools.cache
def _digits(device: torch.device) -> Tensor:
    """The sixteen values of NF4."""
    functional: Any = importlib.import_module("bitsandbytes").functional
    values: Tensor = functional.get_4bit_type("nf4", device=device)
    return values


def _unpack_nf4(  # type: ignore[no-untyped-def]
    packed, absmax, offset, absmax2, code2, digits, out, size,
    BLOCK: tl.constexpr, BLOCK2: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    there = place < size
    both = tl.load(packed + place, mask=there, other=0).to(tl.int32)
    block = place // BLOCK
    scale = tl.load(code2 + tl.load(absmax + block, mask=there, other=0).to(tl.int32))
    scale = scale * tl.load(absmax2 + block // BLOCK2, mask=there, other=0.0) + tl.load(offset)
    high, low = tl.load(digits + (both >> 4)) * scale, tl.load(digits + (both & 15)) * scale
    made = tl.interleave(high, low).to(out.dtype.element_ty)
    target = tl.program_id(0).to(tl.int64) * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    tl.store(out + target, made, mask=target < 2 * size)

"""From PEFT's layers to products: weights and adapters are put side by side, once."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from expert.model.fused.product import ALIGNED, Magnitudes, Product, ends
from expert.model.lora.dora import faster_class, reader_of
from expert.model.lora.nf4 import is_doubly_quantised
from expert.model.quantised import weight_only_class


@torch.no_grad()
def pack(layers: Sequence[Any], adapter: str) -> Product:
    """The layers as one product; their own adapters, and weights that are not quantised, become
    views of its matrices."""
    firsts = [layer.lora_A[adapter].weight for layer in layers]
    seconds = [layer.lora_B[adapter].weight for layer in layers]
    bases = [layer.get_base_layer() for layer in layers]
    inputs, outputs = firsts[0].shape[1], sum(second.shape[0] for second in seconds)
    ranks = -(-sum(first.shape[0] for first in firsts) // ALIGNED) * ALIGNED
    plain, zeros = type(bases[0]) is nn.Linear, firsts[0].new_zeros
    rows = ends(second.shape[0] for second in seconds)
    if plain:
        matrix = zeros(outputs + ranks, inputs + ranks)
        first, second = matrix[outputs:, :inputs], matrix[:outputs, inputs:]
        for base, (start, end) in zip(bases, rows, strict=True):
            _move(base.weight, matrix[start:end, :inputs])
    else:
        matrix, first, second = None, zeros(ranks, inputs), zeros(outputs, ranks)
    places = zip(ends(each.shape[0] for each in firsts), rows, strict=True)
    for index, ((left, right), (start, end)) in enumerate(places):
        _move(firsts[index], first[left:right])
        _move(seconds[index], second[start:end, left:right])
    return Product(
        first=first,
        second=second,
        weight=functools.partial(_part, matrix[:outputs, :inputs])
        if matrix is not None
        else functools.partial(_unpacked, bases, firsts[0].dtype),
        matrix=matrix,
        scaling=layers[0].scaling[adapter],
        firsts=firsts,
        seconds=seconds,
        bias=_joined([base.bias for base in bases], [end - start for start, end in rows]),
        magnitudes=_magnitudes(layers, adapter),
    )


def is_quantised(base: Any) -> bool:
    """Whether a layer has weights that can be unpacked: NF4 of two quantisations, or int8."""
    bnb: Any = sys.modules.get("bitsandbytes")  # where it is not loaded, no layer is one of its own
    if bnb is None:
        return False
    if isinstance(base, bnb.nn.Linear4bit):
        return is_doubly_quantised(base)
    return type(base) is weight_only_class()


def _part(weight: Tensor) -> Tensor:
    return weight


def _unpacked(bases: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Quantised weights, side by side, as numbers of this dtype."""
    parts = [reader_of(base)[0](base, dtype).to(dtype) for base in bases]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _magnitudes(layers: Sequence[Any], adapter: str) -> Magnitudes | None:
    found = [layer.lora_magnitude_vector for layer in layers]
    if adapter not in found[0]:
        return None
    vectors = [each[adapter] for each in found]
    assert all(isinstance(vector, faster_class()) for vector in vectors)
    return Magnitudes(
        vectors=[vector.weight for vector in vectors],
        squares=torch.cat([vector.base_squares for vector in vectors]),
    )


def _joined(biases: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """The biases of layers as one, with zeros where there are none."""
    like = next((bias for bias in biases if bias is not None), None)
    if like is None:
        return None
    pairs = zip(biases, sizes, strict=True)
    return torch.cat([like.new_zeros(size) if bias is None else bias for bias, size in pairs])


def _move(parameter: nn.Parameter, place: Tensor) -> None:
    """Let a parameter live in `place`, with the values it has."""
    place.copy_(parameter)
    parameter.data = place

"""Dequantises double-quantised NF4 weights with one kernel per layer.

bitsandbytes needs three kernels and some hundred microseconds of host time: for the seven layers of
a block, twice per pass, that is more than the GPU needs for a block of 0.6B.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from expert.model.fused.launching import kernel, uses_triton
from expert.model.lora.dora import reader_of
from expert.model.lora.nf4 import is_doubly_quantised, parts_of

tl: Any = None  # set by `kernel`
_BYTES = 1024
"""Packed bytes that one program unpacks."""


def unpacked(bases: list[Any], dtype: torch.dtype) -> Tensor:
    """Dequantised weights of the layers, concatenated, in this dtype."""
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

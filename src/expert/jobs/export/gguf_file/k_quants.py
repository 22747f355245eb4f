"""Quantises weights to llama.cpp's K types: Q4_K, Q5_K and Q6_K.

Blocks of 256 values share a float16 scale. Q4_K and Q5_K split a block into 8 groups of 32, each
with a scale and an offset of 6 bits; Q6_K into 16 groups of 16, each with a scale of 8 bits. The
scale of a group is the best of 21 candidates after a least-squares fit of each.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

BLOCK = 256
_AT_ONCE = 2048  # blocks: 2 MB of float32, about a core's cache
_BITS = {"Q4_K": 4, "Q5_K": 5}
_CANDIDATES = [step / 10 for step in range(-10, 11)]
K_TYPES = (*_BITS, "Q6_K")


def k_quantised(values: Tensor, kind: str) -> npt.NDArray[Any]:
    """The bytes of each row; the width must be a multiple of BLOCK."""
    import torch

    blocks = values.float().reshape(-1, BLOCK)
    parts = [
        (_signed(part) if kind == "Q6_K" else _with_offset(part, _BITS[kind])).cpu()
        for part in (blocks[n : n + _AT_ONCE] for n in range(0, len(blocks), _AT_ONCE))
    ]
    rows: npt.NDArray[Any] = torch.cat(parts).reshape(values.shape[0], -1).numpy()
    return rows


def _with_offset(blocks: Tensor, bits: int) -> Tensor:
    """Quantise to scale * sub-scale * code - offset * sub-offset."""
    import torch

    x = blocks.reshape(-1, 8, 32)
    scale, offset = _fit_with_offset(x, 2**bits - 1)
    d = (scale.amax(1, keepdim=True) / 63).half()
    d_offset = (offset.amax(1, keepdim=True) / 63).half()
    scales, offsets = _codes(scale, d, 63), _codes(offset, d_offset, 63)
    step = (d.float() * scales)[..., None]
    codes = _codes(x + (d_offset.float() * offsets)[..., None], step, 2**bits - 1).to(torch.uint8)
    head = torch.cat([d, d_offset], 1).view(torch.uint8)
    packed = _six_bits(scales.to(torch.uint8), offsets.to(torch.uint8))
    pairs = codes.reshape(-1, 4, 2, 32)  # low and high half of each byte
    low = (pairs[:, :, 0] & 15) | ((pairs[:, :, 1] & 15) << 4)
    parts = [head, packed, low.flatten(1)]
    if bits == 5:  # the fifth bits of all 8 groups, lowest bit first
        parts.insert(2, reduce(or_, [(codes[:, group] >> 4) << group for group in range(8)]))
    return torch.cat(parts, 1)


def _fit_with_offset(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Scale and offset (not negative) of each group; large values have more weight."""
    import torch

    w = x.square().mean(-1, keepdim=True).sqrt() + x.abs()
    low, high = x.amin(-1).clamp(max=0), x.amax(-1)
    sum_w, sum_x = w.sum(-1), (w * x).sum(-1)
    best, scale = torch.full_like(low, torch.inf), torch.zeros_like(low)
    flat = high == low
    for more in (None, *_CANDIDATES):
        # Each candidate starts from the best fit so far.
        spread = (high - low).clamp(min=1e-30)
        levels = (most if more is None else most + more) / spread
        code = ((x - low[..., None]) * levels[..., None]).round_().clamp_(0, most)
        if more is None:  # no fit: from the smallest to the largest value
            own_scale, own_low = spread / most, low
        else:
            own_scale, own_low = _line(w, x, code, sum_w, sum_x)
        missed = own_scale[..., None] * code + own_low[..., None] - x
        error = (w * missed.square()).sum(-1)
        better = error < best  # False for NaN
        best = torch.where(better, error, best)
        scale = torch.where(better, own_scale, scale)
        low = torch.where(better, own_low, low)
    return scale.masked_fill(flat, 0.0), -low


def _line(
    w: Tensor, x: Tensor, code: Tensor, sum_w: Tensor, sum_x: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted least-squares line through the codes, starting at zero or below."""
    import torch

    weighted = w * code
    sum_c, sum_cc, sum_cx = weighted.sum(-1), (weighted * code).sum(-1), (weighted * x).sum(-1)
    under = sum_w * sum_cc - sum_c.square()
    scale = (sum_w * sum_cx - sum_x * sum_c) / under
    low = (sum_cc * sum_x - sum_c * sum_cx) / under
    above = low > 0
    return torch.where(above, sum_cx / sum_cc, scale), low.clamp(max=0)


def _codes(values: Tensor, step: Tensor, most: int, least: int = 0) -> Tensor:
    """Values divided by the step and rounded; 0 if the step is 0."""
    import torch

    step = step.float()
    return (values / torch.where(step == 0, torch.inf, step)).round().clamp(least, most)


def _six_bits(scales: Tensor, offsets: Tensor) -> Tensor:
    """Pack 8 scales and 8 offsets of 6 bits into 12 bytes; the bytes of the first four hold the
    upper two bits of the last four."""
    import torch

    first = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    second = offsets[:, :4] | ((offsets[:, 4:] >> 4) << 6)
    third = (scales[:, 4:] & 15) | ((offsets[:, 4:] & 15) << 4)
    return torch.cat([first, second, third], 1)


def _signed(blocks: Tensor) -> Tensor:
    """Quantise to scale * sub-scale * (code - 32)."""
    import torch

    x = blocks.reshape(-1, 16, 16)
    scale = _fit(x)
    place = scale.abs().argmax(1, keepdim=True)
    d = (scale.gather(1, place) / -128).half()
    scales = _codes(scale, d, 127, -128)
    codes = _codes(x, (d.float() * scales)[..., None], 31, -32) + 32
    halves = codes.to(torch.uint8).reshape(-1, 2, 4, 32)
    low = [(halves[:, :, part] & 15) | ((halves[:, :, part + 2] & 15) << 4) for part in (0, 1)]
    high = reduce(or_, [(halves[:, :, part] >> 4) << (2 * part) for part in range(4)])
    own = scales.to(torch.int8).view(torch.uint8)
    return torch.cat([torch.cat(low, -1).flatten(1), high.flatten(1), own, d.view(torch.uint8)], 1)


def _fit(x: Tensor) -> Tensor:
    """Scale of each group for codes from -32 to 31; the largest value gets -32."""
    import torch

    w = x.square()
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    best, scale = torch.zeros_like(largest), torch.zeros_like(largest)
    for more in _CANDIDATES:
        code = (x * (-(32 + more) / torch.where(largest == 0, 1.0, largest))).round_()
        code.clamp_(-32, 31)
        weighted = w * code
        sum_cx = (weighted * x).sum(-1, keepdim=True)
        sum_cc = (weighted * code).sum(-1, keepdim=True).clamp(min=1e-38)
        gain = sum_cx.square() / sum_cc  # reduction of the squared error
        better = gain > best
        best = torch.where(better, gain, best)
        scale = torch.where(better, sum_cx / sum_cc, scale)
    return scale.squeeze(-1)

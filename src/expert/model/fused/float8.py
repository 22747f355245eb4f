"""Products with frozen FP8 (e4m3) weights, forward and backward, twice as fast as in bfloat16.

Weights have a scale for each row; activations and gradients are quantised row by row on the fly.
Tensor cores need both operands contiguous along the summed dimension, so the backward transposes
the weights: keeping a transposed copy would take the memory that FP8 saves. There, the weights'
scales run along the summed dimension and are multiplied into the gradient before quantising it.

The adapter stays in 16 bits and is added after torch's kernel has rounded its sum to bfloat16.
A change below half a rounding step would then always be lost. So the sum is computed divided by a
factor that is not a power of two: its rounding steps then lie elsewhere, and the added change is
rounded up as often as it should be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expert.model.fused.launching import kernel, power, precision_of, uses_triton

tl: Any = None  # set by `kernel`
KIND = torch.float8_e4m3fn
LARGEST = 448.0
ALIGNED = 16
"""Inputs and outputs must be multiples of this."""
_STEPS = 2**-0.5
FACTOR = 1 / _STEPS
"""Undoes `_STEPS`."""
_TILE = 128


@dataclass(frozen=True, eq=False, kw_only=True)
class Float8Weight:
    """W [N, k] as codes, with a scale for each row."""

    codes: Tensor
    scales: Tensor

    def times(self, x: Tensor) -> Tensor:
        """x W^T * _STEPS."""
        codes, scales = quantised_rows(x)
        product = _product(codes, scales, self.codes, self.scales * _STEPS, fast=True)
        return product.to(x.dtype)

    def back(self, gradient: Tensor) -> Tensor:
        """gradient W * _STEPS."""
        codes, scales = quantised_rows(gradient, self.scales)
        ones = torch.full((self.codes.shape[1],), _STEPS, device=gradient.device)
        return _product(codes, scales, _turned(self.codes), ones, fast=False).to(gradient.dtype)


def quantised_rows(x: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """FP8 codes and scales of the rows of x, after multiplying its columns by `factors`."""
    rows, width = x.shape
    if not uses_triton(x):
        wide = x.float() if factors is None else x.float() * factors
        scales = wide.abs().amax(1).clamp(min=1e-12) / LARGEST
        return (wide / scales[:, None]).to(KIND), scales
    codes = torch.empty(rows, width, dtype=KIND, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = power(width)
    kernel(_quantise)[(rows,)](
        x, x if factors is None else factors, codes, scales, width, x.stride(0),
        SCALED=factors is not None, BLOCK=block, num_warps=4 if block <= 4096 else 16,
    )  # fmt: skip
    return codes, scales


def _product(
    left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, *, fast: bool
) -> Tensor:
    """left right^T times both scales. `fast`: accumulate groups of 32 products below float32
    precision, which saves a tenth of the time."""
    if left.is_cuda:
        return torch._scaled_mm(
            left, right.t(), left_scales[:, None], right_scales[None, :],
            out_dtype=torch.bfloat16, use_fast_accum=fast,
        )  # fmt: skip
    return (left.float() * left_scales[:, None]) @ (right.float() * right_scales[:, None]).t()


def _turned(codes: Tensor) -> Tensor:
    """Transposed in memory, [N, k] to [k, N]."""
    if not uses_triton(codes):
        return codes.view(torch.uint8).t().contiguous().view(KIND)
    rows, columns = codes.shape
    turned = torch.empty(columns, rows, dtype=torch.uint8, device=codes.device)
    kernel(_turn)[(-(-rows // _TILE), -(-columns // _TILE))](
        codes.view(torch.uint8), turned, rows, columns, TILE=_TILE, num_warps=4
    )
    return turned.view(KIND)


def added(made: Tensor, low: Tensor, second: Tensor, residual: Tensor | None) -> Tensor:
    """made * FACTOR + low second^T + residual, rounded once; on a GPU in place."""
    ranks = low.shape[1]
    if not uses_triton(made):
        wide = made.float() * FACTOR + low.float() @ second.float().t()
        wide = wide if residual is None else wide + residual.float()
        return wide.to(low.dtype)
    rows, width = made.shape
    tile = 64 if ranks <= 64 else 32
    kernel(_add)[(-(-rows // tile), -(-width // _TILE))](
        made, low, second, made if residual is None else residual, rows, width, ranks,
        made.stride(0), low.stride(0), second.stride(0), second.stride(1),
        made.stride(0) if residual is None else residual.stride(0), FACTOR,
        ADDED=residual is not None, ROWS=tile, COLUMNS=_TILE, RANKS=max(16, power(ranks)),
        LOW=ranks > 0, PRECISION=precision_of(made), num_warps=4,
    )  # fmt: skip
    return made


def _quantise(  # type: ignore[no-untyped-def]
    x, factors, codes, scales, width, x_stride, SCALED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    there = column < width
    values = tl.load(x + row * x_stride + column, mask=there, other=0.0).to(tl.float32)
    if SCALED:
        values *= tl.load(factors + column, mask=there, other=0.0)
    scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-12) / 448.0
    tl.store(scales + row, scale)
    made = (values / scale).to(codes.dtype.element_ty)
    tl.store(codes + row * width + column, made, mask=there)


def _turn(codes, out, rows, columns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    column = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    there = (row < rows)[:, None] & (column < columns)[None, :]
    given = tl.load(codes + row[:, None] * columns + column[None, :], mask=there, other=0)
    there = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(out + column[:, None] * rows + row[None, :], tl.trans(given), mask=there)


def _add(  # type: ignore[no-untyped-def]
    made, low, second, residual, rows, width, ranks, made_stride, low_stride, second_stride,
    second_rank_stride, residual_stride, factor, ADDED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, RANKS: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    there = (row < rows) & (column < width)
    target = made + row * made_stride + column
    total = tl.load(target, mask=there, other=0.0).to(tl.float32) * factor
    if LOW:
        rank = tl.arange(0, RANKS)
        place = low + row * low_stride + rank[None, :]
        given = tl.load(place, mask=(row < rows) & (rank < ranks)[None, :], other=0.0)
        place = second + column * second_stride + rank[:, None] * second_rank_stride
        known = (column < width) & (rank < ranks)[:, None]
        factors = tl.load(place, mask=known, other=0.0)
        total = tl.dot(given, factors, total, input_precision=PRECISION)
    if ADDED:
        place = residual + row * residual_stride + column
        total += tl.load(place, mask=there, other=0.0).to(tl.float32)
    tl.store(target, total.to(made.dtype.element_ty), mask=there)

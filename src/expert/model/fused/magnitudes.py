"""DoRA's scale for every output of a product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from expert.model.fused.launching import kernel, power, uses_triton
from expert.model.lora.dora import row_norms

tl: Any = None  # set by `kernel`
_ROWS, _MOST_RANKS = 32, 128


@dataclass(frozen=True, eq=False, kw_only=True)
class Magnitudes:
    """DoRA's magnitude of every row, which replaces the norm of that row of W + s B A."""

    vectors: Sequence[nn.Parameter]
    """Of each layer, views of `all`."""
    all: Tensor
    """[N], with 1 for layers without an adapter."""
    squares: Tensor
    """Squared norm of every row of W; 1 for layers without an adapter."""
    places: Sequence[tuple[int, int]]
    """The rows of each layer in `vectors`."""


def row_scales(
    magnitudes: Magnitudes, weight: Tensor, first: Tensor, second: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """[N] magnitudes / norms, and the [N] norms of the rows of weight + scaling * second @ first;
    rounded as in an unfused layer, so that a fresh adapter scales by exactly 1."""
    vectors, squares = magnitudes.all, magnitudes.squares
    rows, ranks = second.shape
    padded = max(16, power(ranks))
    if not uses_triton(weight) or padded > _MOST_RANKS:
        lengths = row_norms(squares, weight, first, second, scaling)
        lengths = lengths.to(vectors.dtype).to(lengths.dtype)
        return vectors.to(lengths.dtype) / lengths, lengths
    cross, exact = weight @ first.t(), first.float()
    scale, lengths = torch.empty_like(squares), torch.empty_like(squares)
    kernel(_row_scales)[(-(-rows // _ROWS),)](
        vectors, squares, cross, exact @ exact.t(), second, scale, lengths, rows, ranks,
        cross.stride(0), second.stride(0), scaling, ROWS=_ROWS, RANKS=padded, num_warps=4,
    )  # fmt: skip
    return scale, lengths


def _row_scales(  # type: ignore[no-untyped-def]
    vectors, squares, cross, gram, second, scale, lengths, rows, ranks, cross_stride,
    second_stride, scaling, ROWS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """The same as `row_norms`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rank = tl.arange(0, RANKS)
    there = (row < rows)[:, None] & (rank < ranks)[None, :]
    place = row[:, None].to(tl.int64)
    b = tl.load(second + place * second_stride + rank[None, :], mask=there, other=0.0)
    b = b.to(tl.float32)
    known = (rank < ranks)[:, None] & (rank < ranks)[None, :]
    inner = tl.load(gram + rank[:, None] * ranks + rank[None, :], mask=known, other=0.0)
    change = scaling * scaling * tl.dot(b, inner, input_precision="ieee")
    crossed = tl.load(cross + place * cross_stride + rank[None, :], mask=there, other=0.0)
    change = tl.sum((2 * scaling * crossed.to(tl.float32) + change) * b, 1)
    base = tl.load(squares + row, mask=row < rows, other=1.0)
    # Where the adapter cancels a row, only rounding error remains, which may be negative.
    found = tl.sqrt(tl.maximum(base + change, base * 1.1920929e-7 + 1.1754944e-38))
    vector = tl.load(vectors + row, mask=row < rows, other=1.0)
    found = found.to(vector.dtype).to(tl.float32)
    tl.store(lengths + row, found, mask=row < rows)
    tl.store(scale + row, vector.to(tl.float32) / found, mask=row < rows)

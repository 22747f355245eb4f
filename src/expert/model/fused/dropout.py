"""Dropout of the adapters' input without a dropped copy of it.

Every layer drops different values: a hash (two rounds of multiply and shift) of the layer's seed
and a value's position decides, so that the backward recomputes the same mask and nothing is saved.
Kernels read the input once, drop in registers and multiply by the low-rank factor: copies would add
6 GB of reads and writes per block at 0.6B with dropout on all layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from expert.model.fused.launching import kernel, power, precision_of, uses_triton

tl: Any = None  # set by `kernel`
INLINED = ("_keeps",)
_ALL = 0xFFFFFFFF
_ROWS, _COLUMNS, _ROWS_OF_A_PART = 64, 64, 2048


class LayerDropout(NamedTuple):
    """Dropout of layers that read the same input."""

    seeds: Tensor
    """One for each layer."""
    probability: float
    rank: int
    """Of each layer."""


def seeds_of(count: int, device: torch.device) -> Tensor:
    """One seed per layer from torch's random state: a resumed run draws the same."""
    return torch.randint(0, 2**31, (count,), device=device)


def low_product(x: Tensor, first: Tensor, drops: LayerDropout, factor: float, out: Tensor) -> None:
    """factor * dropped(x) A^T of every layer, side by side into `out`; `first` stacks A of all
    layers."""
    seeds, probability, rank = drops
    if not uses_triton(x):
        for part, seed in _parts(drops):
            out[:, part] = factor * (_dropped(x, seed, probability) @ first[part].t())
        return
    rows, width = x.shape
    kernel(_low_product)[(-(-rows // _ROWS), len(seeds))](
        x, first, seeds, out, rows, width, x.stride(0), first.stride(0), out.stride(0),
        probability, factor, RANK=rank, RANKS=_padded(rank), ROWS=_ROWS, COLUMNS=_COLUMNS,
        PRECISION=precision_of(x), num_warps=4,
    )  # fmt: skip


def add_to_input(out: Tensor, below: Tensor, first: Tensor, drops: LayerDropout) -> None:
    """Add below A to `out` for every layer, with the same values dropped."""
    seeds, probability, rank = drops
    if not uses_triton(out):
        for part, seed in _parts(drops):
            out += _dropped(below[:, part] @ first[part], seed, probability)
        return
    rows, width = out.shape
    kernel(_add_to_input)[(-(-rows // _ROWS), -(-width // _COLUMNS))](
        below, first, seeds, out, rows, width, below.stride(0), first.stride(0), out.stride(0),
        probability, LAYERS=len(seeds), RANK=rank, RANKS=_padded(rank), ROWS=_ROWS,
        COLUMNS=_COLUMNS, PRECISION=precision_of(out), num_warps=4,
    )  # fmt: skip


def of_first(below: Tensor, x: Tensor, drops: LayerDropout) -> Tensor:
    """The gradient of A of all layers: below^T dropped(x)."""
    seeds, probability, rank = drops
    if not uses_triton(x):
        return torch.cat(
            [below[:, p].t() @ _dropped(x, seed, probability) for p, seed in _parts(drops)]
        )
    rows, width = x.shape
    ranks, parts = rank * len(seeds), -(-rows // _ROWS_OF_A_PART)
    sums = torch.empty(parts, ranks, width, dtype=torch.float32, device=x.device)
    kernel(_of_first)[(-(-width // _COLUMNS), len(seeds), parts)](
        below, x, seeds, sums, rows, width, ranks, below.stride(0), x.stride(0), probability,
        RANK=rank, RANKS=_padded(rank), ROWS=_ROWS, COLUMNS=_COLUMNS, PART=_ROWS_OF_A_PART,
        PRECISION=precision_of(x), num_warps=4,
    )  # fmt: skip
    return sums.sum(0).to(x.dtype)


def _padded(rank: int) -> int:
    return max(16, power(rank))  # the minimum of `tl.dot`


def _parts(drops: LayerDropout) -> list[tuple[slice, int]]:
    """Columns and seed of every layer."""
    seeds, _, rank = drops
    return [(slice(i * rank, (i + 1) * rank), seed) for i, seed in enumerate(seeds.tolist())]


def _dropped(x: Tensor, seed: int, probability: float) -> Tensor:
    places = torch.arange(x.numel(), device=x.device).view(x.shape)
    hashed = (places * 0x9E3779B1 + seed) & _ALL
    hashed = ((hashed ^ (hashed >> 16)) * 0x7FEB352D) & _ALL
    hashed = ((hashed ^ (hashed >> 15)) * 0x846CA68B) & _ALL
    kept = (hashed ^ (hashed >> 16)) >> 8 >= round(probability * 2**24)
    return torch.where(kept, x / (1 - probability), 0)


# Compiled by Triton from their source.
def _keeps(seed, places, probability):  # type: ignore[no-untyped-def]
    hashed = places.to(tl.uint32) * 0x9E3779B1 + seed
    hashed = (hashed ^ (hashed >> 16)) * 0x7FEB352D
    hashed = (hashed ^ (hashed >> 15)) * 0x846CA68B
    return ((hashed ^ (hashed >> 16)) >> 8).to(tl.float32) >= probability * 16777216.0


def _low_product(  # type: ignore[no-untyped-def]
    x, first, seeds, out, rows, width, x_stride, first_stride, out_stride, probability, factor,
    RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    layer = tl.program_id(1)
    seed = tl.load(seeds + layer).to(tl.uint32)
    rank = tl.arange(0, RANKS)[None, :]
    total = tl.zeros((ROWS, RANKS), tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        there = (row < rows) & (column < width)[None, :]
        given = tl.load(x + row * x_stride + column[None, :], mask=there, other=0.0)
        kept = _keeps(seed, row * width + column[None, :], probability)  # type: ignore[no-untyped-call]
        read = tl.where(kept, given.to(tl.float32) / (1 - probability), 0.0).to(given.dtype)
        place = first + (layer * RANK + rank) * first_stride + column[:, None]
        known = (rank < RANK) & (column < width)[:, None]
        factors = tl.load(place, mask=known, other=0.0)
        total = tl.dot(read, factors, total, input_precision=PRECISION)
    place = out + row * out_stride + layer * RANK + rank
    tl.store(place, (total * factor).to(out.dtype.element_ty), mask=(row < rows) & (rank < RANK))


def _add_to_input(  # type: ignore[no-untyped-def]
    below, first, seeds, out, rows, width, below_stride, first_stride, out_stride, probability,
    LAYERS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    there = (row < rows) & (column < width)
    total = tl.load(out + row * out_stride + column, mask=there, other=0.0).to(tl.float32)
    for layer in tl.static_range(LAYERS):
        seed = tl.load(seeds + layer).to(tl.uint32)
        rank = tl.arange(0, RANKS)
        place = below + row * below_stride + layer * RANK + rank[None, :]
        given = tl.load(place, mask=(row < rows) & (rank < RANK)[None, :], other=0.0)
        place = first + (layer * RANK + rank)[:, None] * first_stride + column
        known = (rank < RANK)[:, None] & (column < width)
        factors = tl.load(place, mask=known, other=0.0)
        made = tl.dot(given, factors, input_precision=PRECISION)
        kept = _keeps(seed, row * width + column, probability)  # type: ignore[no-untyped-call]
        total += tl.where(kept, made / (1 - probability), 0.0)
    tl.store(out + row * out_stride + column, total.to(out.dtype.element_ty), mask=there)


def _of_first(  # type: ignore[no-untyped-def]
    below, x, seeds, out, rows, width, ranks, below_stride, x_stride, probability,
    RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    layer, part = tl.program_id(1), tl.program_id(2)
    seed = tl.load(seeds + layer).to(tl.uint32)
    rank = tl.arange(0, RANKS)
    total = tl.zeros((RANKS, COLUMNS), tl.float32)
    for start in range(0, PART, ROWS):
        row = (part * PART + start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        there = (row < rows) & (column < width)
        given = tl.load(x + row * x_stride + column, mask=there, other=0.0)
        kept = _keeps(seed, row * width + column, probability)  # type: ignore[no-untyped-call]
        read = tl.where(kept, given.to(tl.float32) / (1 - probability), 0.0).to(given.dtype)
        place = below + row * below_stride + layer * RANK + rank[None, :]
        above = tl.load(place, mask=(row < rows) & (rank < RANK)[None, :], other=0.0)
        total = tl.dot(tl.trans(above), read, total, input_precision=PRECISION)
    place = out + (part * ranks + layer * RANK + rank)[:, None].to(tl.int64) * width + column
    tl.store(place, total, mask=(rank < RANK)[:, None] & (column < width))

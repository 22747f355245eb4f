"""Between the grouped products of a mixture's experts: the rows of all experts are gathered, gated
and multiplied by their narrow adapters, as Triton kernels.

Rows are sorted by expert. A program takes some neighbouring ones, and for each expert among them
the matrix of its adapter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from expert.model.fused.kernels import swiglu_backward
from expert.model.fused.launching import kernel, power, precision_of, uses_triton, wide_of
from expert.model.fused.swiglu_with_adapter import MOST_RANKS, gate_share

tl: Any = None  # set by `kernel`
INLINED = ("gate_share",)
WIDE = 8
"""Columns of grouped products are multiples of it: they read 16 bytes at once."""
ROWS, COLUMNS = 64, 128
"""Of values that a program has at once."""
PARTS = 4
"""Of an expert's rows that are summed at the same time: some experts have many times the rows of
others."""


class Routes(NamedTuple):
    """The chosen experts of all tokens, sorted by expert."""

    order: Tensor
    """Of each row, its place in the unsorted list."""
    inverse: Tensor
    """[tokens, chosen]: the rows of each token."""
    ends: Tensor
    """Of each expert's rows."""
    experts: Tensor
    """Of each row."""

    @property
    def tokens(self) -> Tensor:
        """Of each row."""
        return self.order // self.inverse.shape[1]


def routes_of(chosen: Tensor, experts: int) -> Routes:
    """`chosen`: [tokens, chosen], numbers of experts."""
    numbers, order = torch.sort(chosen.reshape(-1), stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    every = torch.arange(experts, device=order.device)
    ends = torch.searchsorted(numbers, every, right=True).to(torch.int32)
    return Routes(order, inverse.view(chosen.shape), ends, numbers.to(torch.int32))


def gathered_with_low(values: Tensor, routes: Routes, into: Tensor) -> tuple[Tensor, Tensor]:
    """The values of each row's token, and beside them their products with the expert's matrix in
    `into`, [experts, width, ranks]; and these products alone."""
    if not into.shape[2]:
        rows = values[routes.tokens]
        return rows, add_low(rows, routes, into)
    rows = values.new_empty(len(routes.experts), sum(into.shape[1:]))
    if not _fills_tiles(values, routes, into):
        rows[:, : values.shape[1]] = values[routes.tokens]
        return rows, add_low(rows, routes, into)
    return rows, _run_low(values, rows, routes, into, routes.tokens)


def add_low(rows: Tensor, routes: Routes, into: Tensor) -> Tensor:
    """Multiply the first columns of rows by the expert's matrix in `into`, [experts, width, ranks],
    write that into the other columns, and return it."""
    width, ranks = into.shape[1:]
    if not ranks:
        return rows.new_empty(len(rows), 0)
    if _fills_tiles(rows, routes, into):
        return _run_low(rows, rows, routes, into)
    low = grouped(rows[:, :width], into, routes.ends)
    rows[:, width:] = low
    return low


def _run_low(
    values: Tensor, out: Tensor, routes: Routes, into: Tensor, tokens: Tensor | None = None
) -> Tensor:
    count, (width, ranks) = len(out), into.shape[1:]
    low: Tensor = values.new_empty(count, ranks)
    kernel(_rows_with_low)[(-(-count // ROWS),)](
        values, low if tokens is None else tokens, routes.experts, into, out, low,
        count, width, ranks, values.stride(0), *into.stride(), out.stride(0),
        GATHERED=tokens is not None, **_sizes(values, ranks),
    )  # fmt: skip
    return low


def gated_backward(gate_up: Tensor, gradient: Tensor, share: Tensor, out: Tensor) -> Tensor:
    """From the gradient of silu(gate) * up before it is weighted by each row's share: that of
    [gate | up] into `out`, and that of the shares. `gradient` becomes silu(gate) * up."""
    count, width = gradient.shape
    if not uses_triton(gate_up):
        unweighted = gradient.clone()
        gradient *= share[:, None].to(gradient.dtype)
        swiglu_backward(gate_up, gradient, out=out)
        of_each: Tensor = torch.linalg.vecdot(unweighted, gradient)
        return of_each
    of_share = gate_up.new_empty(count, dtype=torch.float32)
    kernel(_gated_backward)[(count,)](
        gate_up, gradient, share, out, of_share, width, gate_up.stride(0), gradient.stride(0),
        out.stride(0), BLOCK=power(width), num_warps=4,
    )  # fmt: skip
    return of_share


def outer(
    low: Tensor,
    values: Tensor,
    routes: Routes,
    tokens: Tensor | None = None,
    share: Tensor | None = None,
) -> Tensor:
    """low' values over the rows of each expert, [experts, ranks, width] in float32 at least.
    `tokens`: whose values are a row's; `share`: what a row's `low` is multiplied by."""
    ranks, width, experts = low.shape[1], values.shape[1], len(routes.ends)
    if not _multiplies(values, ranks):
        low = low if share is None else low * share[:, None].to(low.dtype)
        values = values if tokens is None else values[tokens]
        if _has_product(values, ranks, width):
            product: Tensor = _grouped_mm()(low.mT, values, offs=routes.ends)
            return product.float()
        spans = _spans(routes.ends)
        each = [low[start:end].mT @ values[start:end] for start, end in spans]
        return torch.stack(each).to(wide_of(values))
    parts = values.new_empty(PARTS, experts, ranks, width, dtype=torch.float32)
    kernel(_outer)[(experts, -(-width // COLUMNS), PARTS)](
        low, values, low if tokens is None else tokens, low if share is None else share,
        routes.ends, parts, width, ranks, low.stride(0), values.stride(0),
        GATHERED=tokens is not None, SHARED=share is not None, **_sizes(values, ranks),
    )  # fmt: skip
    return parts.sum(0)


def gathered_sum(rows: Tensor, places: Tensor, shares: Tensor | None = None) -> Tensor:
    """The sum of each token's rows, weighted by its shares: in a fixed order, in float32."""
    count, width = len(places), rows.shape[1]
    if not uses_triton(rows):
        each = rows[places]
        each = each if shares is None else each * shares[..., None].to(each.dtype)
        return each.sum(dim=1)
    out, columns = rows.new_empty(count, width), 1024
    kernel(_gathered_sum)[(count, -(-width // columns))](
        rows, places, rows if shares is None else shares, out, width, rows.stride(0),
        CHOSEN=places.shape[1], WEIGHTED=shares is not None, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return out


def grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows up to each expert's end times its matrix in weights [experts, inputs, outputs]."""
    if _has_product(rows, *weights.shape[1:]):
        product: Tensor = _grouped_mm()(rows, weights, offs=ends)
        return product
    made = rows.new_empty(len(rows), weights.shape[2])
    for expert, (start, end) in enumerate(_spans(ends)):
        made[start:end] = rows[start:end] @ weights[expert]
    return made


def _has_product(like: Tensor, *widths: int) -> bool:
    return like.is_cuda and like.dtype == torch.bfloat16 and not any(n % WIDE for n in widths)


def _grouped_mm() -> Any:
    return getattr(F, "grouped_mm", None) or torch._grouped_mm


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    whole = ends.tolist()
    return list(zip([0, *whole[:-1]], whole, strict=True))


def _fills_tiles(values: Tensor, routes: Routes, into: Tensor) -> bool:
    """Whether a program has rows of few experts, one after the other; not when few tokens are
    answered, of which each chose others."""
    enough = len(routes.experts) >= ROWS * len(routes.ends)
    return enough and _multiplies(values, into.shape[2])


def _multiplies(values: Tensor, ranks: int) -> bool:
    return uses_triton(values) and ranks <= MOST_RANKS


def _sizes(values: Tensor, ranks: int) -> dict[str, Any]:
    tile = {"RANKS": max(16, power(ranks)), "ROWS": ROWS, "COLUMNS": COLUMNS}
    stages = 3 if values.element_size() == 2 else 2  # of shared memory
    return {**tile, "PRECISION": precision_of(values), "num_warps": 4, "num_stages": stages}


# Compiled by Triton from their source.
def _rows_with_low(  # type: ignore[no-untyped-def]
    values, tokens, experts, into, out, low, rows, width, ranks,
    values_stride, into_expert, into_row, into_rank, out_stride,
    GATHERED: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * ROWS
    row = (begin + tl.arange(0, ROWS)).to(tl.int64)
    there = row < rows
    expert = tl.load(experts + row, mask=there, other=-1)
    token = row
    if GATHERED:
        token = tl.load(tokens + row, mask=there, other=0)
    rank = tl.arange(0, RANKS)[None, :]
    total = tl.zeros((ROWS, RANKS), tl.float32)
    first = tl.load(experts + begin).to(tl.int64)
    last = tl.load(experts + tl.minimum(begin + ROWS, rows) - 1).to(tl.int64)
    for one in range(first, last + 1):
        mine = (expert == one)[:, None]
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            known = mine & (column < width)[None, :]
            place = values + token[:, None] * values_stride + column[None, :]
            value = tl.load(place, mask=known, other=0.0)
            if GATHERED:
                tl.store(out + row[:, None] * out_stride + column[None, :], value, mask=known)
            at = into + one * into_expert + column[:, None] * into_row
            known = (column < width)[:, None] & (rank < ranks)
            matrix = tl.load(at + rank * into_rank, mask=known, other=0.0)
            total = tl.dot(value, matrix, total, input_precision=PRECISION)
    known = there[:, None] & (rank < ranks)
    made = total.to(out.dtype.element_ty)
    tl.store(out + row[:, None] * out_stride + width + rank, made, mask=known)
    tl.store(low + row[:, None] * ranks + rank, made, mask=known)


def _gated_backward(  # type: ignore[no-untyped-def]
    both, gradient, shares, out, of_share, width, both_stride, gradient_stride, out_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    there = column < width
    place = both + row * both_stride + column
    given = tl.load(place, mask=there, other=0.0)
    gate = given.to(tl.float32)
    up = tl.load(place + width, mask=there, other=0.0).to(tl.float32)
    made_at = gradient + row * gradient_stride + column
    of_made = tl.load(made_at, mask=there, other=0.0).to(tl.float32)
    share, growth = gate_share(gate, False)
    made = (gate * share * up).to(given.dtype)
    tl.store(of_share + row, tl.sum(of_made * made.to(tl.float32)))
    of_made *= tl.load(shares + row).to(tl.float32)
    target = out + row * out_stride + column
    of_gate = of_made * up * share * (1 + growth)
    tl.store(target, of_gate.to(given.dtype), mask=there)
    tl.store(target + width, (of_made * gate * share).to(given.dtype), mask=there)
    tl.store(made_at, made, mask=there)


def _outer(  # type: ignore[no-untyped-def]
    low, values, tokens, shares, ends, parts, width, ranks, low_stride, values_stride,
    GATHERED: tl.constexpr, SHARED: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    rank = tl.arange(0, RANKS)
    total = tl.zeros((RANKS, COLUMNS), tl.float32)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    own, every = tl.program_id(2), tl.num_programs(2)
    for start in range(begin + own * ROWS, end, every * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        there = (row < end)[:, None]
        left = tl.load(
            low + row[:, None] * low_stride + rank[None, :],
            mask=there & (rank < ranks)[None, :], other=0.0,
        )  # fmt: skip
        if SHARED:
            share = tl.load(shares + row, mask=row < end, other=0.0).to(tl.float32)
            left = (left.to(tl.float32) * share[:, None]).to(left.dtype)
        token = row
        if GATHERED:
            token = tl.load(tokens + row, mask=row < end, other=0)
        known = there & (column < width)
        right = tl.load(values + token[:, None] * values_stride + column, mask=known, other=0.0)
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
    known = (rank < ranks)[:, None] & (column < width)
    place = ((own * tl.num_programs(0) + expert) * ranks + rank[:, None]).to(tl.int64)
    tl.store(parts + place * width + column, total, mask=known)


def _gathered_sum(  # type: ignore[no-untyped-def]
    rows, places, shares, out, width, stride,
    CHOSEN: tl.constexpr, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = columns < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for index in range(CHOSEN):
        row = tl.load(places + token * CHOSEN + index)
        value = tl.load(rows + row * stride + columns, mask=there, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(shares + token * CHOSEN + index).to(tl.float32)
        total += value
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=there)

"""Between the grouped products of a mixture's experts: the rows of all experts are gathered, gated
and multiplied by narrow adapters in one pass over memory each, as Triton kernels.

Rows are sorted by expert. A program takes some neighbouring ones, and for each expert among them
the matrix of its adapter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from expert.model.fused.kernels import swiglu, swiglu_backward
from expert.model.fused.launching import kernel, power, precision_of, uses_triton, wide_of
from expert.model.fused.swiglu_with_adapter import gate_share

tl: Any = None  # set by `kernel`
INLINED = ("gate_share",)
WIDE = 8
"""Columns of grouped products are multiples of it: they read 16 bytes at once."""
MOST_RANKS = 128
"""Largest rank that one program multiplies."""
ROWS, COLUMNS = 64, 128
"""Of values that a program has at once."""


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


def rows_with_low(
    values: Tensor,
    routes: Routes,
    into: Tensor,
    tokens: Tensor | None = None,
    *,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """The values of each row (of its token, if `tokens` are given; `gated`: silu(gate) * up of
    [gate | up]) and beside them their products with the expert's matrix in `into`, [experts, width,
    ranks]; and these products alone."""
    width, ranks = into.shape[1:]
    count = len(values) if tokens is None else len(tokens)
    out = values.new_empty(count, width + ranks)
    if not _multiplies(values, ranks):
        if gated:
            swiglu(values, out[:, :width])
        else:
            out[:, :width] = values if tokens is None else values[tokens]
        low = grouped(out[:, :width], into, routes.ends)
        out[:, width:] = low
        return out, low
    low = values.new_empty(count, ranks)
    kernel(_rows_with_low)[(-(-count // ROWS),)](
        values, low if tokens is None else tokens, routes.experts, into, out, low,
        count, width, ranks, values.stride(0), *into.stride(), out.stride(0),
        GATHERED=tokens is not None, GATED=gated, ADAPTED=ranks > 0, **_sizes(values, ranks),
        num_warps=4,
    )  # fmt: skip
    return out, low


def gated_backward(
    gate_up: Tensor, gradient: Tensor, share: Tensor, routes: Routes, into: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient of silu(gate) * up before it is weighted by each row's share: that of
    [gate | up] with its products with the expert's matrix beside it, these alone, and that of the
    shares. `gradient` becomes silu(gate) * up."""
    count, width = gradient.shape
    ranks = into.shape[2]
    out = gate_up.new_empty(count, 2 * width + ranks)
    if not _multiplies(gate_up, ranks):
        unweighted = gradient.clone()
        gradient *= share[:, None].to(gradient.dtype)
        swiglu_backward(gate_up, gradient, out=out[:, : 2 * width])
        low = grouped(out[:, : 2 * width], into, routes.ends)
        out[:, 2 * width :] = low
        return out, low, torch.linalg.vecdot(unweighted, gradient)
    low = gate_up.new_empty(count, ranks)
    of_share = gate_up.new_empty(count, dtype=torch.float32)
    kernel(_gated_backward)[(-(-count // ROWS),)](
        gate_up, gradient, share, routes.experts, into, out, low, of_share,
        count, width, ranks, gate_up.stride(0), gradient.stride(0), *into.stride(), out.stride(0),
        ADAPTED=ranks > 0, **_sizes(gate_up, ranks), num_warps=4,
    )  # fmt: skip
    return out, low, of_share


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
        spans = _spans(routes.ends)
        each = [low[start:end].mT @ values[start:end] for start, end in spans]
        return torch.stack(each).to(wide_of(values))
    out = values.new_empty(experts, ranks, width, dtype=torch.float32)
    kernel(_outer)[(experts, -(-width // COLUMNS))](
        low, values, low if tokens is None else tokens, low if share is None else share,
        routes.ends, out, width, ranks, low.stride(0), values.stride(0),
        GATHERED=tokens is not None, SHARED=share is not None, **_sizes(values, ranks),
        num_warps=4,
    )  # fmt: skip
    return out


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
    if (
        rows.is_cuda
        and rows.dtype == torch.bfloat16
        and not any(n % WIDE for n in weights.shape[1:])
    ):
        run: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm
        made: Tensor = run(rows, weights, offs=ends)
        return made
    made = rows.new_empty(len(rows), weights.shape[2])
    for expert, (start, end) in enumerate(_spans(ends)):
        made[start:end] = rows[start:end] @ weights[expert]
    return made


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    whole = ends.tolist()
    return list(zip([0, *whole[:-1]], whole, strict=True))


def _multiplies(values: Tensor, ranks: int) -> bool:
    return uses_triton(values) and ranks <= MOST_RANKS


def _sizes(values: Tensor, ranks: int) -> dict[str, Any]:
    tile = {"RANKS": max(16, power(ranks)), "ROWS": ROWS, "COLUMNS": COLUMNS}
    return {**tile, "PRECISION": precision_of(values)}


# Compiled by Triton from their source.
def _rows_with_low(  # type: ignore[no-untyped-def]
    values, tokens, experts, into, out, low, rows, width, ranks,
    values_stride, into_expert, into_row, into_rank, out_stride,
    GATHERED: tl.constexpr, GATED: tl.constexpr, ADAPTED: tl.constexpr, RANKS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
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
            if GATED:
                gate = value.to(tl.float32)
                up = tl.load(place + width, mask=known, other=0.0).to(tl.float32)
                share, _ = gate_share(gate, False)
                value = (gate * share * up).to(value.dtype)
            tl.store(out + row[:, None] * out_stride + column[None, :], value, mask=known)
            if ADAPTED:
                at = into + one * into_expert + column[:, None] * into_row
                known = (column < width)[:, None] & (rank < ranks)
                matrix = tl.load(at + rank * into_rank, mask=known, other=0.0)
                total = tl.dot(value, matrix, total, input_precision=PRECISION)
    if ADAPTED:
        known = there[:, None] & (rank < ranks)
        made = total.to(out.dtype.element_ty)
        tl.store(out + row[:, None] * out_stride + width + rank, made, mask=known)
        tl.store(low + row[:, None] * ranks + rank, made, mask=known)


def _gated_backward(  # type: ignore[no-untyped-def]
    both, gradient, shares, experts, into, out, low, of_share, rows, width, ranks,
    both_stride, gradient_stride, into_expert, into_row, into_rank, out_stride,
    ADAPTED: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * ROWS
    row = (begin + tl.arange(0, ROWS)).to(tl.int64)
    there = row < rows
    expert = tl.load(experts + row, mask=there, other=-1)
    weight = tl.load(shares + row, mask=there, other=0.0).to(tl.float32)[:, None]
    rank = tl.arange(0, RANKS)[None, :]
    total = tl.zeros((ROWS, RANKS), tl.float32)
    of_weight = tl.zeros((ROWS,), tl.float32)
    first = tl.load(experts + begin).to(tl.int64)
    last = tl.load(experts + tl.minimum(begin + ROWS, rows) - 1).to(tl.int64)
    for one in range(first, last + 1):
        mine = (expert == one)[:, None]
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            known = mine & (column < width)[None, :]
            place = both + row[:, None] * both_stride + column[None, :]
            given = tl.load(place, mask=known, other=0.0)
            gate = given.to(tl.float32)
            up = tl.load(place + width, mask=known, other=0.0).to(tl.float32)
            made_at = gradient + row[:, None] * gradient_stride + column[None, :]
            of_made = tl.load(made_at, mask=known, other=0.0).to(tl.float32)
            share, growth = gate_share(gate, False)
            made = (gate * share * up).to(given.dtype)
            of_weight += tl.sum(of_made * made.to(tl.float32), 1)
            of_made *= weight
            of_gate = (of_made * up * share * (1 + growth)).to(given.dtype)
            of_up = (of_made * gate * share).to(given.dtype)
            target = out + row[:, None] * out_stride + column[None, :]
            tl.store(target, of_gate, mask=known)
            tl.store(target + width, of_up, mask=known)
            tl.store(made_at, made, mask=known)
            if ADAPTED:
                at = into + one * into_expert + column[:, None] * into_row
                at += rank * into_rank
                known = (column < width)[:, None] & (rank < ranks)
                matrix = tl.load(at, mask=known, other=0.0)
                total = tl.dot(of_gate, matrix, total, input_precision=PRECISION)
                matrix = tl.load(at + width * into_row, mask=known, other=0.0)
                total = tl.dot(of_up, matrix, total, input_precision=PRECISION)
    tl.store(of_share + row, of_weight, mask=there)
    if ADAPTED:
        known = there[:, None] & (rank < ranks)
        made = total.to(out.dtype.element_ty)
        tl.store(out + row[:, None] * out_stride + 2 * width + rank, made, mask=known)
        tl.store(low + row[:, None] * ranks + rank, made, mask=known)


def _outer(  # type: ignore[no-untyped-def]
    low, values, tokens, shares, ends, out, width, ranks, low_stride, values_stride,
    GATHERED: tl.constexpr, SHARED: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    rank = tl.arange(0, RANKS)
    total = tl.zeros((RANKS, COLUMNS), tl.float32)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    for start in range(begin, end, ROWS):
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
    place = out + (expert * ranks + rank[:, None]).to(tl.int64) * width + column
    tl.store(place, total, mask=known)


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

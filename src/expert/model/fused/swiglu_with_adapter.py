"""SwiGLU that adds the adapter to its inputs while reading them.

Products with FP8 weights come without the adapter and scaled (float8.py). Adding it where SwiGLU
reads them saves a pass over memory: in an 8B model, two thirds of all such passes. Sums stay in
float32 until SwiGLU has used them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from expert.model.fused.launching import kernel, power, precision_of, wide_of

tl: Any = None  # set by `kernel`
INLINED = ("_sum", "_gate_and_up", "gate_share")
TWICE_ROOT, CUBIC = 1.5957691216057308, 0.044715
"""GELU by tanh is x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))."""
TILE, TILE_BACK = (64, 64), (16, 256)
"""Rows and columns of one program, forward and backward: the fastest of 30 tried on an H200. With
float32 inputs Triton 3.6 computes wrong gradients with the second one there, and right ones with
(64, 64), (32, 128), (16, 128) and (64, 256)."""
MOST_RANKS = 128
"""Largest total rank that one program multiplies."""


class DeferredAdapter(NamedTuple):
    """What is missing from a product: the full value is product * factor + low second^T."""

    low: Tensor
    second: Tensor
    factor: float

    def onto(self, product: Tensor) -> Tensor:
        """The full value, as kernels compute it."""
        wide = wide_of(product)
        return product.to(wide) * self.factor + self.low.to(wide) @ self.second.to(wide).t()

    def given(self, name: str) -> dict[str, Any]:
        """Kernel arguments, with `name` as prefix."""
        ranks = self.low.shape[1]
        values = {
            "low": self.low, "second": self.second, "factor": self.factor, "ranks": ranks,
            "low_stride": self.low.stride(0), "second_stride": self.second.stride(0),
            "second_rank": self.second.stride(1), "RANKS": max(16, power(ranks)),
        }  # fmt: skip
        return {f"{name}_{key}": value for key, value in values.items()}


def swiglu_with_adapter(
    both: Tensor, rest: DeferredAdapter, bias: Tensor | None, out: Tensor, *, gelu: bool
) -> None:
    """silu(gate) * up of [gate | up] + rest, into `out`, which may be strided."""
    rows, width = out.shape
    kernel(_swiglu_with_adapter)[_programs(rows, width, TILE)](
        both, out, both if bias is None else bias, rows, width, both.stride(0), out.stride(0),
        **rest.given("made"), BIASED=bias is not None, GELU=gelu, ROWS=TILE[0], COLUMNS=TILE[1],
        PRECISION=precision_of(both), num_warps=4,
    )  # fmt: skip


def swiglu_with_adapter_backward(
    both: Tensor,
    rest: DeferredAdapter,
    bias: Tensor | None,
    gradient: Tensor,
    of_gradient: DeferredAdapter | None,
    *,
    gelu: bool,
) -> Tensor:
    """The gradient of the full [gate | up]; replaces `gradient` with the output of SwiGLU.
    `of_gradient`: what `gradient` itself is missing."""
    rows, width = gradient.shape
    of_both = torch.empty_like(both)
    lacks = of_gradient is not None
    tile = TILE if both.dtype == torch.float32 else TILE_BACK
    kernel(_swiglu_with_adapter_backward)[_programs(rows, width, tile)](
        both, gradient, of_both, both if bias is None else bias, rows, width,
        both.stride(0), gradient.stride(0), **rest.given("made"),
        **(of_gradient or rest).given("given"), BIASED=bias is not None, LACKS=lacks,
        GELU=gelu, ROWS=tile[0], COLUMNS=tile[1], PRECISION=precision_of(both), num_warps=4,
    )  # fmt: skip
    return of_both


def _programs(rows: int, width: int, tile: tuple[int, int]) -> tuple[int, int]:
    return -(-rows // tile[0]), -(-width // tile[1])


# Compiled by Triton from their source.
def gate_share(gate, GELU: tl.constexpr):  # type: ignore[no-untyped-def]
    """The share of the gate that its activation lets through, and how it grows: the gate times the
    derivative of the share, over the share."""
    if GELU:
        square = gate * gate
        share = tl.sigmoid(1.5957691216057308 * gate * (1 + 0.044715 * square))
        growth = gate * (1 - share) * (1.5957691216057308 * (1 + 0.134145 * square))
    else:
        share = tl.sigmoid(gate)
        growth = gate * (1 - share)
    return share, growth


def _sum(  # type: ignore[no-untyped-def]
    place, low, second, there, row, column, rows, width, factor, ranks, low_stride, second_stride,
    second_rank, RANKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The full value at `place`: product * factor + low second^T."""
    total = tl.load(place, mask=there, other=0.0).to(tl.float32) * factor
    rank = tl.arange(0, RANKS)
    known = (row < rows) & (rank < ranks)[None, :]
    left = tl.load(low + row * low_stride + rank[None, :], mask=known, other=0.0)
    known = (column < width) & (rank < ranks)[:, None]
    at = second + column * second_stride + rank[:, None] * second_rank
    right = tl.load(at, mask=known, other=0.0)
    return tl.dot(left, right, total, input_precision=PRECISION)


def _gate_and_up(  # type: ignore[no-untyped-def]
    both, there, row, column, rows, width, both_stride, bias, low, second, factor, ranks,
    low_stride, second_stride, second_rank, RANKS: tl.constexpr, BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    place = both + row * both_stride + column
    gate = _sum(
        place, low, second, there, row, column, rows, width, factor, ranks, low_stride,
        second_stride, second_rank, RANKS, PRECISION,
    )  # fmt: skip
    up = _sum(
        place + width, low, second + width * second_stride, there, row, column, rows, width,
        factor, ranks, low_stride, second_stride, second_rank, RANKS, PRECISION,
    )  # fmt: skip
    if BIASED:
        gate += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
        up += tl.load(bias + width + column, mask=column < width, other=0.0).to(tl.float32)
    return gate, up


def _swiglu_with_adapter(  # type: ignore[no-untyped-def]
    both, out, bias, rows, width, both_stride, out_stride, made_low, made_second, made_factor,
    made_ranks, made_low_stride, made_second_stride, made_second_rank, made_RANKS: tl.constexpr,
    BIASED: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    there = (row < rows) & (column < width)
    gate, up = _gate_and_up(
        both, there, row, column, rows, width, both_stride, bias, made_low, made_second,
        made_factor, made_ranks, made_low_stride, made_second_stride, made_second_rank, made_RANKS,
        BIASED, PRECISION,
    )  # fmt: skip
    share, _ = gate_share(gate, GELU)
    made = gate * share * up
    tl.store(out + row * out_stride + column, made.to(out.dtype.element_ty), mask=there)


def _swiglu_with_adapter_backward(  # type: ignore[no-untyped-def]
    both, gradient, out, bias, rows, width, both_stride, gradient_stride,
    made_low, made_second, made_factor, made_ranks, made_low_stride, made_second_stride,
    made_second_rank, given_low, given_second, given_factor, given_ranks, given_low_stride,
    given_second_stride, given_second_rank, made_RANKS: tl.constexpr, given_RANKS: tl.constexpr,
    BIASED: tl.constexpr, LACKS: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    there = (row < rows) & (column < width)
    gate, up = _gate_and_up(
        both, there, row, column, rows, width, both_stride, bias, made_low, made_second,
        made_factor, made_ranks, made_low_stride, made_second_stride, made_second_rank, made_RANKS,
        BIASED, PRECISION,
    )  # fmt: skip
    target = gradient + row * gradient_stride + column
    if LACKS:
        of_made = _sum(
            target, given_low, given_second, there, row, column, rows, width, given_factor,
            given_ranks, given_low_stride, given_second_stride, given_second_rank, given_RANKS,
            PRECISION,
        )  # fmt: skip
    else:
        of_made = tl.load(target, mask=there, other=0.0).to(tl.float32)
    share, growth = gate_share(gate, GELU)
    of_gate = of_made * up * share * (1 + growth)
    kind = out.dtype.element_ty
    place = out + row * both_stride + column
    tl.store(place, of_gate.to(kind), mask=there)
    tl.store(place + width, (of_made * gate * share).to(kind), mask=there)
    tl.store(target, (gate * share * up).to(gradient.dtype.element_ty), mask=there)

"""Causal attention within each document of packed rows, for documents of some hundred tokens.

Tiles begin where a document begins, so that none is shared by two, and a program knows from a list
which tile is its own: no launch is as large as the longest document times the number of documents.
The heads that share keys are summed in the program of these keys. Nothing is added atomically: the
same inputs give the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from expert.model.fused.launching import kernel, power, precision_of, with_even_columns

tl: Any = None  # set by `kernel`
INLINED = ("_part", "_attend_step", "_of_queries_step")
TILE, STEP = 64, 32
"""Tokens of a tile, and those that its program reads at once: of 25 ways the fastest on an H200, or
within 3 % of it, for documents of 118 and 333 tokens on average (attention-h200.json)."""
WIDEST = 128
"""Columns of a head."""
TO_BASE_2 = 1 / math.log(2)


def tiles_of(boundaries: Tensor, places: int) -> Tensor:
    """Of each tile: the document's start, the tile's place in the document, the document's length;
    [most tiles there can be, 3], unused ones of length 0. `boundaries`: starts of all documents,
    padded with `places`, the end of the last one."""
    lengths = torch.diff(boundaries, append=boundaries.new_full((1,), places))
    counts = (lengths + TILE - 1) // TILE
    until = counts.cumsum(0)
    numbers = torch.arange(len(boundaries) + places // TILE, device=boundaries.device)
    document = torch.searchsorted(until, numbers, right=True).clamp(max=len(boundaries) - 1)
    first = (numbers - (until - counts)[document]) * TILE
    length = torch.where(numbers < until[-1], lengths[document], 0)
    return torch.stack((boundaries[document], first, length), 1).to(torch.int32)


def attend_in_documents(
    query: Tensor, key: Tensor, value: Tensor, tiles: Tensor, scale: float | None
) -> Tensor:
    """queries [tokens, heads, width], keys and values [tokens, fewer heads, width]; `scale` of
    scores: by default the inverse root of the width."""
    scale = query.shape[2] ** -0.5 if scale is None else scale
    run: Any = DocumentAttention.apply
    made: Tensor = run(query, key, value, tiles, scale)
    return made


class DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, tiles: Tensor, scale: float
    ) -> Tensor:
        tokens, heads, _ = query.shape
        query, key, value = (with_even_columns(part) for part in (query, key, value))
        out = query.new_empty(query.shape)
        sums = query.new_empty(heads, tokens, dtype=torch.float32)
        kernel(_attend)[(len(tiles), heads)](
            query, key, value, out, sums, tiles, scale * TO_BASE_2, tokens,
            *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *out.stride()[:2],
            GROUP=heads // key.shape[1], **_sizes(query),
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, out, sums, tiles)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        query, key, value, out, sums, tiles = ctx.saved_tensors
        tokens, heads, _ = query.shape
        gradient, scale = with_even_columns(gradients[0]), ctx.scale
        of_query, of_key, of_value = (part.new_empty(part.shape) for part in (query, key, value))
        deltas = torch.empty_like(sums)
        strides = [part.stride(axis) for part in (query, key, value, gradient) for axis in (0, 1)]
        sizes = {"GROUP": heads // key.shape[1], **_sizes(query)}
        kernel(_of_queries)[(len(tiles), heads)](
            query, key, value, out, gradient, sums, deltas, of_query, tiles, scale * TO_BASE_2,
            scale, tokens, *strides, *out.stride()[:2], *of_query.stride()[:2],
            **sizes,
        )  # fmt: skip
        kernel(_of_keys)[(len(tiles), key.shape[1])](
            query, key, value, gradient, sums, deltas, of_key, of_value, tiles, scale * TO_BASE_2,
            scale, tokens, *strides, *of_key.stride()[:2],
            **sizes,
        )  # fmt: skip
        return of_query, of_key, of_value, None, None


def _sizes(query: Tensor) -> dict[str, Any]:
    width = query.shape[2]
    sizes = {"WIDTH": width, "COLUMNS": max(16, power(width)), "TILE": TILE, "STEP": STEP}
    options = {"PRECISION": precision_of(query), "num_warps": 4, "num_stages": 2}
    return {**sizes, **options}


# Compiled by Triton from their source.
def _part(place, rows, stride, until, inside, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some rows of [tokens, columns]; `until`: those from there on are 0 if MASKED."""
    known = (rows < until)[:, None] & inside if MASKED else inside
    column = tl.arange(0, inside.shape[1])[None, :]
    return tl.load(place + rows[:, None] * stride + column, mask=known, other=0.0)


def _attend_step(  # type: ignore[no-untyped-def]
    queries, row, key, value, begin, length, inside, scale, key_stride, value_stride, highest,
    total, made, STEP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    at = begin + tl.arange(0, STEP)
    keys = _part(key, at, key_stride, length, inside, MASKED)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
    if MASKED:
        scores = tl.where(row[:, None] >= at[None, :], scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrunk = tl.exp2(highest - higher)
    total = total * shrunk + tl.sum(weights, 1)
    values = _part(value, at, value_stride, length, inside, MASKED)
    made = tl.dot(
        weights.to(values.dtype), values, made * shrunk[:, None], input_precision=PRECISION
    )
    return higher, total, made


def _attend(  # type: ignore[no-untyped-def]
    query, key, value, out, sums, tiles, scale, tokens,
    query_stride, query_head, key_stride, key_head, value_stride, value_head, out_stride, out_head,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = tl.load(tiles + 3 * tile).to(tl.int64)
    first, length = tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    if length == 0:
        return
    row, column = first + tl.arange(0, TILE), tl.arange(0, COLUMNS)
    inside = (column < WIDTH)[None, :]
    queries = _part(
        query + start * query_stride + head * query_head, row, query_stride, length, inside, True
    )
    key += start * key_stride + (head // GROUP) * key_head
    value += start * value_stride + (head // GROUP) * value_head
    highest = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    made = tl.zeros((TILE, COLUMNS), tl.float32)
    for begin in range(0, first, STEP):
        highest, total, made = _attend_step(
            queries, row, key, value, begin, length, inside, scale, key_stride, value_stride,
            highest, total, made, STEP, False, PRECISION,
        )  # fmt: skip
    for begin in range(first, tl.minimum(first + TILE, length), STEP):
        highest, total, made = _attend_step(
            queries, row, key, value, begin, length, inside, scale, key_stride, value_stride,
            highest, total, made, STEP, True, PRECISION,
        )  # fmt: skip
    place = out + (start + row)[:, None] * out_stride + head * out_head + column[None, :]
    known = (row < length)[:, None] & inside
    tl.store(place, (made / total[:, None]).to(queries.dtype), mask=known)
    tl.store(sums + head * tokens + start + row, highest + tl.log2(total), mask=row < length)


def _of_queries_step(  # type: ignore[no-untyped-def]
    queries, of_outputs, log_sum, delta, row, key, value, begin, length, inside, scale, key_stride,
    value_stride, made, STEP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    at = begin + tl.arange(0, STEP)
    keys = _part(key, at, key_stride, length, inside, MASKED)
    values = _part(value, at, value_stride, length, inside, MASKED)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
    weights = tl.exp2(scores - log_sum[:, None])
    if MASKED:
        weights = tl.where(row[:, None] >= at[None, :], weights, 0.0)
    of_weights = tl.dot(of_outputs, tl.trans(values), input_precision=PRECISION)
    of_scores = (weights * (of_weights - delta[:, None])).to(keys.dtype)
    return tl.dot(of_scores, keys, made, input_precision=PRECISION)


def _of_queries(  # type: ignore[no-untyped-def]
    query, key, value, out, gradient, sums, deltas, of_query, tiles, scale, factor, tokens,
    query_stride, query_head, key_stride, key_head, value_stride, value_head,
    gradient_stride, gradient_head, out_stride, out_head, made_stride, made_head,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = tl.load(tiles + 3 * tile).to(tl.int64)
    first, length = tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    if length == 0:
        return
    row, column = first + tl.arange(0, TILE), tl.arange(0, COLUMNS)
    inside = (column < WIDTH)[None, :]
    query += start * query_stride + head * query_head
    gradient += start * gradient_stride + head * gradient_head
    out += start * out_stride + head * out_head
    queries = _part(query, row, query_stride, length, inside, True)
    of_outputs = _part(gradient, row, gradient_stride, length, inside, True)
    output = _part(out, row, out_stride, length, inside, True)
    # What the gradient of softmax subtracts from a row's gradient.
    delta = tl.sum(of_outputs.to(tl.float32) * output.to(tl.float32), 1)
    place = head * tokens + start + row
    tl.store(deltas + place, delta, mask=row < length)
    log_sum = tl.load(sums + place, mask=row < length, other=0.0)
    key += start * key_stride + (head // GROUP) * key_head
    value += start * value_stride + (head // GROUP) * value_head
    made = tl.zeros((TILE, COLUMNS), tl.float32)
    for begin in range(0, first, STEP):
        made = _of_queries_step(
            queries, of_outputs, log_sum, delta, row, key, value, begin, length, inside, scale,
            key_stride, value_stride, made, STEP, False, PRECISION,
        )  # fmt: skip
    for begin in range(first, tl.minimum(first + TILE, length), STEP):
        made = _of_queries_step(
            queries, of_outputs, log_sum, delta, row, key, value, begin, length, inside, scale,
            key_stride, value_stride, made, STEP, True, PRECISION,
        )  # fmt: skip
    own = of_query + (start + row)[:, None] * made_stride + head * made_head + column[None, :]
    tl.store(own, (made * factor).to(queries.dtype), mask=(row < length)[:, None] & inside)


def _of_keys(  # type: ignore[no-untyped-def]
    query, key, value, gradient, sums, deltas, of_key, of_value, tiles, scale, factor, tokens,
    query_stride, query_head, key_stride, key_head, value_stride, value_head,
    gradient_stride, gradient_head, made_stride, made_head,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = tl.load(tiles + 3 * tile).to(tl.int64)
    first, length = tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    if length == 0:
        return
    at, column = first + tl.arange(0, TILE), tl.arange(0, COLUMNS)
    inside = (column < WIDTH)[None, :]
    keys = _part(key + start * key_stride + group * key_head, at, key_stride, length, inside, True)
    values = _part(
        value + start * value_stride + group * value_head, at, value_stride, length, inside, True
    )
    of_keys = tl.zeros((TILE, COLUMNS), tl.float32)
    of_values = tl.zeros((TILE, COLUMNS), tl.float32)
    for index in range(GROUP):
        head = group * GROUP + index
        query_at = query + start * query_stride + head * query_head
        gradient_at = gradient + start * gradient_stride + head * gradient_head
        place = head * tokens + start
        for begin in range(first, length, STEP):
            row = begin + tl.arange(0, STEP)
            valid = row < length
            # Queries past the end are 0, and so is what they would add.
            queries = _part(query_at, row, query_stride, length, inside, True)
            log_sum = tl.load(sums + place + row, mask=valid, other=0.0)
            scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * scale
            weights = tl.exp2(scores - log_sum[None, :])
            weights = tl.where(row[None, :] >= at[:, None], weights, 0.0)
            of_outputs = _part(gradient_at, row, gradient_stride, length, inside, True)
            of_values = tl.dot(
                weights.to(of_outputs.dtype), of_outputs, of_values, input_precision=PRECISION
            )
            of_weights = tl.dot(values, tl.trans(of_outputs), input_precision=PRECISION)
            delta = tl.load(deltas + place + row, mask=valid, other=0.0)
            of_scores = (weights * (of_weights - delta[None, :])).to(queries.dtype)
            of_keys = tl.dot(of_scores, queries, of_keys, input_precision=PRECISION)
    known = (at < length)[:, None] & inside
    place = (start + at)[:, None] * made_stride + group * made_head + column[None, :]
    tl.store(of_key + place, (of_keys * factor).to(keys.dtype), mask=known)
    tl.store(of_value + place, of_values.to(keys.dtype), mask=known)

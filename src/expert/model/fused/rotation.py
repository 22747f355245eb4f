"""Rotary embedding of queries and keys, which may be normed first, as Triton kernels; torch rotates
what they do not: norms of all heads together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from expert.model.fused.kernels import PLAIN, Epilogue, Norm
from expert.model.fused.launching import kernel, power, uses_triton, wide_of

tl: Any = None  # set by `kernel`
INLINED = ("halves_of",)


def rotate(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Norm, Norm] | None,
    heads: tuple[int, int],
    finish: Epilogue = PLAIN,
    *,
    pairs: bool = False,
    in_place: bool = False,
) -> Tensor:
    """Rotary embedding of the queries and keys in the columns of `qkv`, normed first if there are
    weights, as [rows, heads, width]; followed by the values if `finish` changes them. The columns
    of a head that cos and sin do not reach stay as they are. `pairs`: neighbouring columns rotate
    together, not the two halves."""
    rows, turns = cos.shape
    count, width = sum(heads), qkv.shape[1] // (heads[0] + 2 * heads[1])
    values = heads[1] if finish.is_needed else 0
    rotated = qkv.new_empty(rows, count + values, width)
    if in_place:
        rotated = qkv[:, : count * width].view(rows, count, width)
    if not (uses_triton(qkv) and _kernels_rotate(norms)):
        all_heads = finish.of(qkv).view(rows, -1, width)
        wide = all_heads[:, :count]
        if norms is not None:
            every = _of_heads(norms, heads)
            inverse = torch.rsqrt(_means(wide.square(), every, heads) + every.epsilon)
            made = every.of_unit(wide * inverse, qkv.dtype)
            wide = made.to(qkv.dtype).to(wide.dtype)
        cos, sin = (_of_columns(part.to(wide.dtype), pairs) for part in (cos, sin))
        rotated[:, count:] = all_heads[:, count : count + values]
        turned = wide[..., :turns] * cos + _turned(wide[..., :turns], pairs) * sin
        rotated[:, :count, turns:] = wide[..., turns:]
        rotated[:, :count, :turns] = turned
        return rotated
    first, second = norms or (Norm(qkv, 0.0), Norm(qkv, 0.0))
    kernel(_rotate)[(rows,)](
        qkv, cos, sin, first.weight, second.weight, rotated,
        qkv.stride(0), rotated.stride(0), cos.stride(0),
        first.epsilon, **finish.given(qkv), QUERIES=heads[0], HEADS=count, VALUES=values,
        BLOCK=power(count), VALUE_BLOCK=power(heads[1]), **_columns(width, turns, pairs),
        NORMED=norms is not None, PLUS_ONE=first.plus_one, num_warps=4,
    )  # fmt: skip
    return rotated


def rotate_backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Norm, Norm] | None,
    heads: tuple[int, int],
    out: Tensor,
    finish: Epilogue = PLAIN,
    *,
    pairs: bool = False,
) -> None:
    """The gradient of the finished `qkv` into `out`, from those of queries, keys and values,
    [sequences, heads, length, width] with any strides."""
    rows, turns = cos.shape
    count, width = sum(heads), qkv.shape[1] // (heads[0] + 2 * heads[1])
    if not (uses_triton(qkv) and _kernels_rotate(norms)):
        wide = wide_of(qkv)
        queries, keys, values = (part.transpose(1, 2).flatten(0, 1) for part in gradients)
        after = torch.cat((queries, keys), dim=1).to(wide)
        cos, sin = (_of_columns(part.to(wide), pairs) for part in (cos, sin))
        before = after[..., :turns] * cos - _turned(after[..., :turns] * sin, pairs)
        before = torch.cat((before, after[..., turns:]), dim=-1)
        if norms is not None:
            x, every = finish.of(qkv).view(rows, -1, width)[:, :count], _of_heads(norms, heads)
            inverse = torch.rsqrt(_means(x.square(), every, heads) + every.epsilon)
            above, unit = before * every.factor, x * inverse
            before = (above - unit * _means(above * unit, every, heads)) * inverse
        out[:, : count * width] = before.reshape(rows, -1).to(out.dtype)
        out[:, count * width :] = values.reshape(rows, -1)
        return
    first, second = norms or (Norm(qkv, 0.0), Norm(qkv, 0.0))
    contiguous = [part if part.stride(3) == 1 else part.contiguous() for part in gradients]
    kernel(_rotate_backward)[(rows,)](
        *contiguous, qkv, cos, sin, first.weight, second.weight, out,
        *(part.stride(axis) for part in contiguous for axis in (0, 1, 2)), contiguous[0].shape[2],
        qkv.stride(0), cos.stride(0), out.stride(0), first.epsilon, **finish.given(qkv),
        QUERIES=heads[0], KEYS=heads[1], BLOCK=power(count), VALUES=power(heads[1]),
        **_columns(width, turns, pairs), NORMED=norms is not None, PLUS_ONE=first.plus_one,
        num_warps=4,
    )  # fmt: skip


def _kernels_rotate(norms: tuple[Norm, Norm] | None) -> bool:
    """Whether the kernels do it: each head has its own norm."""
    return not (norms and norms[0].across)


def _columns(width: int, turns: int, pairs: bool) -> dict[str, int | bool]:
    """The columns of a head for the kernels, which takes them as two halves: those that rotate
    together, and then those that stay."""
    sizes = {"WIDTH": width, "TURNS": turns, "HALF": power(width // 2), "WIDE": power(width)}
    return {**sizes, "PAIRS": pairs}


def _means(values: Tensor, by: Norm, heads: tuple[int, int]) -> Tensor:
    """The mean of every head, or that of all queries and of all keys."""
    means = values.mean(-1, keepdim=True)
    if not by.across:
        return means
    parts = torch.split_with_sizes(means, list(heads), 1)
    return torch.cat([part.mean(1, keepdim=True).expand_as(part) for part in parts], 1)


def _of_columns(angles: Tensor, pairs: bool) -> Tensor:
    """Of [rows, columns], for all heads."""
    if pairs:
        angles = angles[:, : angles.shape[1] // 2].repeat_interleave(2, dim=1)
    return angles[:, None]


def _turned(x: Tensor, pairs: bool) -> Tensor:
    if pairs:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _of_heads(norms: tuple[Norm, Norm], heads: tuple[int, int]) -> Norm:
    """The norms of all heads as one, with weights of [heads, width]."""
    pairs = zip(norms, heads, strict=True)
    weights = [by.weight.view(n, -1) if by.across else by.weight.expand(n, -1) for by, n in pairs]
    return norms[0]._replace(weight=torch.cat(weights))


# Compiled by Triton from their source.
def halves_of(  # type: ignore[no-untyped-def]
    number, WIDTH: tl.constexpr, TURNS: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """The first column of each pair, how far the second is from it, and whether they rotate."""
    turns = number < TURNS // 2
    if PAIRS:
        return 2 * number, tl.full(number.shape, 1, tl.int32), turns
    half = tl.where(turns, TURNS // 2, (WIDTH - TURNS) // 2)
    return tl.where(turns, number, number + TURNS // 2), half, turns


def _rotate(  # type: ignore[no-untyped-def]
    qkv, cos, sin, first, second, out, qkv_stride, out_stride, cos_stride, epsilon, scale, bias,
    SCALED: tl.constexpr, BIASED: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr,
    VALUES: tl.constexpr, BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    TURNS: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr,
    NORMED: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """One program handles all heads of a row, each as the two halves that rotate together."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK)[:, None]
    number = tl.arange(0, HALF)[None, :]
    columns, half, turns = halves_of(number, WIDTH, TURNS, PAIRS)
    inside = number < WIDTH // 2
    there = (heads < HEADS) & inside
    place = qkv + row * qkv_stride + heads * WIDTH + columns
    left = tl.load(place, mask=there, other=0.0)
    right = tl.load(place + half, mask=there, other=0.0)
    kind = left.dtype
    left, right = left.to(tl.float32), right.to(tl.float32)
    column = heads * WIDTH + columns
    if SCALED:
        left *= tl.load(scale + column, mask=there, other=0.0)
        right *= tl.load(scale + half + column, mask=there, other=0.0)
    if BIASED:
        left += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
        right += tl.load(bias + half + column, mask=there, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        inverse = tl.rsqrt(squares / WIDTH + epsilon)[:, None]
        weights = tl.where(heads < QUERIES, first, second) + columns
        low = tl.load(weights, mask=there, other=0.0).to(tl.float32)
        high = tl.load(weights + half, mask=there, other=0.0).to(tl.float32)
        if PLUS_ONE:
            left, right = left * inverse * (1 + low), right * inverse * (1 + high)
        else:
            left = (left * inverse).to(kind).to(tl.float32) * low
            right = (right * inverse).to(kind).to(tl.float32) * high
        left, right = left.to(kind).to(tl.float32), right.to(kind).to(tl.float32)
    c = tl.load(cos + row * cos_stride + number, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + row * cos_stride + number, mask=turns, other=0.0).to(tl.float32)
    target = out + row * out_stride + heads * WIDTH + columns
    tl.store(target, (left * c - right * s).to(kind), mask=there)
    tl.store(target + half, (right * c + left * s).to(kind), mask=there)
    if VALUES:
        value = tl.arange(0, VALUE_BLOCK)[:, None]
        column = (HEADS + value) * WIDTH + tl.arange(0, WIDE)[None, :]
        kept = (value < VALUES) & (tl.arange(0, WIDE)[None, :] < WIDTH)
        read = tl.load(qkv + row * qkv_stride + column, mask=kept, other=0.0).to(tl.float32)
        if SCALED:
            read *= tl.load(scale + column, mask=kept, other=0.0)
        if BIASED:
            read += tl.load(bias + column, mask=kept, other=0.0).to(tl.float32)
        tl.store(out + row * out_stride + column, read.to(kind), mask=kept)


def _rotate_backward(  # type: ignore[no-untyped-def]
    queries, keys, values, qkv, cos, sin, first, second, out,
    query_row, query_head, query_place, key_row, key_head, key_place,
    value_row, value_head, value_place, length,
    qkv_stride, cos_stride, out_stride, epsilon, scale, bias,
    SCALED: tl.constexpr, BIASED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    BLOCK: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr, TURNS: tl.constexpr,
    HALF: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr, NORMED: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK)[:, None].to(tl.int64)
    number = tl.arange(0, HALF)[None, :]
    columns, half, turns = halves_of(number, WIDTH, TURNS, PAIRS)
    inside = number < WIDTH // 2
    is_query = (heads < QUERIES) & inside
    is_key = (heads >= QUERIES) & (heads < QUERIES + KEYS) & inside
    sequence, place = row // length, row % length
    of_query = queries + sequence * query_row + place * query_place + heads * query_head + columns
    of_key = keys + sequence * key_row + place * key_place + (heads - QUERIES) * key_head + columns
    left = tl.load(of_query, mask=is_query, other=0.0) + tl.load(of_key, mask=is_key, other=0.0)
    right = tl.load(of_query + half, mask=is_query, other=0.0)
    right += tl.load(of_key + half, mask=is_key, other=0.0)
    kind = left.dtype
    left, right = left.to(tl.float32), right.to(tl.float32)
    c = tl.load(cos + row * cos_stride + number, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + row * cos_stride + number, mask=turns, other=0.0).to(tl.float32)
    before_left = left * c + right * s
    before_right = right * c - left * s
    if NORMED:
        given = qkv + row * qkv_stride + heads * WIDTH + columns
        there = is_query | is_key
        x_left = tl.load(given, mask=there, other=0.0).to(tl.float32)
        x_right = tl.load(given + half, mask=there, other=0.0).to(tl.float32)
        column = heads * WIDTH + columns
        if SCALED:
            x_left *= tl.load(scale + column, mask=there, other=0.0)
            x_right *= tl.load(scale + half + column, mask=there, other=0.0)
        if BIASED:
            x_left += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
            x_right += tl.load(bias + half + column, mask=there, other=0.0).to(tl.float32)
        squares = tl.sum(x_left * x_left, 1) + tl.sum(x_right * x_right, 1)
        inverse = tl.rsqrt(squares / WIDTH + epsilon)[:, None]
        weights = tl.where(heads < QUERIES, first, second) + columns
        low = tl.load(weights, mask=there, other=0.0).to(tl.float32)
        high = tl.load(weights + half, mask=there, other=0.0).to(tl.float32)
        if PLUS_ONE:
            low, high = low + 1, high + 1
        above_left, above_right = before_left * low, before_right * high
        unit_left, unit_right = x_left * inverse, x_right * inverse
        inner = tl.sum(above_left * unit_left, 1) + tl.sum(above_right * unit_right, 1)
        inner = (inner / WIDTH)[:, None]
        before_left = (above_left - unit_left * inner) * inverse
        before_right = (above_right - unit_right * inner) * inverse
    target = out + row * out_stride + heads * WIDTH + columns
    tl.store(target, before_left.to(kind), mask=is_query | is_key)
    tl.store(target + half, before_right.to(kind), mask=is_query | is_key)
    value_heads = tl.arange(0, VALUES)[:, None].to(tl.int64)
    wide = tl.arange(0, WIDE)[None, :]
    kept = (value_heads < KEYS) & (wide < WIDTH)
    of_value = values + sequence * value_row + place * value_place + value_heads * value_head + wide
    target = out + row * out_stride + (QUERIES + KEYS + value_heads) * WIDTH + wide
    tl.store(target, tl.load(of_value, mask=kept, other=0.0), mask=kept)

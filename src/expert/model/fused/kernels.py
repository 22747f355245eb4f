"""RMSNorm, rotary embedding and gated activations as Triton kernels, with a torch fallback.

Each kernel reads its inputs and writes its outputs once, also as strided parts of larger matrices.
Everything is computed in float32 (float64 for float64 inputs) and rounded once; only the normed
value is also rounded before it is multiplied by the norm's weight, as in transformers (not where
that is 1 + weight).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from expert.model.fused.launching import (
    kernel,
    kernel_failure,
    power,
    triton_installed,
    uses_triton,
    wide_of,
)
from expert.model.fused.swiglu_with_adapter import (
    CUBIC,
    TWICE_ROOT,
    DeferredAdapter,
    gate_share,
    swiglu_with_adapter,
    swiglu_with_adapter_backward,
)

tl: Any = None  # set by `kernel`
INLINED = ("gate_share",)


class Epilogue(NamedTuple):
    """Applied to the outputs of a product by the kernel that reads them: output * scale + bias."""

    scale: Tensor | None = None
    bias: Tensor | None = None
    rest: DeferredAdapter | None = None
    """Added before that; only by SwiGLU, and only to outputs without a scale."""

    @property
    def is_needed(self) -> bool:
        return self.scale is not None or self.bias is not None

    def of(self, outputs: Tensor) -> Tensor:
        """The finished value, as kernels compute it."""
        wide = outputs.to(wide_of(outputs)) if self.rest is None else self.rest.onto(outputs)
        wide = wide if self.scale is None else wide * self.scale
        return wide if self.bias is None else wide + self.bias

    def given(self, outputs: Tensor) -> dict[str, Any]:
        scale, bias = (outputs if part is None else part for part in (self.scale, self.bias))
        wanted = {"SCALED": self.scale is not None, "BIASED": self.bias is not None}
        return {"scale": scale, "bias": bias, **wanted}


PLAIN = Epilogue()


class Norm(NamedTuple):
    """An RMSNorm."""

    weight: Tensor
    epsilon: float
    plus_one: bool = False
    """Multiplies by 1 + weight."""
    across: bool = False
    """Of all heads together, with a weight for each element of them."""

    def of_unit(self, unit: Tensor, dtype: torch.dtype) -> Tensor:
        """The result for values that are divided by their RMS, in their precision."""
        if self.plus_one:
            return unit * (1 + self.weight.to(unit.dtype))
        return unit.to(dtype) * self.weight

    @property
    def factor(self) -> Tensor:
        """In float32 at least."""
        return self.weight.to(wide_of(self.weight)) + self.plus_one


def norm(x: Tensor, by: Norm, out: Tensor, added: Tensor | None = None) -> Tensor:
    """RMSNorm of the rows of x, plus `added`, into `out`, which may be strided; returns 1 / RMS of
    each row for the backward."""
    rows, width = x.shape
    if not uses_triton(x):
        wide = x.to(wide_of(x))
        inverse = torch.rsqrt(wide.square().mean(-1) + by.epsilon)
        made = by.of_unit(wide * inverse[:, None], x.dtype)
        out.copy_(made if added is None else made.to(x.dtype) + added)
        return inverse
    inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
    block, more = power(width), x if added is None else added
    kernel(_norm)[(rows,)](
        x, by.weight, more, out, inverse, width, x.stride(0), more.stride(0), out.stride(0),
        by.epsilon, PLUS_ONE=by.plus_one, ADDED=added is not None, BLOCK=block,
        num_warps=_warps(block),
    )  # fmt: skip
    return inverse


def norm_backward(
    gradient: Tensor, x: Tensor, by: Norm, inverse: Tensor, added: Tensor | None, out: Tensor
) -> None:
    """The gradient of a norm's input, plus `added`, into `out`."""
    rows, width = x.shape
    if not uses_triton(x):
        wide = wide_of(x)
        unit = x.to(wide) * inverse[:, None]
        above = gradient.to(wide) * by.factor
        inner = (above * unit).mean(-1, keepdim=True)
        made = (above - unit * inner) * inverse[:, None]
        out.copy_(made if added is None else made + added.to(wide))
        return
    block, more = power(width), x if added is None else added
    kernel(_norm_backward)[(rows,)](
        gradient, x, by.weight, inverse, more, out, width,
        gradient.stride(0), x.stride(0), more.stride(0), out.stride(0),
        PLUS_ONE=by.plus_one, ADDED=added is not None, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip


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
    if not (uses_triton(qkv) and _kernels_rotate(width, turns, norms, pairs)):
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
        BLOCK=power(count), VALUE_BLOCK=power(heads[1]), WIDTH=width, NORMED=norms is not None,
        PLUS_ONE=first.plus_one, num_warps=4,
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
    if not (uses_triton(qkv) and _kernels_rotate(width, turns, norms, pairs)):
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
        WIDTH=width, NORMED=norms is not None, PLUS_ONE=first.plus_one, num_warps=4,
    )  # fmt: skip


def swiglu(both: Tensor, out: Tensor, finish: Epilogue = PLAIN, *, gelu: bool = False) -> None:
    """silu(gate) * up of [gate | up] into `out`, which may be strided. `gelu`: that (by tanh)
    instead of silu, here and below."""
    rows, width = out.shape
    if not uses_triton(both):
        gate, up = finish.of(both).chunk(2, dim=1)
        out.copy_((F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up)
        return
    if finish.rest is not None:
        swiglu_with_adapter(both, finish.rest, finish.bias, out, gelu=gelu)
        return
    kernel(_swiglu)[(rows, -(-width // COLUMNS))](
        both, out, width, both.stride(0), out.stride(0), **finish.given(both),
        GELU=gelu, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip


def swiglu_backward(
    both: Tensor,
    gradient: Tensor,
    finish: Epilogue = PLAIN,
    of_gradient: DeferredAdapter | None = None,
    *,
    gelu: bool = False,
) -> Tensor:
    """The gradient of the finished [gate | up]; replaces `gradient` with the output of `swiglu`.
    `of_gradient`: what `gradient` is missing."""
    width = gradient.shape[1]
    if not uses_triton(both):
        gate, up = finish.of(both).chunk(2, dim=1)
        turned, slope = gate, torch.ones_like(gate)
        if gelu:
            turned = TWICE_ROOT * (gate + CUBIC * gate**3)
            slope = TWICE_ROOT * (1 + 3 * CUBIC * gate**2)
        share, wide = torch.sigmoid(turned), gradient.to(gate.dtype)
        wide = wide if of_gradient is None else of_gradient.onto(gradient)
        of_gate = wide * up * share * (1 + gate * (1 - share) * slope)
        of_both = torch.cat((of_gate, wide * gate * share), dim=1).to(both.dtype)
        gradient.copy_(gate * share * up)
        return of_both
    if finish.rest is not None:
        rests = (gradient, of_gradient)
        return swiglu_with_adapter_backward(both, finish.rest, finish.bias, *rests, gelu=gelu)
    of_both = torch.empty_like(both)
    kernel(_swiglu_backward)[(both.shape[0], -(-width // COLUMNS))](
        both, gradient, of_both, width, both.stride(0), **finish.given(both),
        GELU=gelu, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return of_both


def add_epilogue(outputs: Tensor, finish: Epilogue, residual: Tensor) -> Tensor:
    """residual + the finished outputs, rounded once."""
    rows, width = outputs.shape
    if not uses_triton(outputs):
        return (finish.of(outputs) + residual).to(outputs.dtype)
    out = torch.empty_like(outputs)
    kernel(_finish_onto)[(rows, -(-width // COLUMNS))](
        outputs, residual, out, width, outputs.stride(0), residual.stride(0),
        **finish.given(outputs), COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


def scale_columns(
    gradient: Tensor, before: Tensor, scale: Tensor, *, in_place: bool
) -> tuple[Tensor, Tensor]:
    """(gradient * scale, column sums of gradient * before)."""
    rows, width = gradient.shape
    if not uses_triton(gradient):
        wide = gradient.to(wide_of(gradient))
        sums = (wide * before).sum(0)
        scaled = (wide * scale).to(gradient.dtype)
        return (gradient.copy_(scaled) if in_place else scaled), sums
    out = gradient if in_place else torch.empty_like(before)
    parts = -(-rows // ROWS)
    sums = torch.empty(parts, width, dtype=torch.float32, device=gradient.device)
    kernel(_scale_columns)[(parts, -(-width // SUMMED))](
        gradient, before, scale, out, sums, rows, width,
        gradient.stride(0), before.stride(0), out.stride(0),
        ROWS=ROWS, COLUMNS=SUMMED, num_warps=4,
    )  # fmt: skip
    return out, sums.sum(0)


ROWS, SUMMED = 64, 128
"""Rows and columns of one program of `_scale_columns`."""
COLUMNS = 1024
"""Columns of a row that one program handles."""


@functools.cache
def triton_failure(device: torch.device) -> str:
    """Why Triton kernels do not work here, tried once per process; empty if they do."""

    def norms_are_right() -> bool:
        x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).to(device)
        found, right = (torch.empty_like(x) for _ in range(2))
        norm(x, Norm(x[0].contiguous(), 1e-6), found)
        right.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * x[0])
        return torch.allclose(found, right, rtol=1e-4, atol=1e-4)

    if device.type != "cuda":
        return ""
    if not triton_installed():
        return "Triton is not installed"
    return kernel_failure(norms_are_right, "a kernel gives wrong numbers")


def _kernels_rotate(width: int, turns: int, norms: tuple[Norm, Norm] | None, pairs: bool) -> bool:
    """Whether the kernels do it: the two halves of whole heads, whose size is a power of two, each
    with its own norm."""
    return turns == width == power(width) and not pairs and not (norms and norms[0].across)


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


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))


# Compiled by Triton from their source.
def _norm(  # type: ignore[no-untyped-def]
    x, weight, added, out, inverses, width, x_stride, added_stride, out_stride, epsilon,
    PLUS_ONE: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    there = columns < width
    given = tl.load(x + row * x_stride + columns, mask=there, other=0.0)
    values = given.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / width + epsilon)
    tl.store(inverses + row, inverse)
    factor = tl.load(weight + columns, mask=there, other=0.0).to(tl.float32)
    unit = values * inverse
    if PLUS_ONE:
        factor += 1
    else:
        unit = unit.to(given.dtype).to(tl.float32)
    made = unit * factor
    if ADDED:
        made = made.to(given.dtype).to(tl.float32)
        made += tl.load(added + row * added_stride + columns, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, made.to(given.dtype), mask=there)


def _norm_backward(  # type: ignore[no-untyped-def]
    gradient, x, weight, inverses, added, out, width,
    gradient_stride, x_stride, added_stride, out_stride,
    PLUS_ONE: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    there = columns < width
    inverse = tl.load(inverses + row)
    given = tl.load(gradient + row * gradient_stride + columns, mask=there, other=0.0)
    unit = tl.load(x + row * x_stride + columns, mask=there, other=0.0).to(tl.float32) * inverse
    factor = tl.load(weight + columns, mask=there, other=0.0).to(tl.float32)
    if PLUS_ONE:
        factor += 1
    above = given.to(tl.float32) * factor
    inner = tl.sum(above * unit, 0) / width
    made = (above - unit * inner) * inverse
    if ADDED:
        made += tl.load(added + row * added_stride + columns, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, made.to(given.dtype), mask=there)


def _rotate(  # type: ignore[no-untyped-def]
    qkv, cos, sin, first, second, out, qkv_stride, out_stride, cos_stride, epsilon, scale, bias,
    SCALED: tl.constexpr, BIASED: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr,
    VALUES: tl.constexpr, BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    NORMED: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """One program handles all heads of a row, each as the two halves that rotate together."""
    row = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = WIDTH // 2
    heads = tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, half)[None, :]
    there = heads < HEADS
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
        is_query = heads < QUERIES
        low = tl.where(is_query, tl.load(first + columns), tl.load(second + columns))
        high = tl.where(is_query, tl.load(first + half + columns), tl.load(second + half + columns))
        low, high = low.to(tl.float32), high.to(tl.float32)
        if PLUS_ONE:
            left, right = left * inverse * (1 + low), right * inverse * (1 + high)
        else:
            left = (left * inverse).to(kind).to(tl.float32) * low
            right = (right * inverse).to(kind).to(tl.float32) * high
        left, right = left.to(kind).to(tl.float32), right.to(kind).to(tl.float32)
    c = tl.load(cos + row * cos_stride + columns).to(tl.float32)
    s = tl.load(sin + row * cos_stride + columns).to(tl.float32)
    target = out + row * out_stride + heads * WIDTH + columns
    tl.store(target, (left * c - right * s).to(kind), mask=there)
    tl.store(target + half, (right * c + left * s).to(kind), mask=there)
    if VALUES:
        value = tl.arange(0, VALUE_BLOCK)[:, None]
        column = (HEADS + value) * WIDTH + tl.arange(0, WIDTH)[None, :]
        kept = value < VALUES
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
    BLOCK: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr, NORMED: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = WIDTH // 2
    heads = tl.arange(0, BLOCK)[:, None].to(tl.int64)
    columns = tl.arange(0, half)[None, :]
    is_query = heads < QUERIES
    is_key = (heads >= QUERIES) & (heads < QUERIES + KEYS)
    sequence, place = row // length, row % length
    of_query = queries + sequence * query_row + place * query_place + heads * query_head + columns
    of_key = keys + sequence * key_row + place * key_place + (heads - QUERIES) * key_head + columns
    left = tl.load(of_query, mask=is_query, other=0.0) + tl.load(of_key, mask=is_key, other=0.0)
    right = tl.load(of_query + half, mask=is_query, other=0.0)
    right += tl.load(of_key + half, mask=is_key, other=0.0)
    kind = left.dtype
    left, right = left.to(tl.float32), right.to(tl.float32)
    c = tl.load(cos + row * cos_stride + columns).to(tl.float32)
    s = tl.load(sin + row * cos_stride + columns).to(tl.float32)
    before_left = left * c + right * s
    before_right = right * c - left * s
    if NORMED:
        given = qkv + row * qkv_stride + heads * WIDTH + columns
        there = heads < QUERIES + KEYS
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
        low = tl.where(is_query, tl.load(first + columns), tl.load(second + columns))
        high = tl.where(is_query, tl.load(first + half + columns), tl.load(second + half + columns))
        low, high = low.to(tl.float32), high.to(tl.float32)
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
    wide = tl.arange(0, WIDTH)[None, :]
    kept = value_heads < KEYS
    of_value = values + sequence * value_row + place * value_place + value_heads * value_head + wide
    target = out + row * out_stride + (QUERIES + KEYS + value_heads) * WIDTH + wide
    tl.store(target, tl.load(of_value, mask=kept, other=0.0), mask=kept)


def _swiglu(  # type: ignore[no-untyped-def]
    both, out, width, both_stride, out_stride, scale, bias,
    SCALED: tl.constexpr, BIASED: tl.constexpr, GELU: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = columns < width
    place = both + row * both_stride + columns
    given = tl.load(place, mask=there, other=0.0)
    gate = given.to(tl.float32)
    up = tl.load(place + width, mask=there, other=0.0).to(tl.float32)
    if SCALED:
        gate *= tl.load(scale + columns, mask=there, other=0.0)
        up *= tl.load(scale + width + columns, mask=there, other=0.0)
    if BIASED:
        gate += tl.load(bias + columns, mask=there, other=0.0).to(tl.float32)
        up += tl.load(bias + width + columns, mask=there, other=0.0).to(tl.float32)
    share, _ = gate_share(gate, GELU)
    tl.store(out + row * out_stride + columns, (gate * share * up).to(given.dtype), mask=there)


def _swiglu_backward(  # type: ignore[no-untyped-def]
    both, gradient, out, width, both_stride, scale, bias,
    SCALED: tl.constexpr, BIASED: tl.constexpr, GELU: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = columns < width
    place = both + row * both_stride + columns
    given = tl.load(place, mask=there, other=0.0)
    gate = given.to(tl.float32)
    up = tl.load(place + width, mask=there, other=0.0).to(tl.float32)
    if SCALED:
        gate *= tl.load(scale + columns, mask=there, other=0.0)
        up *= tl.load(scale + width + columns, mask=there, other=0.0)
    if BIASED:
        gate += tl.load(bias + columns, mask=there, other=0.0).to(tl.float32)
        up += tl.load(bias + width + columns, mask=there, other=0.0).to(tl.float32)
    of_made = tl.load(gradient + row * width + columns, mask=there, other=0.0).to(tl.float32)
    share, growth = gate_share(gate, GELU)
    of_gate = of_made * up * share * (1 + growth)
    target = out + row * both_stride + columns
    tl.store(target, of_gate.to(given.dtype), mask=there)
    tl.store(target + width, (of_made * gate * share).to(given.dtype), mask=there)
    made = (gate * share * up).to(given.dtype)
    tl.store(gradient + row * width + columns, made, mask=there)


def _finish_onto(  # type: ignore[no-untyped-def]
    made, residual, out, width, made_stride, residual_stride, scale, bias,
    SCALED: tl.constexpr, BIASED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = columns < width
    given = tl.load(made + row * made_stride + columns, mask=there, other=0.0)
    values = given.to(tl.float32)
    if SCALED:
        values *= tl.load(scale + columns, mask=there, other=0.0)
    if BIASED:
        values += tl.load(bias + columns, mask=there, other=0.0).to(tl.float32)
    place = residual + row * residual_stride + columns
    values += tl.load(place, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, values.to(given.dtype), mask=there)


def _scale_columns(  # type: ignore[no-untyped-def]
    gradient, before, scale, out, sums, rows, width,
    gradient_stride, before_stride, out_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = (part * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    there = (row < rows) & (columns < width)
    given = tl.load(gradient + row * gradient_stride + columns, mask=there, other=0.0)
    values = tl.load(before + row * before_stride + columns, mask=there, other=0.0)
    factor = tl.load(scale + columns, mask=columns < width, other=0.0)
    total = tl.sum(given.to(tl.float32) * values.to(tl.float32), 0)
    one = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(sums + part * width + one, total, mask=one < width)
    made = (given.to(tl.float32) * factor).to(given.dtype)
    tl.store(out + row * out_stride + columns, made, mask=there)

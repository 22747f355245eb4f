"""RMSNorm and gated activations as Triton kernels, with a torch fallback.

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
    out: Tensor | None = None,
) -> Tensor:
    """The gradient of the finished [gate | up], in `out` if given, which may be strided; replaces
    `gradient` with the output of `swiglu`. `of_gradient`: what `gradient` is missing."""
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
        return of_both if out is None else out.copy_(of_both)
    if finish.rest is not None:
        rests = (gradient, of_gradient)
        return swiglu_with_adapter_backward(both, finish.rest, finish.bias, *rests, gelu=gelu)
    of_both = torch.empty_like(both) if out is None else out
    kernel(_swiglu_backward)[(both.shape[0], -(-width // COLUMNS))](
        both, gradient, of_both, width, both.stride(0), of_both.stride(0), **finish.given(both),
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
    both, gradient, out, width, both_stride, out_stride, scale, bias,
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
    target = out + row * out_stride + columns
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

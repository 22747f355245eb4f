"""LoRA on the experts of a mixture: the tokens of all experts in one grouped product each.

PEFT adds B A to the weights of every expert in every step, which costs about as much again. Here
tokens are sorted by expert, and the adapter lies beside the weights in one matrix

    weights | s B
    A       |  0

so that one product of [x | A x] gives the finished output, and one of [dy | s B' dy] the gradient
of x. Of each token's experts only gate and up are kept for the backward; the rest is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expert.model.fused.kernels import swiglu, swiglu_backward
from expert.model.fused.launching import kernel, uses_triton

tl: Any = None  # set by `kernel`
PROJECTIONS = ("gate_up_proj", "down_proj")
"""Parameters of transformers' experts, each with the weights of all experts of a layer."""
WIDE = 8
"""Columns beside the weights are a multiple of it: grouped products read 16 bytes at once."""
COLUMNS = 1024


def expert_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold the experts of a layer in transformers' form, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "has_gate", False) and all(hasattr(module, p) for p in PROJECTIONS)
    }


@dataclass(eq=False, kw_only=True)
class ExpertProduct:
    """One of the two products of all experts, with its adapter."""

    whole: Tensor
    """[experts, outputs + spare, inputs + spare]."""
    outputs: int
    inputs: int
    bias: Tensor | None
    first: Tensor | None
    """[rank * experts, inputs], as PEFT has it; None: no adapter."""
    second: Tensor | None
    """[outputs, rank * experts]."""
    scaling: float
    _placed: tuple[int, int] = field(default=(-1, -1))

    @property
    def spare(self) -> int:
        return self.whole.shape[2] - self.inputs

    @property
    def rank(self) -> int:
        return 0 if self.first is None else self.first.shape[0] // len(self.whole)

    @torch.no_grad()
    def place_adapter(self) -> None:
        """Copy the adapter beside the weights, unless it is there."""
        first, second = self.first, self.second
        if first is None or second is None or self._placed == (first._version, second._version):
            return
        experts, rank = len(self.whole), self.rank
        below = self.whole[:, self.outputs : self.outputs + rank, : self.inputs]
        below.copy_(first.view(experts, rank, -1))
        beside = self.whole[:, : self.outputs, self.inputs : self.inputs + rank]
        beside.copy_(second.view(-1, rank, experts).permute(2, 0, 1) * self.scaling)
        self._placed = first._version, second._version

    def forward(self, rows: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """The output of rows with spare columns, which A x fills; and A x."""
        weights = self.whole[:, : self.outputs].mT
        low = rows.new_empty(len(rows), 0)
        if self.spare:
            below = self.whole[:, self.outputs :, : self.inputs].mT
            low = grouped(rows[:, : self.inputs], below, ends)
            rows[:, self.inputs :] = low
        return grouped(rows, weights, ends), low

    def backward(self, gradient: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the inputs, by that of the outputs with spare columns, which s B' dy
        fills; and s B' dy."""
        low = gradient[:, self.outputs :]
        if self.spare:
            beside = self.whole[:, : self.outputs, self.inputs :]
            low.copy_(grouped(gradient[:, : self.outputs], beside, ends))
        return grouped(gradient, self.whole[:, :, : self.inputs], ends), low

    def of_trained(
        self, x: Tensor, low: Tensor, gradient: Tensor, of_low: Tensor, ends: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of `first` and `second`."""
        if self.first is None or self.second is None:
            return None, None
        rank = self.rank
        of_first = grouped_outer(of_low, x, ends)[:, :rank].reshape(self.first.shape)
        of_second = grouped_outer(low, gradient, ends)[:, :rank]
        of_second = of_second.permute(2, 1, 0).reshape(self.second.shape) * self.scaling
        return of_first.to(self.first.dtype), of_second.to(self.second.dtype)


class ExpertParts(NamedTuple):
    up: ExpertProduct
    down: ExpertProduct
    gate: Callable[[Tensor], Tensor] | None
    """What makes of [gate | up] the input of down; None: silu(gate) * up."""


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
    return Routes(order, inverse.view(chosen.shape), ends, numbers)


class MixedExperts(torch.autograd.Function):
    """hidden [tokens, width] and the shares of the chosen experts -> the sum of their answers."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, routes: Routes, shares: Tensor, parts: ExpertParts, *_: Tensor
    ) -> Tensor:
        up, down, gate = parts
        gate_up, low_up = up.forward(_rows(hidden, routes.tokens, up.spare), routes.ends)
        if up.bias is not None:
            gate_up += up.bias[routes.experts]
        gated = gate_up.new_empty(len(gate_up), down.inputs + down.spare)
        if gate is None:
            swiglu(gate_up, gated[:, : down.inputs])
        else:
            gated[:, : down.inputs] = gate(gate_up)
        made, low_down = down.forward(gated, routes.ends)
        if down.bias is not None:
            made += down.bias[routes.experts]
        else:
            routes = routes._replace(experts=routes.ends)  # not needed again
        ctx.save_for_backward(hidden, shares, gate_up, low_up, low_down, *routes)
        ctx.parts = parts
        return gathered_sum(made, routes.inverse, shares)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        hidden, shares, gate_up, low_up, low_down, *kept = ctx.saved_tensors
        (up, down, gate), routes = ctx.parts, Routes(*kept)
        share = shares.reshape(-1)[routes.order, None].to(gate_up.dtype)
        of_made = _rows(gradients[0], routes.tokens, down.spare)
        unweighted, of_low_down = down.backward(of_made, routes.ends)
        of_gated = unweighted * share
        of_gate_up = gate_up.new_empty(len(gate_up), up.outputs + up.spare)
        of_outputs = of_gate_up[:, : up.outputs]
        if gate is None:
            swiglu_backward(gate_up, of_gated, out=of_outputs)
            gated = of_gated  # what it is replaced with
        else:
            with torch.enable_grad():
                given = gate_up.detach().requires_grad_()
                made = gate(given)
            of_outputs.copy_(torch.autograd.grad(made, given, of_gated)[0])
            gated = made.detach()
        of_made = of_made[:, : down.outputs]
        of_shares = None
        if ctx.needs_input_grad[2]:
            of_each = torch.linalg.vecdot(unweighted, gated)
            if down.bias is not None:
                of_each = of_each + torch.linalg.vecdot(of_made, down.bias[routes.experts])
            of_shares = of_each[routes.inverse].to(shares.dtype)
        trained_down = down.of_trained(
            gated, low_down * share, of_made, of_low_down * share, routes.ends
        )
        del of_made, of_gated, gated, unweighted, of_low_down
        of_rows, of_low_up = up.backward(of_gate_up, routes.ends)
        x = hidden[routes.tokens] if up.rank else hidden
        trained_up = up.of_trained(x, low_up, of_outputs, of_low_up, routes.ends)
        of_hidden = gathered_sum(of_rows, routes.inverse)
        return of_hidden, None, of_shares, None, *trained_up, *trained_down


def _rows(values: Tensor, tokens: Tensor, spare: int) -> Tensor:
    """The values of these tokens, with spare columns beside them."""
    return (F.pad(values, (0, spare)) if spare else values)[tokens]


def grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows up to each expert's end times its matrix in weights [experts, inputs, outputs]."""
    if _has_kernel(rows, *weights.shape[1:]):
        made: Tensor = _grouped_mm(rows, weights, offs=ends)
        return made
    made = rows.new_empty(len(rows), weights.shape[2])
    for expert, (start, end) in enumerate(_spans(ends)):
        made[start:end] = rows[start:end] @ weights[expert]
    return made


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """left' right over the rows of each expert: [experts, columns of left, of right]."""
    if _has_kernel(left, left.shape[1], right.shape[1]):
        made: Tensor = _grouped_mm(left.mT, right, offs=ends)
        return made
    spans = _spans(ends)
    return torch.stack([left[start:end].mT @ right[start:end] for start, end in spans])


def _has_kernel(like: Tensor, *widths: int) -> bool:
    return like.is_cuda and like.dtype == torch.bfloat16 and not any(n % WIDE for n in widths)


def _grouped_mm(left: Tensor, right: Tensor, *, offs: Tensor) -> Any:
    public: Any = getattr(F, "grouped_mm", None)
    return (public or torch._grouped_mm)(left, right, offs=offs)


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    whole = ends.tolist()
    return list(zip([0, *whole[:-1]], whole, strict=True))


def gathered_sum(rows: Tensor, places: Tensor, shares: Tensor | None = None) -> Tensor:
    """The sum of each token's rows, weighted by its shares: in a fixed order, in float32."""
    count, width = len(places), rows.shape[1]
    if not uses_triton(rows):
        each = rows[places]
        each = each if shares is None else each * shares[..., None].to(each.dtype)
        return each.sum(dim=1)
    out = rows.new_empty(count, width)
    kernel(_gathered_sum)[(count, -(-width // COLUMNS))](
        rows, places, rows if shares is None else shares, out, width, rows.stride(0),
        CHOSEN=places.shape[1], WEIGHTED=shares is not None, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


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


class FusedExperts:
    """Replaces `forward` of the experts of a layer, or of PEFT's wrapper around them."""

    def __init__(self, outermost: Any, adapter: str) -> None:
        self.plain: Callable[..., Any] = outermost.forward
        wrappers = _wrappers_of(outermost)
        self._wrapper = wrappers[0] if wrappers else None
        experts = outermost.get_base_layer() if wrappers else outermost
        named = {each.parameter_name: each for each in wrappers}
        up, down = (_pack(experts, name, named.get(name), adapter) for name in PROJECTIONS)
        usual = type(experts)._apply_gate.__name__ == "_default_apply_gate"
        silu = type(getattr(experts, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
        self.parts = ExpertParts(up, down, None if usual and silu else experts._apply_gate)
        self.chosen: Tensor | None = None
        """How often each expert was, since `busiest_experts`."""

    def __call__(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Any:
        wrapper = self._wrapper
        if wrapper is not None and (wrapper.disable_adapters or wrapper.merged):
            return self.plain(hidden, chosen, shares)
        up, down, _ = self.parts
        up.place_adapter()
        down.place_adapter()
        routes = routes_of(chosen, len(up.whole))
        if torch.is_grad_enabled():
            counts = torch.diff(routes.ends, prepend=routes.ends.new_zeros(1))
            self.chosen = counts.double() if self.chosen is None else self.chosen + counts
        run, shares = cast(Any, MixedExperts.apply), shares.contiguous()
        trained = (up.first, up.second, down.first, down.second)
        return run(hidden, routes, shares, self.parts, *trained)


def fuse_experts(model: nn.Module, adapter: str) -> bool:
    """Compute experts whose weights are frozen as here, if there are some; adapted ones become
    views of larger matrices."""
    found = False
    wrapped = {f"{name}.base_layer": each for name, each in model.named_modules()}
    for name, experts in expert_layers(model).items():
        outermost: Any = experts
        while hasattr(wrapped.get(name), "parameter_name"):
            outermost, name = wrapped[name], name.removesuffix(".base_layer")
        if not any(getattr(experts, each).requires_grad for each in PROJECTIONS):
            outermost.forward = FusedExperts(outermost, adapter)
            found = True
    return found


def busiest_experts(model: nn.Module) -> Tensor | None:
    """How much more often than the average the busiest expert of a layer was chosen since the last
    call, by the mean of all layers: 1 if all are chosen alike. None without experts."""
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    fused = [
        each for each in forwards if isinstance(each, FusedExperts) and each.chosen is not None
    ]
    if not fused:
        return None
    counts = torch.stack([each.chosen for each in fused if each.chosen is not None])
    for each in fused:
        each.chosen = None
    return (counts.amax(1) / counts.mean(1)).mean()


def _wrappers_of(outermost: Any) -> list[Any]:
    """PEFT's wrappers around one module, one for each adapted parameter."""
    found = []
    while hasattr(outermost, "parameter_name"):
        found.append(outermost)
        outermost = outermost.base_layer
    return found


@torch.no_grad()
def _pack(experts: Any, name: str, wrapper: Any, adapter: str) -> ExpertProduct:
    parameter, bias = getattr(experts, name), getattr(experts, f"{name}_bias", None)
    turned = bool(getattr(experts, "is_transposed", False))
    weights = parameter.mT if turned else parameter
    count, outputs, inputs = weights.shape
    first = second = None
    whole, scaling = weights.detach(), 1.0
    if wrapper is not None:
        first, second = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
        scaling, spare = wrapper.scaling[adapter], -(-first.shape[0] // count // WIDE) * WIDE
        sizes = (outputs + spare, inputs + spare)
        whole = parameter.new_zeros(count, *(sizes[::-1] if turned else sizes)).detach()
        whole = whole.mT if turned else whole
        place = whole[:, :outputs, :inputs]
        place.copy_(weights)
        parameter.data = place.mT if turned else place
    return ExpertProduct(
        whole=whole,
        outputs=outputs,
        inputs=inputs,
        bias=None if bias is None else bias.detach(),
        first=first,
        second=second,
        scaling=scaling,
    )

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
from torch import Tensor, nn

from expert.model.fused.expert_rows import (
    WIDE,
    Routes,
    add_low,
    gated_backward,
    gathered_sum,
    gathered_with_low,
    grouped,
    outer,
    routes_of,
)
from expert.model.fused.kernels import swiglu
from expert.model.fused.launching import with_even_columns

PROJECTIONS = ("gate_up_proj", "down_proj")
"""Parameters of transformers' experts, each with the weights of all experts of a layer."""


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

    @property
    def weights(self) -> Tensor:
        """[experts, inputs and spare, outputs]: of [x | A x] the finished output."""
        return self.whole[:, : self.outputs].mT

    @property
    def below(self) -> Tensor:
        """A', [experts, inputs, spare]."""
        return self.whole[:, self.outputs :, : self.inputs].mT

    @property
    def beside(self) -> Tensor:
        """s B, [experts, outputs, spare]."""
        return self.whole[:, : self.outputs, self.inputs :]

    @property
    def to_inputs(self) -> Tensor:
        """[experts, outputs and spare, inputs]: of [dy | s B' dy] the gradient of the inputs."""
        return self.whole[:, :, : self.inputs]

    def of_trained(self, of_first: Tensor, of_second: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of `first` and `second`, from [experts, spare, inputs or outputs]."""
        first, second = cast(Tensor, self.first), cast(Tensor, self.second)
        of_first = of_first[:, : self.rank].reshape(first.shape)
        of_second = of_second[:, : self.rank].permute(2, 1, 0).reshape(second.shape)
        return of_first.to(first.dtype), (of_second * self.scaling).to(second.dtype)


class ExpertParts(NamedTuple):
    up: ExpertProduct
    down: ExpertProduct
    gate: Callable[[Tensor], Tensor] | None
    """What makes of [gate | up] the input of down; None: silu(gate) * up."""


class MixedExperts(torch.autograd.Function):
    """hidden [tokens, width] and the shares of the chosen experts -> the sum of their answers."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, routes: Routes, shares: Tensor, parts: ExpertParts, *_: Tensor
    ) -> Tensor:
        up, down, gate = parts
        hidden = with_even_columns(hidden)
        rows, low_up = gathered_with_low(hidden, routes, up.below)
        gate_up = grouped(rows, up.weights, routes.ends)
        if up.bias is not None:
            gate_up += up.bias[routes.experts]
        gated = gate_up.new_empty(len(gate_up), down.inputs + down.spare)
        if gate is None:
            swiglu(gate_up, gated[:, : down.inputs])
        else:
            gated[:, : down.inputs] = gate(gate_up)
        low_down = add_low(gated, routes, down.below)
        made = grouped(gated, down.weights, routes.ends)
        if down.bias is not None:
            made += down.bias[routes.experts]
        ctx.save_for_backward(hidden, shares, gate_up, low_up, low_down, *routes)
        ctx.parts = parts
        return gathered_sum(made, routes.inverse, shares)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        hidden, shares, gate_up, low_up, low_down, *kept = ctx.saved_tensors
        (up, down, gate), routes = ctx.parts, Routes(*kept)
        tokens, share = routes.tokens, shares.reshape(-1)[routes.order]
        gradient = with_even_columns(gradients[0])
        of_made, of_low_down = gathered_with_low(gradient, routes, down.beside)
        unweighted = grouped(of_made, down.to_inputs, routes.ends)
        of_gate_up = gate_up.new_empty(len(gate_up), up.outputs + up.spare)
        of_outputs = of_gate_up[:, : up.outputs]
        if gate is None:
            of_each = gated_backward(gate_up, unweighted, share, of_outputs)
            gated = unweighted  # what it is replaced with
        else:
            with torch.enable_grad():
                given = gate_up.detach().requires_grad_()
                made = gate(given)
            weighted = unweighted * share[:, None].to(unweighted.dtype)
            of_outputs.copy_(torch.autograd.grad(made, given, weighted)[0])
            gated = made.detach()
            of_each = torch.linalg.vecdot(unweighted, gated)
        of_low_up = add_low(of_gate_up, routes, up.beside)
        of_shares = None
        if ctx.needs_input_grad[2]:
            if down.bias is not None:
                of_bias = torch.linalg.vecdot(of_made[:, : down.outputs], down.bias[routes.experts])
                of_each = of_each + of_bias
            of_shares = of_each[routes.inverse].to(shares.dtype)
        del of_made, unweighted
        of_rows = grouped(of_gate_up, up.to_inputs, routes.ends)
        of_hidden = gathered_sum(of_rows, routes.inverse)
        trained: list[Tensor | None] = [None] * 4
        if up.rank:
            of_first = outer(of_low_up, hidden, routes, tokens)
            trained[:2] = up.of_trained(of_first, outer(low_up, of_outputs, routes))
        if down.rank:
            of_first = outer(of_low_down, gated, routes, share=share)
            of_second = outer(low_down, gradient, routes, tokens, share)
            trained[2:] = down.of_trained(of_first, of_second)
        return of_hidden, None, of_shares, None, *trained


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

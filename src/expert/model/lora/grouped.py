"""Layers that read the same input as one product, and their LoRA inside it.

q, k and v read the same x, as gate and up do. Apart they are three products of the base, three of
every factor, and three sums; together they are one of each. A layer that reads alone is a group of
one. The adapter is part of the same product, so that it is rounded once with it, and costs no pass
over what the layers give. Two ways, by which side of the weight is longer, since the shorter side
is copied:

    more outputs than inputs:  [x | s x A^T] [W | B]^T,  and backward  g W + (s g B) A
    more inputs than outputs:  x W^T + (s x A^T) B^T,    and backward  [g | s g B] [W ; A]

[W | B] and [W ; A] are one matrix each; weights and adapters of the layers are views of it, so
nothing is put together again in a step. On an H200 with 32k tokens the products of Qwen3-0.6B with
LoRA of rank 16 take 106 ms a step instead of 140, those of the base alone 76.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
"""Layers of one module that read the same input."""
ALIGNED = 8
"""The columns of adapters are filled up to a multiple of this: 16 bytes, which matrix units ask of
every row of 16-bit numbers."""


@dataclass(frozen=True, eq=False)
class Packed:
    """Weights [N, k] and adapters of a group as matrices; the layers' own are views of them."""

    joined: Tensor
    """`wide`: [W | B], else [W ; A]."""
    other: Tensor
    """The factor that is not in it: A [R, k], or B [N, R] with a block for every layer."""
    wide: bool
    """More outputs than inputs."""

    @property
    def weight(self) -> Tensor:
        inputs, outputs = self._sizes()
        return self.joined[:outputs, :inputs]

    @property
    def first(self) -> Tensor:
        """A, [R, k]."""
        return self.other if self.wide else self.joined[self._sizes()[1] :]

    @property
    def second(self) -> Tensor:
        """B, [N, R]."""
        return self.joined[:, self._sizes()[0] :] if self.wide else self.other

    def _sizes(self) -> tuple[int, int]:
        if self.wide:
            return self.other.shape[1], self.joined.shape[0]
        return self.joined.shape[1], self.other.shape[0]


def forward(x: Tensor, packed: Packed, scaling: float) -> tuple[Tensor, Tensor]:
    """(what the layers give, side by side; s x A^T, which the backward needs)."""
    rows, inputs = x.shape
    if not packed.wide:
        low = _scaled(x, packed.first.t(), scaling)
        return (low @ packed.second.t()).addmm_(x, packed.weight.t()), low
    both = x.new_empty(rows, packed.joined.shape[1])
    both[:, :inputs] = x
    low = both[:, inputs:]
    _scaled(x, packed.first.t(), scaling, out=low)
    return both @ packed.joined.t(), low.contiguous()


def backward(
    gradient: Tensor, x: Tensor, low: Tensor, packed: Packed, scaling: float, *, of_input: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of A and of B, all layers together; that of x is empty if nobody asks."""
    rows, outputs = gradient.shape
    if packed.wide:
        below = _scaled(gradient, packed.second, scaling)
    else:
        both = gradient.new_empty(rows, outputs + packed.first.shape[0])
        both[:, :outputs] = gradient
        below = both[:, outputs:]
        _scaled(gradient, packed.second, scaling, out=below)
    of_first, of_second = below.t() @ x, gradient.t() @ low
    if not of_input:
        of_x = x.new_empty(0)
    elif packed.wide:
        of_x = (gradient @ packed.weight).addmm_(below, packed.first)
    else:
        of_x = both @ packed.joined
    return of_x, of_first, of_second


def _scaled(left: Tensor, right: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
    """factor * left @ right, rounded once."""
    if out is None:
        out = left.new_empty(left.shape[0], right.shape[1])
    return torch.addmm(out, left, right, beta=0, alpha=factor, out=out)


class GroupProduct(torch.autograd.Function):
    """For what is run as it is. After x come the factors of every layer, then what is constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Packed, scaling: float, *factors: Tensor) -> Tensor:
        made, low = forward(x, packed, scaling)
        ctx.save_for_backward(x, low)
        ctx.packed, ctx.scaling, ctx.factors = packed, scaling, factors
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, low = ctx.saved_tensors
        of_x, *both = backward(
            gradient, x, low, ctx.packed, ctx.scaling, of_input=ctx.needs_input_grad[0]
        )
        half = len(ctx.factors) // 2
        firsts, seconds = _of_layers(*both, ctx.factors[:half], ctx.factors[half:])
        return of_x if ctx.needs_input_grad[0] else None, None, None, *firsts, *seconds


# For what is compiled: operators that compilers do not look into. They would take sums apart again,
# and keep what can be had from x.
@torch.library.custom_op("expert::group_product", mutates_args=())
def group_product(
    x: Tensor,
    firsts: list[Tensor],
    seconds: list[Tensor],
    joined: Tensor,
    other: Tensor,
    wide: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """`forward` for compilers."""
    return forward(x, Packed(joined, other, wide), scaling)


@torch.library.custom_op("expert::group_gradients", mutates_args=())
def group_gradients(
    gradient: Tensor,
    x: Tensor,
    low: Tensor,
    joined: Tensor,
    other: Tensor,
    wide: bool,
    scaling: float,
    of_input: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward` for compilers."""
    packed = Packed(joined, other, wide)
    return backward(gradient, x, low, packed, scaling, of_input=of_input)


@group_product.register_fake
def _(
    x: Tensor,
    firsts: list[Tensor],
    seconds: list[Tensor],
    joined: Tensor,
    other: Tensor,
    wide: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    packed = Packed(joined, other, wide)
    outputs, ranks = packed.second.shape
    return x.new_empty(x.shape[0], outputs), x.new_empty(x.shape[0], ranks)


@group_gradients.register_fake
def _(
    gradient: Tensor,
    x: Tensor,
    low: Tensor,
    joined: Tensor,
    other: Tensor,
    wide: bool,
    scaling: float,
    of_input: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    of_x = x.new_empty(x.shape) if of_input else x.new_empty(0)
    ranks = low.shape[1]
    return of_x, x.new_empty(ranks, x.shape[1]), x.new_empty(gradient.shape[1], ranks)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, firsts, seconds, joined, other, ctx.wide, ctx.scaling = inputs
    ctx.shapes = [[factor.shape for factor in factors] for factors in (firsts, seconds)]
    ctx.save_for_backward(x, output[1], joined, other)


def _backward(ctx: Any, gradient: Tensor, of_low: Tensor | None) -> tuple[Any, ...]:
    x, low, joined, other = ctx.saved_tensors
    wanted = ctx.needs_input_grad[0]
    of_x, *both = group_gradients(gradient, x, low, joined, other, ctx.wide, ctx.scaling, wanted)
    firsts, seconds = _cut(*both, *ctx.shapes)
    return of_x if wanted else None, firsts, seconds, None, None, None, None


group_product.register_autograd(_backward, setup_context=_keep)


def _of_layers(
    of_first: Tensor, of_second: Tensor, firsts: Sequence[Tensor], seconds: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    shapes = [[factor.shape for factor in factors] for factors in (firsts, seconds)]
    return _cut(of_first, of_second, *shapes)


def _cut(
    of_first: Tensor,
    of_second: Tensor,
    firsts: Sequence[Sequence[int]],
    seconds: Sequence[Sequence[int]],
) -> tuple[list[Tensor], list[Tensor]]:
    """The rows of A and the block of B that belong to each layer."""
    ranks = _ends(shape[0] for shape in firsts)
    rows = _ends(shape[0] for shape in seconds)
    return (
        [of_first[start:end] for start, end in ranks],
        [
            of_second[start:end, left:right].contiguous()
            for (start, end), (left, right) in zip(rows, ranks, strict=True)
        ],
    )


def _ends(sizes: Any) -> list[tuple[int, int]]:
    """Where each of the parts of these sizes begins and ends."""
    ends = list(accumulate(sizes))
    return list(zip([0, *ends[:-1]], ends, strict=True))


class LayerGroup:
    """Layers of LoRA or DoRA that are computed together.

    The first one that is called computes all; the others take what is theirs if they are given the
    same tensor, and otherwise compute by themselves.
    """

    def __init__(self, layers: Sequence[Any], adapter: str) -> None:
        bases = [layer.get_base_layer() for layer in layers]
        self.packed = _pack(layers, bases, adapter)
        self.scaling: float = layers[0].scaling[adapter]
        self.firsts = [layer.lora_A[adapter].weight for layer in layers]
        self.seconds = [layer.lora_B[adapter].weight for layer in layers]
        self.outputs = [base.out_features for base in bases]
        self.held: tuple[Tensor, Sequence[Tensor]] | None = None

    def part(self, index: int, x: Tensor) -> Tensor | None:
        """What layer number `index` gives, [rows, outputs]; None: it is on its own."""
        if index == 0:
            held = x, self._all(x.reshape(-1, x.shape[-1])).split(self.outputs, dim=1)
            self.held = None if len(self.outputs) == 1 else held
            return held[1][0]
        if self.held is None or self.held[0] is not x:
            return None
        part = self.held[1][index]
        if index == len(self.outputs) - 1:
            self.held = None
        return part

    def _all(self, rows: Tensor) -> Tensor:
        packed = self.packed
        if torch.compiler.is_compiling():
            given = (rows, self.firsts, self.seconds, packed.joined, packed.other)
            made: Tensor = group_product(*given, packed.wide, self.scaling)[0]
            return made
        run: Any = GroupProduct.apply
        whole: Tensor = run(rows, packed, self.scaling, *self.firsts, *self.seconds)
        return whole


@torch.no_grad()
def _pack(layers: Sequence[Any], bases: Sequence[Any], adapter: str) -> Packed:
    """Put weights and adapters of the layers side by side; the layers' own become views of it."""
    firsts = [layer.lora_A[adapter].weight for layer in layers]
    seconds = [layer.lora_B[adapter].weight for layer in layers]
    weights = [base.weight for base in bases]
    inputs, outputs = weights[0].shape[1], sum(weight.shape[0] for weight in weights)
    ranks = -(-sum(first.shape[0] for first in firsts) // ALIGNED) * ALIGNED
    wide = outputs > inputs
    like = weights[0].new_zeros
    if wide:
        packed = Packed(like(outputs, inputs + ranks), like(ranks, inputs), wide)
    else:
        packed = Packed(like(outputs + ranks, inputs), like(outputs, ranks), wide)
    down = _ends(first.shape[0] for first in firsts)
    across = _ends(weight.shape[0] for weight in weights)
    for index, ((left, right), (start, end)) in enumerate(zip(down, across, strict=True)):
        _move(weights[index], packed.weight[start:end])
        _move(firsts[index], packed.first[left:right])
        _move(seconds[index], packed.second[start:end, left:right])
    return packed


def _move(parameter: nn.Parameter, place: Tensor) -> None:
    """Let a parameter live in `place`, with the values it has."""
    place.copy_(parameter)
    parameter.data = place


def group_layers(wrapped: nn.Module, layer_class: type[Any], adapter: str) -> int:
    """Compute layers of `layer_class` together where they read the same input; how many groups."""
    found = 0
    for parent in wrapped.modules():
        layers = {
            name: child
            for name, child in parent.named_children()
            if isinstance(child, layer_class) and can_be_grouped(child, adapter)
        }
        alone = set(layers)
        for names in SIBLINGS:
            together = [layers[name] for name in names if name in layers]
            if len(together) > 1 and _are_alike(together, adapter):
                _join(together, adapter)
                alone -= set(names)
                found += 1
        for name in sorted(alone):
            _join([layers[name]], adapter)
            found += 1
    return found


def _join(layers: Sequence[Any], adapter: str) -> None:
    group = LayerGroup(layers, adapter)
    for index, layer in enumerate(layers):
        layer.group, layer.index_in_group = group, index


def can_be_grouped(layer: Any, adapter: str) -> bool:
    """A plain base of the adapter's own dtype, and no dropout, which differs from layer to layer."""
    base = layer.get_base_layer()
    first, second = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    return (
        type(base) is nn.Linear
        and isinstance(layer.lora_dropout[adapter], nn.Identity)
        and base.weight.dtype == first.dtype == second.dtype
        and base.weight.device == first.device
    )


def _are_alike(layers: Sequence[Any], adapter: str) -> bool:
    inputs = {layer.get_base_layer().in_features for layer in layers}
    return len(inputs) == 1 and len({layer.scaling[adapter] for layer in layers}) == 1

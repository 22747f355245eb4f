"""Layers that read the same input as one product, with their LoRA or DoRA in it.

q, k and v read the same x, as gate and up do. Layer by layer that is three products of the base,
three of every factor, and sums in between; together it is one of each. The adapter is part of the
same product, so that all of it is rounded once, with the residual where that is added:

    forward   [x | s x A^T] [W | B]^T
    backward  [g | s g B] [W ; A]

A change that is small beside what it is added to would otherwise be rounded away
(model/lora/lora.py). Where g has more columns than x, room beside it costs more than another pass
over the result: g W + (s g B) A. The matrices are parts of one, [[W, B], [A, 0]], of which the
layers' own weights and adapters are views: nothing is put together in a step. The products of
Qwen3-0.6B with LoRA of rank 16 and 32k tokens take 98 ms this way on an H200, 140 layer by layer,
and those of the base alone 76. Quantised weights are unpacked for each product; then it is
x W^T + (s x A^T) B^T, rounded once too. A layer may have no adapter: then B has zeros there.

DoRA's scales and biases are not multiplied and added here: whoever reads the outputs does that
(`Finish` in kernels.py), which costs no pass over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from expert.model.fused.dropout import Drops, add_to_input, low_product, of_first
from expert.model.fused.float8 import FACTOR, Float8Weight, added
from expert.model.fused.kernels import Finish, finish_onto, scale_columns
from expert.model.fused.magnitudes import Magnitudes
from expert.model.fused.unfinished import MOST_RANKS, Rest

ALIGNED = 8
"""The columns of adapters are filled up to a multiple of this: 16 bytes, which matrix units ask of
every row of 16-bit numbers."""
BESIDE = 64
"""The same where they lie beside those of x and W: products go over them in steps of 64 columns, so
that these cost nothing, and every row begins at a multiple of 128 bytes. 1.01x at 0.6B and 1.017x
at 8B on an H200."""


class Kept(NamedTuple):
    """What a product keeps for its backward."""

    low: Tensor
    """s x A^T."""
    seeds: Tensor | None = None
    """Of what was dropped."""
    scale: Tensor | None = None
    """DoRA's, of every output."""
    lengths: Tensor | None = None
    """Of every row of W + s B A."""
    unscaled: Tensor | None = None
    """With DoRA, the outputs of layers whose outputs nobody else keeps."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Product:
    """Weights [N, k] and adapters of layers; the layers' own adapters are views of these."""

    first: Tensor
    """A, [R, k], of all layers."""
    second: Tensor
    """B, [N, R], with a block for every layer."""
    weight: Callable[[], Tensor]
    """W: as it lies, or unpacked."""
    matrix: Tensor | None
    """[[W, B], [A, 0]], of which all of them are parts; None: W is quantised."""
    float8: Float8Weight | None
    """W, which products of 8 bits are made with."""
    scaling: float
    firsts: Sequence[nn.Parameter]
    """The layers' own A, [rank, k] each."""
    seconds: Sequence[nn.Parameter]
    """The layers' own B."""
    places: Sequence[tuple[int, int]]
    """The rows of W of each of those."""
    bias: Tensor | None
    magnitudes: Magnitudes | None
    dropout: float
    for_swiglu: bool = False
    """SwiGLU reads the outputs, which can add what they lack."""

    @property
    def inputs(self) -> int:
        return self.first.shape[1]

    @property
    def outputs(self) -> int:
        return self.second.shape[0]

    @property
    def ranks(self) -> int:
        return self.first.shape[0]

    def trained(self) -> tuple[nn.Parameter, ...]:
        """Everything of the layers that trains."""
        vectors = self.magnitudes.vectors if self.magnitudes is not None else ()
        return (*self.firsts, *self.seconds, *vectors)

    def with_room(self, rows: Tensor) -> Tensor:
        """Memory for so many rows of x, with room for what is made of them beside it."""
        return rows.new_empty(len(rows), self.inputs + self.ranks)

    def drops(self, seeds: Tensor | None) -> Drops | None:
        if seeds is None or not self.firsts:
            return None
        return Drops(seeds, self.dropout, self.firsts[0].shape[0])

    @property
    def lacks_adapter(self) -> bool:
        """Whether the outputs are sums that who reads them completes."""
        able = self.for_swiglu and self.magnitudes is None and self.ranks <= MOST_RANKS
        return able and self.float8 is not None

    def finish(self, kept: Kept) -> Finish:
        rest = Rest(kept.low, self.second, FACTOR) if self.lacks_adapter else None
        return Finish(kept.scale, self.bias, rest)

    def forward(
        self, both: Tensor, seeds: Tensor | None = None, added_to: Tensor | None = None
    ) -> tuple[Tensor, Kept]:
        """added_to + W x + s B A x of x, which has room for s A x beside it, to be finished by who
        reads it, and what the backward needs."""
        x, low = both[:, : self.inputs], both[:, self.inputs :]
        drops = self.drops(seeds)
        if drops is None:
            _scaled(x, self.first.t(), self.scaling, out=low)
        else:
            low[:, len(self.firsts) * drops.rank :] = 0
            low_product(x, self.first, drops, self.scaling, low)
        unpacked = self.matrix is None and self.float8 is None
        weight = self.weight() if unpacked or self.magnitudes is not None else None
        if self.float8 is not None:
            made = self.float8.times(x)
            if not self.lacks_adapter:
                made = added(made, low, self.second, added_to)
        elif self.matrix is None:
            assert weight is not None
            made = (low @ self.second.t()).addmm_(x, weight.t())
            made = made if added_to is None else made.add_(added_to)
        else:
            weights = self.matrix[: self.outputs].t()
            made = both @ weights if added_to is None else torch.addmm(added_to, both, weights)
        scale, lengths = None, None
        if self.magnitudes is not None:
            assert weight is not None
            scale, lengths = self.magnitudes.scale(weight, self.first, self.second, self.scaling)
        return made, Kept(low.contiguous(), seeds, scale, lengths)

    def onto(
        self, residual: Tensor, both: Tensor, seeds: Tensor | None = None
    ) -> tuple[Tensor, Kept]:
        """residual + what is finished of the outputs, rounded once where there is no DoRA."""
        if self.magnitudes is None and self.bias is None:
            return self.forward(both, seeds, residual)
        made, kept = self.forward(both, seeds)
        if self.magnitudes is not None:
            kept = kept._replace(unscaled=made)
        return finish_onto(made, self.finish(kept), residual), kept

    def gradients(
        self, gradient: Tensor, made: Tensor | None, kept: Kept, *, wide: bool
    ) -> Gradients:
        """What the backward starts with. `gradient`: of what is finished; `made`: what `forward`
        gave, for DoRA; `wide`: of layers with more outputs than inputs, whose gradient may be
        changed in place."""
        if self.magnitudes is None:
            return Gradients(self, gradient, kept, wide=wide)
        assert made is not None
        assert kept.scale is not None
        assert kept.lengths is not None
        scaled, sums = scale_columns(gradient, made, kept.scale, in_place=wide)
        of_vectors = sums / kept.lengths
        pairs = zip(self.magnitudes.vectors, self.magnitudes.places, strict=True)
        parts = tuple(of_vectors[start:end].to(vector.dtype) for vector, (start, end) in pairs)
        return Gradients(self, scaled, kept, wide=wide, vectors=parts)


class Gradients:
    """The gradients of a product: first that of its input, and then, with the input, the others."""

    def __init__(
        self,
        product: Product,
        gradient: Tensor,
        kept: Kept,
        *,
        wide: bool,
        vectors: tuple[Tensor, ...] = (),
    ) -> None:
        self._product, self._gradient, self._low = product, gradient, kept.low
        self._vectors, self._drops = vectors, product.drops(kept.seeds)
        rows, outputs = gradient.shape
        self._both: Tensor | None = None
        if wide or product.matrix is None or self._drops is not None:
            self._below = _scaled(gradient, product.second, product.scaling)
            return
        both = room_beside(gradient, product.ranks)
        if both is None:
            both = gradient.new_empty(rows, outputs + product.ranks)
            both[:, :outputs] = gradient
        self._both = both
        self._below = _scaled(gradient, product.second, product.scaling, out=both[:, outputs:])

    def of_input(self) -> Tensor:
        made, rest = self.sum_of_input(complete=True)
        assert rest is None
        return made

    def sum_of_input(self, *, complete: bool) -> tuple[Tensor, Rest | None]:
        """The gradient of the input, and what it lacks where it need not be `complete`."""
        product = self._product
        if self._both is not None:
            assert product.matrix is not None
            return self._both @ product.matrix[:, : product.inputs], None
        if product.float8 is None:
            made = self._gradient @ product.weight()
        else:
            made = product.float8.back(self._gradient)
            low = self._below if self._drops is None else self._below[:, :0]
            second = product.first[: low.shape[1]].t()
            if not complete and self._drops is None and low.shape[1] <= MOST_RANKS:
                return made, Rest(low, second, FACTOR)
            made = added(made, low, second, None)
        if self._drops is not None:
            add_to_input(made, self._below, product.first, self._drops)
        elif product.float8 is None:
            made = made.addmm_(self._below, product.first)
        return made, None

    def of_trained(self, x: Tensor) -> list[Tensor]:
        """In the order of `Product.trained`; `x`: the input."""
        firsts = self._product.firsts
        if not firsts:
            return []
        if self._drops is None:
            of_firsts = self._below.t() @ x
        else:
            of_firsts = of_first(self._below, x, self._drops)
        of_second = self._gradient.t() @ self._low
        ranks = ends(first.shape[0] for first in firsts)
        return [
            *(of_firsts[start:end] for start, end in ranks),
            *(
                of_second[start:end, left:right].contiguous()
                for (start, end), (left, right) in zip(self._product.places, ranks, strict=True)
            ),
            *self._vectors,
        ]


def make_room(tensor: Tensor, columns: int) -> Tensor:
    """Memory like the matrix `tensor`, with room for so many more columns beside it."""
    whole = tensor.new_empty(tensor.shape[0], tensor.shape[1] + columns)
    made = whole[:, : tensor.shape[1]]
    made.whole = whole  # type: ignore[attr-defined]
    return made


def room_beside(tensor: Tensor, columns: int) -> Tensor | None:
    """The tensor and so many columns beside it, where `make_room` made it; else None."""
    whole: Tensor | None = getattr(tensor, "whole", None)
    if whole is None or whole.shape[1] != tensor.shape[1] + columns:
        return None
    return whole


def _scaled(left: Tensor, right: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
    """factor * left @ right, rounded once."""
    if out is None:
        out = left.new_empty(left.shape[0], right.shape[1])
    return torch.addmm(out, left, right, beta=0, alpha=factor, out=out)


def ends(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Where each of the parts of these sizes begins and ends."""
    return list(pairwise(accumulate(sizes, initial=0)))

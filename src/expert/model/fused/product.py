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
x W^T + (s x A^T) B^T, rounded once too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from expert.model.fused.kernels import scale_columns
from expert.model.lora.dora import row_norms

ALIGNED = 8
"""The columns of adapters are filled up to a multiple of this: 16 bytes, which matrix units ask of
every row of 16-bit numbers."""

Kept = tuple[Tensor, ...]
"""What a product keeps for its backward: s x A^T; with DoRA also the scale of every output."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Magnitudes:
    """DoRA's length of every row, instead of that of W + s B A."""

    vectors: Sequence[nn.Parameter]
    """The layers' own."""
    squares: Tensor
    """The squared length of every row of W."""

    def scale(self, weight: Tensor, product: Product) -> tuple[Tensor, Tensor]:
        """([N] what outputs are multiplied with, the length of every row of W + s B A); rounded as
        the layers' own would be, so that a fresh adapter scales by exactly 1."""
        given = (self.squares, weight, product.first, product.second, product.scaling)
        vectors = torch.cat([vector.detach() for vector in self.vectors])
        lengths = row_norms(*given)
        lengths = lengths.to(vectors.dtype).to(lengths.dtype)
        return vectors.to(lengths.dtype) / lengths, lengths


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
    scaling: float
    firsts: Sequence[nn.Parameter]
    """The layers' own A, [rank, k] each."""
    seconds: Sequence[nn.Parameter]
    """The layers' own B."""
    bias: Tensor | None
    magnitudes: Magnitudes | None

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

    def forward(self, both: Tensor, added_to: Tensor | None = None) -> tuple[Tensor, Kept]:
        """added_to + W x + s B A x of x, which has room for s A x beside it, and what the backward
        needs. What DoRA has scaled is kept too where something is added to it."""
        x, low = both[:, : self.inputs], both[:, self.inputs :]
        _scaled(x, self.first.t(), self.scaling, out=low)
        weight = self.weight() if self.matrix is None or self.magnitudes is not None else None
        residual = added_to if self.magnitudes is None and self.bias is None else None
        if self.matrix is None:
            assert weight is not None
            made = (low @ self.second.t()).addmm_(x, weight.t())
            made = made if residual is None else made.add_(residual)
        else:
            weights = self.matrix[: self.outputs].t()
            made = both @ weights if residual is None else torch.addmm(residual, both, weights)
        kept: Kept = (low.contiguous(),)
        if self.magnitudes is not None:
            assert weight is not None
            scale, lengths = self.magnitudes.scale(weight, self)
            kept += (scale, lengths) if added_to is None else (scale, lengths, made)
            # Near 1 bfloat16 has steps of 0.4 %: what is beyond 1 is rounded, not the scale.
            above = (scale - 1).to(made.dtype)
            made = torch.addcmul(made, made, above, out=made if added_to is None else None)
        made = made if self.bias is None else made.add_(self.bias)
        return made if residual is added_to else made.add_(added_to), kept  # type: ignore[arg-type]

    def gradients(
        self, gradient: Tensor, made: Tensor | None, kept: Kept, *, wide: bool
    ) -> Gradients:
        """What the backward starts with. `made`: what `forward` gave, where nothing was added;
        `wide`: of layers with more outputs than inputs, whose gradient may be changed in place."""
        if self.magnitudes is None:
            return Gradients(self, gradient, kept, wide=wide)
        scale, lengths = kept[1:3]
        before = kept[3] if made is None else made
        if made is not None and self.bias is not None:
            before = before - self.bias
        scaled, sums = scale_columns(gradient, before, scale, in_place=wide)
        of_vectors = sums / lengths
        if made is not None:
            # What was made has the scale in it already; a row without any length gives nothing.
            of_vectors = torch.where(scale == 0, torch.zeros_like(sums), of_vectors / scale)
        vectors = self.magnitudes.vectors
        places = zip(vectors, ends(vector.shape[0] for vector in vectors), strict=True)
        parts = tuple(of_vectors[start:end].to(vector.dtype) for vector, (start, end) in places)
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
        vectors: Kept = (),
    ) -> None:
        self._product, self._gradient, self._low = product, gradient, kept[0]
        self._vectors = vectors
        rows, outputs = gradient.shape
        self._both: Tensor | None = None
        if wide or product.matrix is None:
            self._below = _scaled(gradient, product.second, product.scaling)
            return
        both = room_beside(gradient, product.ranks)
        if both is None:
            both = gradient.new_empty(rows, outputs + product.ranks)
            both[:, :outputs] = gradient
        self._both = both
        self._below = _scaled(gradient, product.second, product.scaling, out=both[:, outputs:])

    def of_input(self) -> Tensor:
        product = self._product
        if self._both is not None:
            assert product.matrix is not None
            return self._both @ product.matrix[:, : product.inputs]
        return (self._gradient @ product.weight()).addmm_(self._below, product.first)

    def of_trained(self, x: Tensor) -> list[Tensor]:
        """In the order of `Product.trained`; `x`: the input."""
        of_first, of_second = self._below.t() @ x, self._gradient.t() @ self._low
        ranks = ends(first.shape[0] for first in self._product.firsts)
        rows = ends(second.shape[0] for second in self._product.seconds)
        return [
            *(of_first[start:end] for start, end in ranks),
            *(
                of_second[start:end, left:right].contiguous()
                for (start, end), (left, right) in zip(rows, ranks, strict=True)
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
    found = list(accumulate(sizes))
    return list(zip([0, *found[:-1]], found, strict=True))

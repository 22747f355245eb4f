"""Layers that read the same input as one matrix product, including their LoRA or DoRA.

q, k and v read the same x, and so do gate and up. One by one they need three base products, three
of each LoRA factor, and sums in between; packed, one of each. The adapter, and the residual where
there is one, are part of the same product, so that the sum is rounded once:

    forward   [x | s x A^T] [W | B]^T
    backward  [g | s g B] [W ; A]

Otherwise a small adapter change would be rounded away beside a large output (model/lora/lora.py).
Where g is wider than x, a second pass over the result is cheaper than copying g to add columns:
g W + (s g B) A. All matrices are parts of one, [[W, B], [A, 0]], and the layers' parameters are
views of it, so that no step concatenates anything. On an H200, the products of Qwen3-0.6B with
rank-16 LoRA and 32k tokens take 98 ms this way, 140 ms layer by layer, and 76 ms without LoRA.
Quantised weights are dequantised for each product: x W^T + (s x A^T) B^T, also rounded once.
B is zero for layers without an adapter.

DoRA's scale and the bias are applied by the kernel that reads the outputs, which saves a pass over
them (`Finish` in kernels.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from expert.model.fused.dropout import LayerDropout, add_to_input, low_product, of_first
from expert.model.fused.float8 import FACTOR, Float8Weight, added
from expert.model.fused.kernels import Epilogue, add_epilogue, scale_columns
from expert.model.fused.magnitudes import Magnitudes, row_scales
from expert.model.fused.swiglu_with_adapter import MOST_RANKS, DeferredAdapter

ALIGNED = 8
"""Adapter columns are padded to a multiple of this: tensor cores need rows of 16-bit numbers
aligned to 16 bytes."""
BESIDE = 64
"""The same for adapter columns beside x and W: matrix products take 64 columns at a time, so the
padding is free, and every row starts at a multiple of 128 bytes. 1.01x at 0.6B and 1.017x at 8B on
an H200."""


class SavedForBackward(NamedTuple):
    low: Tensor
    """s x A^T."""
    seeds: Tensor | None = None
    """Of dropout."""
    scale: Tensor | None = None
    """DoRA's scale of every output."""
    lengths: Tensor | None = None
    """Norm of every row of W + s B A."""
    unscaled: Tensor | None = None
    """The outputs before DoRA's scale, unless the caller saves them."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Product:
    """Packed weights [N, k] and adapters of layers; the layers' adapters are views of these."""

    first: Tensor
    """A of all layers, [R, k]."""
    second: Tensor
    """B of all layers, [N, R], block-diagonal."""
    weight: Callable[[], Tensor]
    """W, dequantised if needed."""
    matrix: Tensor | None
    """[[W, B], [A, 0]], which contains all of the above; None if W is quantised."""
    float8: Float8Weight | None
    """W for FP8 products."""
    scaling: float
    firsts: Sequence[nn.Parameter]
    """A of each adapted layer, [rank, k]."""
    seconds: Sequence[nn.Parameter]
    """B of each adapted layer."""
    places: Sequence[tuple[int, int]]
    """The rows of W of each adapted layer."""
    bias: Tensor | None
    magnitudes: Magnitudes | None
    dropout: float
    for_swiglu: bool = False
    """The outputs go to SwiGLU, whose kernel can add the adapter."""
    final_scale: Tensor | None = None
    """DoRA's scale of every output, if the weights no longer change."""

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
        vectors = self.magnitudes.vectors if self.magnitudes is not None else ()
        return (*self.firsts, *self.seconds, *vectors)

    def input_buffer(self, rows: Tensor) -> Tensor:
        """Memory for x with columns for s x A^T beside it, one row for each of `rows`."""
        return rows.new_empty(len(rows), self.inputs + self.ranks)

    def drops(self, seeds: Tensor | None) -> LayerDropout | None:
        if seeds is None or not self.firsts:
            return None
        return LayerDropout(seeds, self.dropout, self.firsts[0].shape[0])

    @property
    def defers_adapter(self) -> bool:
        """Whether `forward` leaves the adapter to the kernel that reads the outputs."""
        able = self.for_swiglu and self.magnitudes is None and self.ranks <= MOST_RANKS
        return able and self.float8 is not None

    def finish(self, kept: SavedForBackward) -> Epilogue:
        rest = DeferredAdapter(kept.low, self.second, FACTOR) if self.defers_adapter else None
        return Epilogue(kept.scale, self.bias, rest)

    def forward(
        self,
        both: Tensor,
        seeds: Tensor | None = None,
        added_to: Tensor | None = None,
        factor: float = 1.0,
    ) -> tuple[Tensor, SavedForBackward]:
        """added_to + factor (W x + s B A x), still without `finish`, and what the backward needs.
        `both`: x, with columns beside it that receive s A x; `factor`: only of what is added."""
        x, low = both[:, : self.inputs], both[:, self.inputs :]
        drops = self.drops(seeds)
        if drops is None:
            _scaled(x, self.first.t(), self.scaling, out=low)
        else:
            low[:, len(self.firsts) * drops.rank :] = 0
            low_product(x, self.first, drops, self.scaling, low)
        unpacked = self.matrix is None and self.float8 is None
        scaled = self.magnitudes is not None and self.final_scale is None
        weight = self.weight() if unpacked or scaled else None
        if self.float8 is not None:
            outputs = self.float8.times(x)
            if factor != 1.0 and added_to is not None:
                outputs = added(outputs, low, self.second, None).mul_(factor).add_(added_to)
            elif not self.defers_adapter:
                outputs = added(outputs, low, self.second, added_to)
        elif self.matrix is None:
            assert weight is not None
            outputs = (low @ self.second.t()).addmm_(x, weight.t())
            if added_to is not None:
                outputs = (outputs if factor == 1.0 else outputs.mul_(factor)).add_(added_to)
        else:
            weights = self.matrix[: self.outputs].t()
            if added_to is None:
                outputs = both @ weights
            else:
                outputs = torch.addmm(added_to, both, weights, alpha=factor)
        scale, lengths = self.final_scale, None
        if scaled:
            scale, lengths = self.row_scales(weight)
        return outputs, SavedForBackward(low.contiguous(), seeds, scale, lengths)

    def row_scales(self, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """DoRA's scale of every output, and the norm of every row of W + s B A."""
        assert self.magnitudes is not None
        weight = self.weight() if weight is None else weight
        return row_scales(self.magnitudes, weight, self.first, self.second, self.scaling)

    def for_answers(self) -> Product:
        """The same product, whose weights no longer change."""
        if self.magnitudes is None:
            return self
        return replace(self, final_scale=self.row_scales()[0])

    def onto(
        self,
        residual: Tensor | None,
        both: Tensor,
        seeds: Tensor | None = None,
        factor: float = 1.0,
    ) -> tuple[Tensor, SavedForBackward]:
        """residual + factor times the finished outputs; rounded once unless there is DoRA, a bias,
        or a factor with quantised weights."""
        if self.magnitudes is None and self.bias is None:
            return self.forward(both, seeds, residual, factor)
        outputs, kept = self.forward(both, seeds)
        if self.magnitudes is not None:
            kept = kept._replace(unscaled=outputs)
        alone = residual is None or factor != 1.0
        finished = torch.zeros_like(outputs) if residual is None or alone else residual
        made = add_epilogue(outputs, self.finish(kept), finished)
        return (made if residual is None or not alone else made * factor + residual), kept

    def gradients(
        self, gradient: Tensor, made: Tensor | None, kept: SavedForBackward, *, wide: bool
    ) -> Gradients:
        """Start the backward. `gradient`: of the finished outputs; `made`: the result of `forward`,
        for DoRA; `wide`: the layers have more outputs than inputs, and `gradient` may be changed in
        place."""
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
    """Gradients of a product: first of its input, then of its parameters."""

    def __init__(
        self,
        product: Product,
        gradient: Tensor,
        kept: SavedForBackward,
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
        both = spare_columns_buffer(gradient, product.ranks)
        if both is None:
            both = gradient.new_empty(rows, outputs + product.ranks)
            both[:, :outputs] = gradient
        self._both = both
        self._below = _scaled(gradient, product.second, product.scaling, out=both[:, outputs:])

    def of_input(self) -> Tensor:
        of_input, rest = self.sum_of_input(complete=True)
        assert rest is None
        return of_input

    def sum_of_input(self, *, complete: bool) -> tuple[Tensor, DeferredAdapter | None]:
        """The gradient of the input, and what it is missing unless `complete`."""
        product = self._product
        if self._both is not None:
            assert product.matrix is not None
            return self._both @ product.matrix[:, : product.inputs], None
        if product.float8 is None:
            of_input = self._gradient @ product.weight()
        else:
            of_input = product.float8.back(self._gradient)
            low = self._below if self._drops is None else self._below[:, :0]
            second = product.first[: low.shape[1]].t()
            if not complete and self._drops is None and low.shape[1] <= MOST_RANKS:
                return of_input, DeferredAdapter(low, second, FACTOR)
            of_input = added(of_input, low, second, None)
        if self._drops is not None:
            add_to_input(of_input, self._below, product.first, self._drops)
        elif product.float8 is None:
            of_input = of_input.addmm_(self._below, product.first)
        return of_input, None

    def of_trained(self, x: Tensor) -> list[Tensor]:
        """Gradients in the order of `Product.trained`; `x`: the input."""
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


def with_spare_columns(tensor: Tensor, columns: int) -> Tensor:
    """Empty memory like the matrix `tensor`, with `columns` spare ones beside it."""
    whole = tensor.new_empty(tensor.shape[0], tensor.shape[1] + columns)
    part = whole[:, : tensor.shape[1]]
    part.whole = whole  # type: ignore[attr-defined]
    return part


def spare_columns_buffer(tensor: Tensor, columns: int) -> Tensor | None:
    """The tensor with its `columns` spare ones if it is from `with_spare_columns`, else None."""
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
    """Start and end of consecutive parts of these sizes."""
    return list(pairwise(accumulate(sizes, initial=0)))

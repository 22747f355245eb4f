"""A Triton kernel that turns rows of logits into losses and, in place, gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from expert.model.fused.launching import kernel, power

tl: Any = None  # set by `kernel`


def losses_and_gradients(
    logits: Tensor, labels: Tensor, *, scale: float, softcap: float | None
) -> Tensor:
    """The float32 loss of every row; overwrites the logits with their gradient."""
    rows, vocabulary = logits.shape
    assert logits.is_contiguous()
    assert labels.is_contiguous()
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    # Up to 32 elements per thread: leaves registers for several rows on one multiprocessor.
    block = min(8192, power(vocabulary))
    warps = max(1, min(8, block // 256))
    kernel(_row_kernel)[(rows,)](
        logits, labels, losses, vocabulary, scale, softcap or 1.0,
        CAPPED=softcap is not None, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return losses


# Compiled by Triton from its source, which may use no global name but tl.
def _row_kernel(  # type: ignore[no-untyped-def]
    logits, labels, losses, vocabulary, scale, softcap, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    """One program handles one row: one pass for log-sum-exp, one that writes the gradient."""
    row = tl.program_id(0)
    start_of_row = logits + row.to(tl.int64) * vocabulary
    columns = tl.arange(0, BLOCK)
    label = tl.load(labels + row)

    if label < 0:  # unlabelled: no loss, no gradient
        for start in range(0, vocabulary, BLOCK):
            here = start + columns
            zeros = tl.zeros([BLOCK], dtype=logits.dtype.element_ty)
            tl.store(start_of_row + here, zeros, mask=here < vocabulary)
        tl.store(losses + row, 0.0)
    else:
        # Read before the second pass overwrites it: the reductions of the first pass are barriers
        # for all threads between this load and the first store.
        at_label = tl.load(start_of_row + label).to(tl.float32) * scale
        if CAPPED:
            at_label = softcap * (2.0 * tl.sigmoid(2.0 * at_label / softcap) - 1.0)

        top = float("-inf")
        total = 0.0
        for start in range(0, vocabulary, BLOCK):
            here = start + columns
            x = tl.load(start_of_row + here, mask=here < vocabulary, other=0.0)
            x = x.to(tl.float32) * scale
            if CAPPED:
                x = softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)
            x = tl.where(here < vocabulary, x, float("-inf"))
            new_top = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), 0)
            top = new_top
        log_total = top + tl.log(total)
        tl.store(losses + row, log_total - at_label)

        for start in range(0, vocabulary, BLOCK):
            here = start + columns
            x = tl.load(start_of_row + here, mask=here < vocabulary, other=0.0)
            x = x.to(tl.float32) * scale
            slope = scale
            if CAPPED:
                tanh = 2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0
                x = softcap * tanh
                slope = scale * (1.0 - tanh * tanh)
            gradient = tl.exp(x - log_total) - tl.where(here == label, 1.0, 0.0)
            tl.store(start_of_row + here, gradient * slope, mask=here < vocabulary)

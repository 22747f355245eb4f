"""Cross-entropy summed over the labelled positions, from all logits or chunk by chunk.

Compared with torch's linear_cross_entropy (2.13, one CPU thread, same loss, gradients equal to
1.5e-8): 0.73 s here and 1.20 s there with every position labelled, 0.37 and 1.13 s with half of
them, because only labelled positions are computed here (docs/benchmarks/fused-loss-cpu.json).
torch's cannot soft-cap logits, and is missing from some supported versions; Liger's also computes
every position, and needs Triton. Shapes are fixed, so that a CUDA graph can capture the loss.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from expert.model.fused.launching import kernel_failure, triton_installed
from expert.model.lora.added_product import computed_in
from expert.model.loss_kernel import losses_and_gradients
from expert.planning.memory.memory import evaluated_chunk_rows, loss_chunk_rows

Kernel = Literal["torch", "triton"]

NO_LABEL = -100
# The head's gradient is accumulated in float32 in pieces of this many vocabulary rows.
HEAD_PIECE = 16384
SCALED_PIECE = 8192


@dataclass(frozen=True, kw_only=True)
class HeadRules:
    """How a model turns head @ hidden into logits: a constant factor, then a soft cap."""

    scale: float = 1.0
    softcap: float | None = None


def kernel_for(device: torch.device) -> Kernel:
    """The fastest kernel of the fused loss that works on the device."""
    usable = device.type == "cuda" and triton_installed() and not loss_kernel_failure(device)
    return "triton" if usable else "torch"


@functools.cache
def loss_kernel_failure(device: torch.device) -> str:
    """Why the installed Triton kernel does not work here, tried once per process; empty if it
    does."""

    def losses_are_right() -> bool:
        logits = torch.tensor([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]], device=device)
        labels = torch.tensor([2, 1], device=device)
        right = F.cross_entropy(logits, labels, reduction="none")
        losses = losses_and_gradients(logits, labels, scale=1.0, softcap=None)
        return torch.allclose(losses, right, rtol=1e-4)

    if device.type != "cuda" or not triton_installed():
        return ""
    return kernel_failure(losses_are_right, "its losses are wrong")


def summed_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    target_places: Tensor,
    targets: int,
    *,
    fused: bool,
    chunk: int | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    kernel: Kernel = "torch",
) -> Tensor:
    """Cross-entropy of hidden [positions, width] under head [words, width], summed over targets.

    The sum is float32 (float64 for float64 inputs). The fused form never materialises all logits
    and computes the gradients of hidden, head and bias in the forward; the backward scales them.
    """
    dtype = computed_in(hidden)
    rules = HeadRules(scale=scale, softcap=softcap)
    hidden, labels = hidden.to(dtype), labels.reshape(-1)
    if not fused:
        logits = F.linear(hidden, head.to(dtype), None if bias is None else bias.to(dtype))
        wide = logits.to(_wide(dtype))
        wide = wide if scale == 1.0 else wide * scale
        wide = wide if softcap is None else softcap * torch.tanh(wide / softcap)
        return F.cross_entropy(wide, labels.long(), ignore_index=NO_LABEL, reduction="sum")
    chunks = _Chunks(labels, target_places, targets, _chunk_rows(chunk, hidden, head))
    training = torch.is_grad_enabled()
    wanted = tuple(training and t is not None and t.requires_grad for t in (hidden, head, bias))
    arguments = (hidden, head, bias, chunks, rules, kernel, wanted)
    loss: Tensor = _FusedLoss.apply(*arguments)  # type: ignore[no-untyped-call]
    return loss


def target_losses(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    target_places: Tensor,
    targets: int,
    *,
    chunk: int | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    kernel: Kernel = "torch",
) -> Tensor:
    """The cross-entropy of every target, in order; what `summed_loss` sums.

    The gradient of a target's loss with respect to its hidden state does not depend on what is made
    of the losses, so the forward computes it and the backward only scales it. The gradients of head
    and bias do: for them the backward computes the logits again.
    """
    dtype = computed_in(hidden)
    rules = HeadRules(scale=scale, softcap=softcap)
    hidden, labels = hidden.to(dtype), labels.reshape(-1)
    chunks = _Chunks(labels, target_places, targets, _chunk_rows(chunk, hidden, head))
    training = torch.is_grad_enabled()
    wanted = tuple(training and t is not None and t.requires_grad for t in (hidden, head, bias))
    losses: Tensor = _TargetLosses.apply(hidden, head, bias, chunks, rules, kernel, wanted)  # type: ignore[no-untyped-call]
    return losses


@torch.no_grad()
def evaluated(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    target_places: Tensor,
    targets: int,
    *,
    chunk: int | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The summed loss, and for how many targets (int64) the most likely token is right."""
    dtype = computed_in(hidden)
    rules = HeadRules(scale=scale, softcap=softcap)
    hidden, head, labels = hidden.to(dtype), head.to(dtype), labels.reshape(-1)
    size = _chunk_rows(chunk, hidden, head)
    if hidden.device.type == "cuda":
        size = min(size, evaluated_chunk_rows(head.shape[0]))
    loss = torch.zeros((), dtype=_wide(dtype), device=hidden.device)
    correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
    logits = hidden.new_empty(size if targets else 0, head.shape[0])
    for places, chunk_labels in _Chunks(labels, target_places, targets, size):
        _logits_into(logits, hidden.index_select(0, places), head, bias)
        correct += (logits.argmax(-1) == chunk_labels).sum()  # padding has label -100
        loss += _torch_rows(logits, chunk_labels, rules, gradients=False).sum()
    return loss, correct


class _Chunks:
    """The labelled positions in chunks of one size, the last one padded with unlabelled positions,
    so that every chunk can be captured or compiled with the same shape."""

    def __init__(self, labels: Tensor, target_places: Tensor, targets: int, size: int) -> None:
        self.labels, self.target_places, self.targets = labels, target_places, targets
        self.size = size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        last = self.labels.shape[0] - 1
        for start in range(0, self.targets, self.size):
            places = self.target_places[start : start + self.size].long()
            if places.shape[0] < self.size:
                places = F.pad(places, (0, self.size - places.shape[0]), value=last)
            yield places, self.labels.index_select(0, places)


class _FusedLoss(torch.autograd.Function):
    """Loss and gradients in one pass: two products per chunk, three if the head is trained."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        bias: Tensor | None,
        chunks: _Chunks,
        rules: HeadRules,
        kernel: Kernel,
        wanted: tuple[bool, bool, bool],
    ) -> Tensor:
        wide = _wide(hidden.dtype)
        d_hidden = torch.zeros_like(hidden) if wanted[0] else None
        d_head = torch.zeros_like(head, dtype=wide) if wanted[1] else None
        d_bias = torch.zeros_like(bias, dtype=wide) if wanted[2] and bias is not None else None
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        narrow = head.to(hidden.dtype)
        passed = _chunk_losses(hidden, narrow, bias, chunks, rules, kernel, gradients=any(wanted))
        for places, rows, logits, losses in passed:
            loss += losses.sum()
            # From here on the buffer holds the gradient of the logits.
            if d_hidden is not None:
                d_hidden.index_copy_(0, places, torch.mm(logits, narrow))
            if d_head is not None:
                _add_product(d_head, logits, rows)
            if d_bias is not None:
                d_bias += logits.sum(0, dtype=wide)
        ctx.save_for_backward(d_hidden, d_head, d_bias)
        ctx.dtypes = (hidden.dtype, head.dtype, None if bias is None else bias.dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        scaled = [None if t is None else _times(t, gradients[0]).to(dtype) for t, dtype in pairs]
        return (*scaled, None, None, None, None)


class _TargetLosses(torch.autograd.Function):
    """The loss of every target; see `target_losses`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        bias: Tensor | None,
        chunks: _Chunks,
        rules: HeadRules,
        kernel: Kernel,
        wanted: tuple[bool, bool, bool],
    ) -> Tensor:
        losses = hidden.new_empty(chunks.targets, dtype=_wide(hidden.dtype))
        d_rows = hidden.new_empty(chunks.targets, hidden.shape[1]) if wanted[0] else None
        narrow = head.to(hidden.dtype)
        passed = _chunk_losses(hidden, narrow, bias, chunks, rules, kernel, gradients=wanted[0])
        for number, (_, _, logits, of_chunk) in enumerate(passed):
            here = slice(number * chunks.size, min((number + 1) * chunks.size, chunks.targets))
            count = here.stop - here.start
            losses[here] = of_chunk.view(-1)[:count]
            if d_rows is not None:
                d_rows[here] = torch.mm(logits[:count], narrow)
        trains_head = wanted[1] or wanted[2]
        ctx.save_for_backward(d_rows, *((hidden, head, bias) if trains_head else ()))
        ctx.parts = chunks, rules, kernel, wanted, hidden.shape
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        chunks, rules, kernel, wanted, shape = ctx.parts
        d_rows, *of_head = ctx.saved_tensors
        factors = gradients[0][:, None]
        d_hidden = d_head = d_bias = None
        if d_rows is not None:
            d_hidden = d_rows.new_zeros(shape)
            scaled = (d_rows * factors).to(d_rows.dtype)
            # Targets that fill up a captured batch are the last place again, and have no label.
            d_hidden.index_copy_(0, chunks.target_places[: chunks.targets].long(), scaled)
        if of_head:
            hidden, head, bias = of_head
            d_head = torch.zeros_like(head, dtype=factors.dtype) if wanted[1] else None
            d_bias = torch.zeros_like(bias, dtype=factors.dtype) if wanted[2] else None
            again = _chunk_losses(hidden, head.to(hidden.dtype), bias, chunks, rules, kernel)
            for number, (_, rows, logits, _) in enumerate(again):
                its = factors[number * chunks.size : (number + 1) * chunks.size]
                scaled = (logits[: len(its)] * its).to(hidden.dtype)
                if d_head is not None:
                    _add_product(d_head, scaled, rows[: len(its)])
                if d_bias is not None:
                    d_bias += scaled.sum(0, dtype=d_bias.dtype)
            d_head = None if d_head is None else d_head.to(head.dtype)
            d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_head, d_bias, None, None, None, None


def _chunk_losses(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    chunks: _Chunks,
    rules: HeadRules,
    kernel: Kernel,
    *,
    gradients: bool = True,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Chunk by chunk: places, their hidden states, the gradient of the logits, and the losses. The
    gradients of all chunks are in the same memory."""
    logits = hidden.new_empty(chunks.size if chunks.targets else 0, head.shape[0])
    for places, labels in chunks:
        rows = hidden.index_select(0, places)
        _logits_into(logits, rows, head, bias)
        if kernel == "triton":
            losses = losses_and_gradients(logits, labels, scale=rules.scale, softcap=rules.softcap)
        else:
            losses = _torch_rows(logits, labels, rules, gradients=gradients)
        yield places, rows, logits, losses


def _chunk_rows(chunk: int | None, hidden: Tensor, head: Tensor) -> int:
    """The rows of a chunk: at most the number of positions, rounded up to 8 for tensor cores."""
    places = -(-hidden.shape[0] // 8) * 8
    # On a GPU, as many as the plan's memory estimate assumes.
    usual = loss_chunk_rows(head.shape[0]) if hidden.is_cuda else 1024
    return min(chunk or usual, places)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _logits_into(logits: Tensor, rows: Tensor, head: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        torch.mm(rows, head.t(), out=logits)
    else:
        torch.addmm(bias.to(rows.dtype), rows, head.t(), out=logits)


def _torch_rows(logits: Tensor, labels: Tensor, rules: HeadRules, *, gradients: bool) -> Tensor:
    """The loss of every row with torch operations, on any device; overwrites the logits.

    16-bit logits need a float32 copy of the chunk here, unlike in the Triton kernel.
    """
    wide = logits.to(_wide(logits.dtype))
    if rules.scale != 1.0:
        wide.mul_(rules.scale)
    tanh = None
    if rules.softcap is not None:
        tanh = wide.div_(rules.softcap).tanh_()
        wide = tanh * rules.softcap
    labelled = (labels >= 0)[:, None]
    words = labels.clamp(min=0).long()[:, None]
    top = wide.amax(-1, keepdim=True)
    losses = top - wide.gather(1, words)
    total = wide.sub_(top).exp_().sum(-1, keepdim=True)
    losses = (losses + total.log()).masked_fill_(~labelled, 0.0)
    if gradients:
        wide.div_(total).scatter_add_(1, words, wide.new_full(words.shape, -1.0))
        if tanh is not None:
            wide.mul_(tanh.square_().neg_().add_(1.0))
        if rules.scale != 1.0:
            wide.mul_(rules.scale)
        wide.masked_fill_(~labelled, 0.0)
        if wide.data_ptr() != logits.data_ptr():
            logits.copy_(wide)
    return losses


def _add_product(total: Tensor, gradient: Tensor, rows: Tensor) -> None:
    """total += gradient.T @ rows, with float32 products also for 16-bit factors.

    Not every supported torch has an addmm of a float32 sum and 16-bit factors, so the product is
    computed separately, in pieces that are small beside the sum.
    """
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.t(), rows)
        return
    for start in range(0, total.shape[0], HEAD_PIECE):
        piece = total[start : start + HEAD_PIECE]
        part = gradient[:, start : start + HEAD_PIECE].t()
        if gradient.is_cuda:
            piece.add_(torch.mm(part, rows, out_dtype=total.dtype))
        else:
            piece.addmm_(part.to(total.dtype), rows.to(total.dtype))


def _times(tensor: Tensor, factor: Tensor) -> Tensor:
    """Multiply the tensor by a scalar on its device, in place. A second backward over the same
    graph fails, because autograd detects that a saved tensor has changed.

    A plain product would first round the factor to the tensor's 16 bits, an error of up to 0.4 %
    common to all values.
    """
    if tensor.dtype == factor.dtype:
        return tensor.mul_(factor)
    for start in range(0, tensor.shape[0], SCALED_PIECE):
        piece = tensor[start : start + SCALED_PIECE]
        piece.copy_(piece.to(factor.dtype) * factor)
    return tensor

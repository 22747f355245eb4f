"""The loss: cross-entropy summed over the positions that have a label, whole or chunk by chunk.

Measured against torch's linear_cross_entropy (2.13, one CPU thread, same loss, gradients equal to
1.5e-8): 0.73 s here and 1.20 s there with every position labelled, 0.37 and 1.13 s with half of
them, as only labelled positions are computed here (docs/benchmarks/fused-loss-cpu.json). torch's
cannot cap logits as some models do, and is not in every supported version; Liger's computes every
position too, and needs Triton. Shapes are fixed, so that a CUDA graph can capture the loss.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from expert.model.loss_kernel import losses_and_gradients, triton_installed
from expert.planning.memory.memory import loss_chunk_rows

Kernel = Literal["torch", "triton"]

NO_LABEL = -100
# A gradient of the head is summed up in float32 in pieces of this many words.
HEAD_PIECE = 16384
SCALED_PIECE = 8192


@dataclass(frozen=True, kw_only=True)
class HeadRules:
    """How a model turns head @ hidden into logits: times a constant, then capped softly."""

    scale: float = 1.0
    softcap: float | None = None


def kernel_for(device: torch.device) -> Kernel:
    """The faster kernel of the fused loss that can run on the device."""
    usable = device.type == "cuda" and triton_installed() and not loss_kernel_trouble(device)
    return "triton" if usable else "torch"


@functools.cache
def loss_kernel_trouble(device: torch.device) -> str:
    """Why the Triton kernel, which is installed, does not run here; tried once in a process.

    Triton can be imported where it has no compiler or the card is not one of its own.
    """
    if device.type != "cuda" or not triton_installed():
        return ""
    try:
        logits = torch.tensor([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]], device=device)
        labels = torch.tensor([2, 1], device=device)
        right = F.cross_entropy(logits, labels, reduction="none")
        losses = losses_and_gradients(logits, labels, scale=1.0, softcap=None)
        wrong = not torch.allclose(losses, right, rtol=1e-4)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises here is the answer
        return f"{type(error).__name__}: {error}"
    return "its losses are wrong" if wrong else ""


def default_chunk(vocabulary: int, device: torch.device) -> int:
    """Rows of logits that are held at once; on a GPU those that the memory of a plan counts on."""
    return loss_chunk_rows(vocabulary) if device.type == "cuda" else 1024


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
    """The cross-entropy of hidden [places, width] under head [words, width], summed over targets.

    The sum is float32 (float64 for float64 inputs). The fused form never holds all logits and has
    the gradients of hidden, head and bias ready when it returns; backward only scales them.
    """
    dtype = _compute_dtype(hidden)
    rules = HeadRules(scale=scale, softcap=softcap)
    hidden, labels = hidden.to(dtype), labels.reshape(-1)
    if not fused:
        logits = F.linear(hidden, head.to(dtype), None if bias is None else bias.to(dtype))
        wide = _ruled(logits.to(_wide(dtype)), rules)
        return F.cross_entropy(wide, labels.long(), ignore_index=NO_LABEL, reduction="sum")
    chunks = _Chunks(labels, target_places, targets, _rows_at_once(chunk, hidden, head))
    learning = torch.is_grad_enabled()
    wanted = tuple(learning and t is not None and t.requires_grad for t in (hidden, head, bias))
    arguments = (hidden, head, bias, chunks, rules, kernel, wanted)
    loss: Tensor = _FusedLoss.apply(*arguments)  # type: ignore[no-untyped-call]
    return loss


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
    """The summed loss, and how many targets the most likely word hits, an int64."""
    dtype = _compute_dtype(hidden)
    rules = HeadRules(scale=scale, softcap=softcap)
    hidden, head, labels = hidden.to(dtype), head.to(dtype), labels.reshape(-1)
    size = _rows_at_once(chunk, hidden, head)
    loss = torch.zeros((), dtype=_wide(dtype), device=hidden.device)
    correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
    logits = hidden.new_empty(size if targets else 0, head.shape[0])
    for places, chunk_labels in _Chunks(labels, target_places, targets, size):
        _logits_into(logits, hidden.index_select(0, places), head, bias)
        correct += (logits.argmax(-1) == chunk_labels).sum()  # a place without one has -100
        loss += _torch_rows(logits, chunk_labels, rules, gradients=False).sum()
    return loss, correct


class _Chunks:
    """The labelled positions in groups of one size; the last is padded with positions that
    have no label, so that every group has the same shape and can be captured or compiled."""

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
    """Loss and gradients in one go: two products a chunk, three where the head is trained."""

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
        logits = hidden.new_empty(chunks.size if chunks.targets else 0, head.shape[0])
        for places, labels in chunks:
            rows = hidden.index_select(0, places)
            _logits_into(logits, rows, narrow, bias)
            if kernel == "triton":
                losses = losses_and_gradients(
                    logits, labels, scale=rules.scale, softcap=rules.softcap
                )
            else:
                losses = _torch_rows(logits, labels, rules, gradients=any(wanted))
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


def _rows_at_once(chunk: int | None, hidden: Tensor, head: Tensor) -> int:
    """The rows of a chunk: no more than there are places, in steps that matrix units like."""
    places = -(-hidden.shape[0] // 8) * 8
    return min(chunk or default_chunk(head.shape[0], hidden.device), places)


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """What a linear layer would compute in here."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _ruled(logits: Tensor, rules: HeadRules) -> Tensor:
    if rules.scale != 1.0:
        logits = logits * rules.scale
    return logits if rules.softcap is None else rules.softcap * torch.tanh(logits / rules.softcap)


def _logits_into(logits: Tensor, rows: Tensor, head: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        torch.mm(rows, head.t(), out=logits)
    else:
        torch.addmm(bias.to(rows.dtype), rows, head.t(), out=logits)


def _torch_rows(logits: Tensor, labels: Tensor, rules: HeadRules, *, gradients: bool) -> Tensor:
    """The loss of every row, from any device's own operations; the logits are used up.

    Logits of 16 bits need a float32 copy of the chunk here, which the Triton kernel does not.
    """
    wide = logits.to(_wide(logits.dtype))
    if rules.scale != 1.0:
        wide.mul_(rules.scale)
    tanh = None
    if rules.softcap is not None:
        tanh = wide.div_(rules.softcap).tanh_()
        wide = tanh * rules.softcap
    learnt = (labels >= 0)[:, None]
    words = labels.clamp(min=0).long()[:, None]
    top = wide.amax(-1, keepdim=True)
    losses = top - wide.gather(1, words)
    total = wide.sub_(top).exp_().sum(-1, keepdim=True)
    losses = (losses + total.log()).masked_fill_(~learnt, 0.0)
    if gradients:
        wide.div_(total).scatter_add_(1, words, wide.new_full(words.shape, -1.0))
        if tanh is not None:
            wide.mul_(tanh.square_().neg_().add_(1.0))
        if rules.scale != 1.0:
            wide.mul_(rules.scale)
        wide.masked_fill_(~learnt, 0.0)
        if wide.data_ptr() != logits.data_ptr():
            logits.copy_(wide)
    return losses


def _add_product(total: Tensor, gradient: Tensor, rows: Tensor) -> None:
    """Add gradient.T @ rows to total; 16-bit factors still give float32 products.

    torch has no addmm of a float32 sum and 16-bit factors in every supported version, so the
    product is made apart, in pieces that keep it small beside the sum.
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
    """The tensor times a scalar on its device, in place. A second backward over the same graph is
    refused by autograd, which sees that what was saved has changed.

    A plain product would first round the factor to the tensor's 16 bits, an error of up to 0.4 %
    that all values share.
    """
    if tensor.dtype == factor.dtype:
        return tensor.mul_(factor)
    for start in range(0, tensor.shape[0], SCALED_PIECE):
        piece = tensor[start : start + SCALED_PIECE]
        piece.copy_(piece.to(factor.dtype) * factor)
    return tensor

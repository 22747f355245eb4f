from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from expert.model import loss as loss_module
from expert.model.loss import (
    Kernel,
    evaluated,
    kernel_for,
    loss_kernel_failure,
    summed_loss,
)
from tests.each import each

WORDS, WIDTH = 23, 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    hidden: Tensor
    head: Tensor
    labels: Tensor
    target_places: Tensor
    targets: int

    def loss(self, **options: Any) -> Tensor:
        places = (self.labels, self.target_places, self.targets)
        return summed_loss(self.hidden, self.head, *places, **options)


def a_case(learnt: list[bool], *, dtype: torch.dtype = torch.float64, **sizes: int) -> Case:
    """Places of which some are learnt; the last one never is, as in every batch."""
    words, width = sizes.get("words", WORDS), sizes.get("width", WIDTH)
    generator = torch.Generator().manual_seed(len(learnt))
    learnt = [*learnt[:-1], False]
    places = [place for place, yes in enumerate(learnt) if yes]
    labels = torch.full((len(learnt),), -100, dtype=torch.int32)
    drawn = torch.randint(0, words, (len(places),), generator=generator)
    labels[places] = drawn.to(torch.int32)
    filled = places + [len(learnt) - 1] * (len(learnt) - len(places))
    return Case(
        hidden=torch.randn(len(learnt), width, generator=generator).to(dtype).requires_grad_(),
        head=torch.randn(words, width, generator=generator).to(dtype).requires_grad_(),
        labels=labels,
        target_places=torch.tensor(filled, dtype=torch.int32),
        targets=len(places),
    )


def on_card(case: Case, **changes: Tensor) -> Case:
    """The same case on the card, as leaves of a graph of its own."""
    moved = {name: value.detach().cuda() for name, value in vars(case).items() if name != "targets"}
    moved |= changes
    moved |= {name: moved[name].requires_grad_() for name in ("hidden", "head")}
    return dataclasses.replace(case, **moved)


def reference(case: Case, bias: Tensor | None, softcap: float | None, scale: float) -> Tensor:
    """The definition, in float64, one place at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for place in range(len(case.labels)):
        if case.labels[place] >= 0:
            logits = case.head.double() @ case.hidden[place].double()
            logits = (logits if bias is None else logits + bias.double()) * scale
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            total = total - F.log_softmax(logits, -1)[int(case.labels[place])]
    return total


RULES = [(False, None, 1.0), (True, None, 1.0), (False, 2.0, 1.0), (True, 3.0, 0.25)]
TARGETS = {
    "none": [False] * 12,
    "one": [False] * 5 + [True] + [False] * 6,
    "all but the last": [True] * 12,
    "some": [True, False, True, True, False, False, True, True, True, False, True, False],
}


@each("learnt", TARGETS.values(), ids=TARGETS.keys())
@each("chunk", [1, 4, 5, 100, None])
@each(("biased", "softcap", "scale"), RULES)
def test_fused_and_plain_losses_and_gradients_are_the_definition(
    learnt, chunk, biased, softcap, scale
):
    case = a_case(learnt)
    bias = torch.randn(WORDS, dtype=torch.float64).requires_grad_() if biased else None
    inputs = [case.hidden, case.head, *([bias] if bias is not None else [])]
    right = reference(case, bias, softcap, scale) * 3
    expected = (
        torch.autograd.grad(right, inputs, allow_unused=True, materialize_grads=True)
        if case.targets
        else [torch.zeros_like(each) for each in inputs]
    )
    for fused in (True, False):
        options: dict[str, Any] = {"bias": bias, "softcap": softcap, "scale": scale}
        loss = case.loss(fused=fused, chunk=chunk, **options) * 3  # a gradient that is not 1
        found = torch.autograd.grad(loss, inputs)
        # float64 rounds at 1e-16; sums of at most 23 products of numbers below 10.
        torch.testing.assert_close(loss, right, rtol=0, atol=1e-12)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    if not case.targets:
        assert loss.item() == 0
        assert all((each == 0).all() for each in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_stays_within_its_rounding(dtype):
    case = a_case(TARGETS["some"], dtype=dtype, words=300, width=64)
    loss = case.loss(fused=True, chunk=4)
    assert loss.dtype == torch.float32
    right = reference(case, None, None, 1.0)
    # Logits near 30 carry an error of eps * 30 each; 8 targets are summed up.
    tolerance = 8 * 30 * torch.finfo(dtype).eps
    torch.testing.assert_close(loss.double(), right, rtol=0, atol=tolerance)
    found = torch.autograd.grad(loss, (case.hidden, case.head))
    expected = torch.autograd.grad(right, (case.hidden, case.head))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        # An error of 30 * eps in a logit moves its probability by that much, relatively.
        assert (one.double() - other.double()).norm() < 30 * torch.finfo(dtype).eps * other.norm()


def test_a_frozen_head_gets_no_gradient_and_none_is_allocated(monkeypatch):
    case = a_case(TARGETS["some"])
    case.head.requires_grad_(False)
    shapes = []
    real = torch.zeros_like

    def counted(tensor: Tensor, **options: Any) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return real(tensor, **options)

    monkeypatch.setattr(torch, "zeros_like", counted)
    case.loss(fused=True).backward()
    assert shapes == [tuple(case.hidden.shape)]
    assert case.head.grad is None
    assert case.hidden.grad is not None


def test_a_second_backward_over_one_loss_is_refused_and_not_wrong():
    case = a_case(TARGETS["some"])
    loss = case.loss(fused=True) * 3
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autocast_computes_in_its_type_and_gives_gradients_in_the_weights_own():
    case = a_case(TARGETS["some"], dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        fused, plain = case.loss(fused=True), case.loss(fused=False)
    exact = case.loss(fused=False)
    # Logits below 16 rounded to bf16 are off by at most 2^-5, 8 targets are summed up.
    assert 0 < abs(fused - exact) < 8 * 2**-5
    torch.testing.assert_close(fused, plain, rtol=0, atol=1e-4)  # the same bf16 logits
    fused.backward()
    assert case.head.grad is not None
    assert case.head.grad.dtype == torch.float32


@each("learnt", TARGETS.values(), ids=TARGETS.keys())
@each(("biased", "softcap", "scale"), RULES)
def test_evaluation_gives_the_loss_and_counts_the_hits(learnt, biased, softcap, scale):
    case = a_case(learnt)
    bias = torch.randn(WORDS, dtype=torch.float64) if biased else None
    logits = F.linear(case.hidden, case.head, bias)
    best = logits.argmax(-1).to(torch.int32)
    half = torch.arange(12) % 2 == 0  # every other target is what the model would say
    labels = torch.where(half & (case.labels >= 0), best, case.labels)
    case = dataclasses.replace(case, labels=labels)
    places = (case.labels, case.target_places, case.targets)
    options: dict[str, Any] = {"bias": bias, "softcap": softcap, "scale": scale}
    loss, correct = evaluated(case.hidden, case.head, *places, chunk=5, **options)
    torch.testing.assert_close(loss, reference(case, bias, softcap, scale), rtol=0, atol=1e-12)
    assert correct == ((best == case.labels) & (case.labels >= 0)).sum()
    assert correct.dtype == torch.int64
    assert not loss.requires_grad


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("words", [65, 1000, 50_257])
@pytest.mark.parametrize(("biased", "softcap", "scale"), RULES)
def test_the_triton_kernel_gives_what_torchs_operations_give(dtype, words, biased, softcap, scale):
    cpu = a_case([place % 3 > 0 for place in range(300)], dtype=dtype, words=words, width=64)
    case = on_card(cpu, hidden=(cpu.hidden.detach() / 4).cuda())
    bias = torch.randn(words, device="cuda", dtype=dtype).requires_grad_() if biased else None
    inputs = [case.hidden, case.head, *([bias] if bias is not None else [])]
    kernels: list[Kernel] = ["torch", "triton"]
    options: dict[str, Any] = {"bias": bias, "softcap": softcap, "scale": scale}
    losses = [case.loss(fused=True, chunk=64, kernel=kernel, **options) for kernel in kernels]
    one, other = (torch.autograd.grad(loss, inputs) for loss in losses)
    # The same logits, statistics in float32: 199 losses of about 5, each to 1e-6 relative.
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-3)
    for left, right in zip(one, other, strict=True):
        # Both round the same float32 gradient to the type of the logits, once.
        bound = max(2 * torch.finfo(dtype).eps, 1e-5)
        assert (left.double() - right.double()).norm() <= bound * left.double().norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_the_incoming_gradient_is_not_rounded_to_sixteen_bits():
    """1/3 in bf16 is 0.2 % off, for all values alike; a product of the right factor is not."""
    case = on_card(a_case([True] * 400, dtype=torch.bfloat16))
    (once,) = torch.autograd.grad(case.loss(fused=True), case.hidden)
    (third,) = torch.autograd.grad(case.loss(fused=True) / 3, case.hidden)
    nonzero = once.abs() > 1e-3
    ratio = (third[nonzero].double() / once[nonzero].double()).mean()
    # 2800 values with rounding errors below 0.2 % of either sign: their mean is 50 times closer.
    assert abs(ratio * 3 - 1) < 2e-4


def test_a_loss_kernel_that_does_not_run_makes_way_for_torchs_own(monkeypatch):
    """Triton can be imported where it finds no C compiler."""
    card = torch.device("cuda")

    def kernel(*_, **__):
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

    monkeypatch.setattr(loss_module, "triton_installed", lambda: True)
    monkeypatch.setattr(torch, "tensor", lambda numbers, device: torch.Tensor(numbers))
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", lambda *_, **__: torch.ones(2))
    monkeypatch.setattr(loss_module, "losses_and_gradients", kernel)
    loss_kernel_failure.cache_clear()
    try:
        assert kernel_for(card) == "torch"
        assert "Failed to find C compiler" in loss_kernel_failure(card)
        for losses, chosen in ((torch.ones(2), "triton"), (torch.zeros(2), "torch")):
            found = losses
            monkeypatch.setattr(loss_module, "losses_and_gradients", lambda *_, **__: found)  # noqa: B023
            loss_kernel_failure.cache_clear()
            assert kernel_for(card) == chosen
    finally:
        loss_kernel_failure.cache_clear()

"""Float32 master weights of 16-bit parameters."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from expert.training import optim
from expert.training.optim import MasterWeights
from tests.training.optimizers import bits, parameters


@pytest.mark.parametrize("scratch", [100, 700, 6000, 2**24])
def test_masters_add_up_gradients_exactly_as_float32_does(scratch, monkeypatch):
    monkeypatch.setattr(optim, "SCRATCH_WEIGHTS", scratch)
    named = [(n, Parameter(p.detach().bfloat16()) if p.ndim == 2 else p) for n, p in parameters()]
    masters = MasterWeights(named)
    expected = {name: torch.zeros(p.shape) for name, p in named}
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        for name, parameter in named:
            grad = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
            expected[name] += grad.float()
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        masters.collect()
        assert all(p.grad is None for _, p in named if p.dtype != torch.float32)
    found = {name: m.grad for name, m in masters.named if m.grad is not None}
    assert bits(found) == bits(expected)


def test_a_new_step_does_not_remember_the_gradients_of_the_last():
    weight = Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    masters = MasterWeights([("weight", weight)])
    master = masters.named[0][1]
    for value in (float("nan"), 2.0):
        master.grad = None
        weight.grad = torch.full_like(weight, value)
        masters.collect()
    assert master.grad is not None
    assert torch.equal(master.grad, torch.full((4, 4), 2.0))


def test_gradients_of_float32_parameters_are_copied_into_memory_allocated_once(monkeypatch):
    weight = Parameter(torch.zeros(4, 4))
    masters, allocated, empty_like = MasterWeights([("weight", weight)]), [], torch.empty_like

    def counted(tensor):
        allocated.append(tensor.shape)
        return empty_like(tensor)

    monkeypatch.setattr(torch, "empty_like", counted)
    for value in (1.0, 2.0, 3.0):
        weight.grad = None
        masters.take([torch.full_like(weight, value)])
        assert torch.equal(weight.grad, torch.full((4, 4), value))
    assert len(allocated) == 1

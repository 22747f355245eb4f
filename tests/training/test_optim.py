"""Optimizers: weight decay, exact round trips, skipped steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter

from expert.core.errors import ExpertError
from expert.training.optim import (
    OptimizerUnavailable,
    clip,
    has_weight_decay,
    load_optimizer_tensors,
    optimizer_tensors,
    step_if_finite,
)
from tests.each import each
from tests.training.optimizers import bits, give_gradients, made, parameters, train

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit", "sgd")


# --- building ------------------------------------------------------------------------------------


@each(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.mlp.up_proj.weight", (8, 4), True),
        ("lm_head.weight", (8, 4), True),
        ("layers.0.q_proj.lora_A.default.weight", (1, 4), True),
        ("embed_tokens.lora_embedding_A.default", (2, 4), True),
        ("layers.0.q_proj.lora_E", (4, 1), False),
        ("layers.0.q_proj.lora_magnitude_vector.default.weight", (4,), False),
        ("layers.0.k_proj.ia3_l.default", (4, 1), False),
        ("layers.0.down_proj.ia3_l.default", (1, 4), False),
        ("layers.0.input_layernorm.weight", (4,), False),
        ("layers.0.up_proj.bias", (4,), False),
        ("model.embed_tokens.weight", (8, 4), False),
        ("transformer.wte.weight", (8, 4), False),
        ("token_embedding.weight", (8, 4), False),
        ("soft_prompts.style", (8, 4), False),
    ],
)
def test_only_matrices_that_are_no_embeddings_decay(name, shape, expected):
    assert has_weight_decay(name, torch.zeros(shape)) is expected


def test_fused_adamw_agrees_with_the_plain_one():
    results = []
    for kind in ("adamw_torch", "adamw_torch_fused"):
        named = parameters()
        train(made(kind, named), named, range(5))
        results.append(torch.cat([p.detach().flatten() for _, p in named]))
    # Five steps of 1e-2, each rounded in another order: float32 spacing at 4 is 5e-7 a step.
    assert torch.allclose(results[0], results[1], rtol=0, atol=5e-6)


def test_a_parameter_the_fused_kernel_does_not_support_is_an_error():
    named = [("weight", Parameter(torch.zeros(4, 4, device="meta")))]
    with pytest.raises(OptimizerUnavailable) as caught:
        made("adamw_torch_fused", named)
    assert caught.value.optimizer == "adamw_torch_fused"
    assert str(caught.value).startswith("optim: adamw_torch_fused cannot run here: `fused=True`")
    assert str(caught.value).endswith("(use optim: adamw_torch)")


def test_missing_bitsandbytes_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(OptimizerUnavailable, match=r"bitsandbytes is not installed .*pip install"):
        made("adamw_bnb_8bit", parameters())


# --- the state as tensors ------------------------------------------------------------------------


@each("kind", OPTIMIZERS)
def test_a_resumed_optimizer_steps_exactly_as_the_first_would_have(kind, tmp_path: Path):
    named = parameters()
    optimizer = made(kind, named)
    train(optimizer, named, range(3))
    save_file(optimizer_tensors(optimizer, named), tmp_path / "optimizer.safetensors")
    resumed = [(name, Parameter(p.detach().clone())) for name, p in named]
    again = made(kind, resumed)
    load_optimizer_tensors(again, resumed, load_file(tmp_path / "optimizer.safetensors"))
    assert bits(optimizer_tensors(again, resumed)) == bits(optimizer_tensors(optimizer, named))
    for step in range(3, 6):
        train(optimizer, named, [step])
        train(again, resumed, [step])
        assert bits(resumed) == bits(named)
    assert bits(optimizer_tensors(again, resumed)) == bits(optimizer_tensors(optimizer, named))


def test_plain_and_fused_adamw_take_each_others_state():
    named = parameters()
    fused = made("adamw_torch_fused", named)
    train(fused, named, range(2))
    plain = made("adamw_torch", named)
    load_optimizer_tensors(plain, named, optimizer_tensors(fused, named))
    assert bits(optimizer_tensors(plain, named)) == bits(optimizer_tensors(fused, named))
    train(plain, named, [2])


def test_the_weight_decay_of_sgd_shrinks_weights_and_is_not_multiplied_by_its_momentum():
    matrix = Parameter(torch.full((4, 4), 2.0))
    named = [("linear.weight", matrix)]
    optimizer = made("sgd", named, learning_rate=0.1, weight_decay=0.5)
    for _ in range(3):
        matrix.grad = torch.zeros_like(matrix)
        optimizer.step()
    assert torch.allclose(matrix, torch.full((4, 4), 2.0 * 0.95**3))


def saved_adamw() -> tuple[list[tuple[str, Parameter]], dict[str, Tensor]]:
    named = parameters()
    optimizer = made("adamw_torch", named)
    train(optimizer, named, [0])
    return named, optimizer_tensors(optimizer, named)


@pytest.mark.parametrize("kind", ["sgd", "adamw_bnb_8bit"])
def test_state_of_another_optimizer_is_refused_and_changes_nothing(kind):
    named, tensors = saved_adamw()
    optimizer = made(kind, named)
    train(optimizer, named, [0])
    before = bits(optimizer_tensors(optimizer, named))
    with pytest.raises(ExpertError, match="has exp_avg, exp_avg_sq, step, this optimizer"):
        load_optimizer_tensors(optimizer, named, tensors)
    assert bits(optimizer_tensors(optimizer, named)) == before


@each(
    ("name", "value", "told"),
    [
        (
            "embed_tokens.exp_avg",
            torch.zeros(16),
            "no parameter of this run is called embed_tokens",
        ),
        ("blocks.0.up.bias.exp_avg", None, r"blocks\.0\.up\.bias: the saved optimizer state"),
        (
            "blocks.0.up.bias.exp_avg",
            torch.zeros(17),
            r"saved with shape \[17\], the parameter has \[16\]",
        ),
    ],
)
def test_a_state_that_does_not_fit_the_parameters_is_refused(name, value, told):
    named, tensors = saved_adamw()
    tensors[name] = value
    known = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ExpertError, match=told):
        load_optimizer_tensors(made("adamw_torch", named), named, known)


# --- clipping, and skipped steps -----------------------------------------------------------------


def test_clipping_scales_all_gradients_to_the_norm():
    named = parameters()
    give_gradients(named, 0)
    whole = torch.cat([p.grad.flatten() for _, p in named if p.grad is not None])
    norm = clip([p for _, p in named], 0.5)
    after = torch.cat([p.grad.flatten() for _, p in named if p.grad is not None])
    # Sums of 1e4 squares in float32: relative error far below 1e-5; 1e-6 guards the division.
    assert torch.allclose(norm, whole.double().norm().float(), rtol=1e-5)
    assert torch.allclose(after, whole * (0.5 / norm), rtol=1e-5)


@each(
    ("max_norm", "first"),
    [(0.0, None), (1e9, None), (1.0, float("nan")), (1.0, float("inf"))],
    ids=["not asked for", "small enough", "a norm that is not a number", "an infinite norm"],
)
def test_gradients_that_are_not_clipped_keep_every_bit(max_norm, first):
    named = parameters()
    give_gradients(named, 0)
    if first is not None:
        named[0][1].grad[0, 0] = first
    before = bits((name, p.grad) for name, p in named if p.grad is not None)
    norm = clip([p for _, p in named], max_norm)
    assert bool(torch.isfinite(norm)) is (first is None)
    assert bits((name, p.grad) for name, p in named if p.grad is not None) == before


@each("kind", OPTIMIZERS)
@each("good_before", [0, 2])
@each("poison", [float("nan"), float("inf")])
def test_a_bad_gradient_changes_nothing_and_leaves_no_trace(kind, good_before, poison):
    named, clean = parameters(), parameters()
    optimizer, clean_optimizer = made(kind, named), made(kind, clean)
    train(optimizer, named, range(good_before))
    train(clean_optimizer, clean, range(good_before))
    before, moments = bits(named), bits(optimizer_tensors(optimizer, named))
    give_gradients(named, 77)
    last = named[2][1].grad
    assert last is not None
    last[0, 0] = poison
    applied = step_if_finite(optimizer, clip([p for _, p in named], 1.0))
    assert not applied
    assert bits(named) == before
    if good_before:
        assert bits(optimizer_tensors(optimizer, named)) == moments
    train(optimizer, named, [5])
    train(clean_optimizer, clean, [5])
    assert bits(named) == bits(clean)
    untroubled = optimizer_tensors(clean_optimizer, clean)
    assert bits(optimizer_tensors(optimizer, named)) == bits(untroubled)


def test_the_fused_step_does_not_read_the_norm_back(monkeypatch):
    named = parameters()
    optimizer = made("adamw_torch_fused", named)
    give_gradients(named, 0)

    def forbidden(_self):
        raise AssertionError("a tensor was read back")

    monkeypatch.setattr(Tensor, "__bool__", forbidden)
    monkeypatch.setattr(Tensor, "item", forbidden)
    step_if_finite(optimizer, clip([p for _, p in named], 1.0))


@each("kind", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_the_second_factor_of_an_adapter_has_the_rate_of_lora_plus(kind):
    named = parameters()
    optimizer = made(kind, named, loraplus_lr_ratio=16.0)
    names = {id(parameter): name for name, parameter in named}
    rates = {
        names[id(parameter)]: group["rate_factor"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    second = {name for name, factor in rates.items() if factor == 16}
    assert second == {"blocks.0.q_proj.lora_B.default.weight"}
    assert set(rates.values()) == {1.0, 16.0}

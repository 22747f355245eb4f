"""LoRA added inside the product, compared with PEFT's, which is added to the rounded product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from expert.model.lora import lora
from expert.model.lora.dora import replace_dora_layers
from expert.model.lora.lora import added_class, replace_lora_layers
from tests.each import each
from tests.model.models import (
    WIDTH,
    documents,
    load,
    make_batch,
    stir,
)

INPUTS, OUTPUTS, RANK, SCALING = 64, 48, 4, 2.5
# Sums of some seventy products in float64, which keeps 53 bits, in another order.
EXACT = 1e-12
# A rounding to bfloat16 is at most this, of a value.
BFLOAT16_ERROR = 2**-8


def adapted(
    base: str, dtype: torch.dtype, *, bias: bool, dropout: float, size: float, dora: bool
) -> Any:
    """PEFT's layer with an adapter that changes what the base gives by about `size` of it."""
    from peft import LoraConfig
    from peft.tuners.lora.layer import Linear
    from transformers.pytorch_utils import Conv1D

    with torch.random.fork_rng():
        torch.manual_seed(0)
        turned = base == "conv1d"
        layer: Any = Conv1D(OUTPUTS, INPUTS) if turned else nn.Linear(INPUTS, OUTPUTS, bias=bias)
        nn.init.normal_(layer.weight, std=INPUTS**-0.5)
        if layer.bias is not None:
            nn.init.normal_(layer.bias)
        layer.to(dtype).requires_grad_(False)
        config = LoraConfig(r=RANK, lora_dropout=dropout, use_dora=dora, fan_in_fan_out=turned)
        alpha: Any = RANK * SCALING
        wrapped: Any = Linear(layer, "default", config=config, r=RANK, lora_alpha=alpha).to(dtype)
        nn.init.normal_(wrapped.lora_A["default"].weight, std=INPUTS**-0.5)
        nn.init.normal_(wrapped.lora_B["default"].weight, std=size / SCALING / RANK**0.5)
    return wrapped.train()


def pair(
    base: str = "linear", dtype: torch.dtype = torch.float64, *, added: bool = True, **options: Any
) -> Any:
    """(ours, PEFT's own) with the same values; not `added`: with our DoRA alone."""
    given = {"bias": False, "dropout": 0.0, "size": 1.0, "dora": False, **options}
    ours, theirs = (adapted(base, dtype, **given) for _ in range(2))
    replace_dora_layers(nn.Sequential(ours), "default")
    for layer in (ours, theirs):
        for vector in layer.lora_magnitude_vector.values():
            vector.weight.data = torch.linspace(0.5, 1.5, OUTPUTS, dtype=dtype)
    if added:
        replace_lora_layers(nn.Sequential(ours), "default")
        assert type(ours) is added_class("Linear")
    return ours, theirs


def draw(dtype: torch.dtype = torch.float64, rows: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(3, rows, INPUTS, dtype=torch.float64, generator=generator).to(dtype)


def outcome(layer: Any, x: Tensor) -> list[Tensor]:
    """What the layer gives, and the gradients of what it read and of its adapter."""
    x = x.clone().requires_grad_()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        given = layer(x)
    weights = torch.linspace(-1, 1, given.numel(), dtype=given.dtype).view_as(given)
    learnt = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    assert len(learnt) >= 2
    return [given.detach(), *torch.autograd.grad(given, [x, *learnt], weights)]


@each("base", ["linear", "conv1d"])
@each(
    "options",
    [
        *({}, {"bias": True}, {"dropout": 0.3}),
        *(
            {"dora": True},
            {"dora": True, "bias": True},
            {"dora": True, "dropout": 0.3, "added": False},
        ),
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_peft(base, options):
    ours, theirs = pair(base, **options)
    for one, other in zip(outcome(ours, draw()), outcome(theirs, draw()), strict=True):
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)


@each("dora", [False, True])
def test_an_adapter_that_is_off_or_merged_is_left_to_peft(dora):
    ours, theirs = pair(dora=dora)
    for layer in (ours, theirs):
        layer.enable_adapters(enabled=False)
    torch.testing.assert_close(ours(draw()), theirs(draw()), rtol=0, atol=0)
    for layer in (ours, theirs):
        layer.enable_adapters(enabled=True)
    before = ours(draw())
    for layer in (ours, theirs):
        layer.merge()
    torch.testing.assert_close(ours.base_layer.weight, theirs.base_layer.weight, rtol=0, atol=EXACT)
    torch.testing.assert_close(ours(draw()), before, rtol=EXACT, atol=EXACT)
    for layer in (ours, theirs):
        layer.unmerge()
    torch.testing.assert_close(ours(draw()), before, rtol=EXACT, atol=EXACT)
    for layer in (ours, theirs):
        layer.delete_adapter("default")
    torch.testing.assert_close(ours(draw()), theirs(draw()), rtol=EXACT, atol=EXACT)


def test_a_bfloat16_layer_of_dora_is_nearer_to_float64_than_that_of_peft():
    options: dict[str, Any] = {"bias": True, "dropout": 0.0, "size": 0.1, "dora": True}
    ours, theirs = pair(dtype=torch.bfloat16, **options)
    exact = adapted("linear", torch.float64, **options)
    exact.load_state_dict(theirs.state_dict())
    x = draw(torch.bfloat16)
    found = (outcome(ours, x), outcome(theirs, x), outcome(exact, x.double()))
    for mine, other, right in zip(*found, strict=True):
        error, usual = ((each - right).norm() / right.norm() for each in (mine, other))
        assert error < 2 * BFLOAT16_ERROR
        assert error < 1.2 * usual  # the same roundings of in- and output, fewer between


def arrived(layer: Any, x: Tensor) -> float:
    """Which share of what an adapter would change in exact arithmetic is changed by it."""
    changed = layer(x).double()
    layer.enable_adapters(enabled=False)
    before = layer(x).double()
    layer.enable_adapters(enabled=True)
    a, b = (
        layer.lora_A["default"].weight.double(),
        layer.lora_B["default"].weight.double(),
    )
    meant = (x.double() @ a.T @ b.T) * SCALING
    return float(((changed - before) * meant).sum() / meant.square().sum())


@torch.no_grad()
@pytest.mark.parametrize(
    ("size", "of_peft", "bias", "rows"),
    [
        pytest.param(0.0003, 0.3, False, 4000, marks=pytest.mark.slow),
        (0.001, 0.6, False, 400),
        (0.001, 0.6, True, 400),
    ],
)
def test_small_adapter_changes_survive_bfloat16_rounding(size, of_peft, bias, rows):
    """Of PEFT's it is mostly rounded away; ours is rounded to both sides alike."""
    ours, theirs = pair(dtype=torch.bfloat16, size=size, bias=bias)
    x = draw(torch.bfloat16, rows=rows)
    # 576,000 roundings, each at most 2^-9 of a value that is as large as 1: their mean is beyond
    # 5 % of the smallest change with a probability below 1e-3. A change three times as large needs
    # a tenth of them, and each takes a CPU without bfloat16 long.
    assert arrived(ours, x) == pytest.approx(1, abs=0.05)
    assert arrived(theirs, x) < of_peft


# While it traces any autograd function, as those of quantised products, torch makes one itself.
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*should not be instantiated")
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_compiler_takes_a_layer_whole(llama, quantization, kind):
    if quantization != "none":
        pytest.importorskip("bitsandbytes")
    loaded = load(llama, kind, quantization)
    stir(parameter for _, parameter in loaded.trainable)
    layer = next(each for each in loaded.module.modules() if hasattr(each, "product"))
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    inputs = [x, *(p for p in layer.parameters() if p.requires_grad)]
    right = torch.autograd.grad(layer(x).square().sum(), inputs)
    torch._dynamo.reset()
    seen: list[str] = []

    def noting(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=noting))
    found = torch.autograd.grad(compiled(x).square().sum(), inputs)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    # A sum that Inductor sees is taken apart: the product is rounded before it is added to.
    assert any("added" in target for target in seen)
    assert not any("addmm" in target for target in seen)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_whole_model_learns_as_with_peft(llama, monkeypatch, quantization):
    if quantization != "none":
        pytest.importorskip("bitsandbytes")
    product_of, settled = lora._product_of, []

    def noted(base: Any) -> Any:
        settled.append(product_of(base))
        return settled[-1]

    monkeypatch.setattr(lora, "_product_of", noted)
    batch = make_batch([documents(20, 11)])

    def gradients() -> list[Tensor]:
        loaded = load(llama, quantization=quantization)
        stir(parameter for _, parameter in loaded.trainable)
        loss = loaded.loss_sum(batch)
        return [loss.detach(), *torch.autograd.grad(loss, [p for _, p in loaded.trainable])]

    ours = gradients()
    assert len(settled) == 14
    assert all(settled), "not one of them is PEFT's"
    monkeypatch.setattr("expert.model.adapters.replace_lora_layers", lambda wrapped, adapter: None)
    for one, other in zip(ours, gradients(), strict=True):
        # Float32 keeps 24 bits, through two blocks and back: a few hundred roundings.
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

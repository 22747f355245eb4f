"""Base weights in four and eight bits."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from expert.core.install import pip_install
from expert.model.load import LoadedModel
from expert.model.quantised import (
    dequantised,
    int8_linear,
    quantization_config,
)
from tests.model.models import (
    documents,
    load,
    make_batch,
    refusal,
    tiny_model,
)


@pytest.fixture(scope="module", params=["qwen3", "llama", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp(request.param), request.param)


def linear_layers(loaded: LoadedModel) -> dict[str, Any]:
    return {
        name: module
        for name, module in loaded.causal_lm.named_modules()
        if isinstance(module, nn.Linear) and "lora" not in name
    }


def weight_of(layer: Any) -> Tensor:
    bnb: Any = importlib.import_module("bitsandbytes")

    if isinstance(layer, bnb.nn.Linear4bit):
        weight: Tensor = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        return weight
    return dequantised(layer.state.CB, layer.state.SCB, torch.float32)


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_every_linear_layer_but_the_head_is_quantised(folder: Path, quantization: str):
    bnb: Any = importlib.import_module("bitsandbytes")

    loaded = load(folder, quantization=quantization)
    kind = bnb.nn.Linear4bit if quantization == "int4" else bnb.nn.Linear8bitLt
    layers = linear_layers(loaded)
    head = loaded.causal_lm.get_output_embeddings()
    inner = [layer for layer in layers.values() if layer is not head]
    assert len(inner) == 2 * (4 if "gpt2" in str(folder) else 7)
    assert all(isinstance(layer, kind) for layer in inner)
    assert type(head) is nn.Linear
    assert head.weight.dtype == torch.float32
    if quantization == "int4":
        assert all(layer.weight.quant_state.nested for layer in inner)
        assert all(layer.weight.quant_type == "nf4" for layer in inner)


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_quantised_weights_are_near_the_originals(folder: Path, quantization: str):
    from safetensors.torch import load_file

    originals = load_file(folder / "model.safetensors")
    checked = 0
    for name, layer in linear_layers(load(folder, quantization=quantization)).items():
        if name == "lm_head":
            continue
        key = name.replace(".base_layer", "") + ".weight"
        original = originals.get(key, originals.get(f"transformer.{key}"))
        assert original is not None, key
        if "gpt2" in str(folder):
            original = original.T
        error = weight_of(layer) - original
        if quantization == "int8":
            # Half a step of 1/127 of the row's largest, and float16's rounding of the weight.
            limit = original.abs().amax(1, keepdim=True) * (0.5 / 127 + 2**-10)
            assert (error.abs() <= limit).all()
        else:
            # NF4 of normal values in blocks of 64: 9.2 % of their spread, and a little room.
            assert error.std() < 0.1 * original.std()
        checked += 1
    assert checked


def test_the_int8_layer_multiplies_by_the_weight_it_stands_for(qwen: Path):
    layer = next(iter(linear_layers(load(qwen, quantization="int8")).values()))
    weight = weight_of(layer)
    x = torch.randn(3, 5, layer.in_features, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    out, expected = layer(x), other @ weight.T
    torch.testing.assert_close(out, expected)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(x.grad, other.grad)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_evaluation_sees_the_model_that_trains_and_leaves_it_trainable(
    qwen: Path, quantization: str, precision: str
):
    batch = make_batch([documents(12)])
    options: dict[str, Any] = {"quantization": quantization, "precision": precision}
    loaded, other = load(qwen, **options), load(qwen, **options)
    assert torch.equal(loaded.evaluate(batch)[0], loaded.loss_sum(batch).detach())
    for _ in range(2):
        for model in (loaded, other):
            model.loss_sum(batch).backward()
            with torch.no_grad():
                for _, parameter in model.trainable:
                    parameter.sub_(parameter.grad, alpha=0.01)  # type: ignore[arg-type]
                    parameter.grad = None
        loaded.evaluate(batch)
    pairs = zip(loaded.trainable, other.trainable, strict=True)
    assert all(torch.equal(one, two) for (_, one), (_, two) in pairs)


def test_rows_that_would_be_read_back_wrongly_are_refused(tmp_path: Path):
    folder = tiny_model(tmp_path, intermediate_size=96)
    text = refusal(lambda: load(folder, quantization="int4"))
    assert "model.layers.0.mlp.down_proj has rows of 96  (use int8, or quantization: none)" in text


def test_without_bitsandbytes_the_way_to_it_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = refusal(lambda: quantization_config("int4", torch.bfloat16))
    assert f"bitsandbytes  ({pip_install('quant')}, or quantization: none)" in text


def test_a_compiled_int8_layer_keeps_no_unpacked_weight_for_the_backward():
    """The partitioner of the compiler, without its code generation, says what is kept."""
    rows = torch.randint(-127, 128, (96, 64), dtype=torch.int8)
    scales = torch.rand(96) + 0.5
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    def layer(x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = int8_linear(x.sin(), rows, scales)
        return product.cos()

    compiled = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)
    x = torch.randn(8, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = compiled(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    assert torch.equal(gradient, expected)
    assert kept
    assert [tensor.shape for tensor in kept if tensor.shape == rows.shape] == [rows.shape]
    assert [tensor.dtype for tensor in kept if tensor.shape == rows.shape] == [torch.int8]

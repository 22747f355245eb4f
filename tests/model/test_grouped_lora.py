"""LoRA of layers that read the same input, computed together, against PEFT's own, one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from expert.model.blocks import compile_blocks, recompute
from expert.model.load import LoadedModel, load_model
from expert.model.lora.lora import group_lora
from expert.model.saving import save_trained
from tests.each import each
from tests.model.models import (
    adapter_plan,
    documents,
    kernel_plan,
    make_batch,
    model_plan,
    tiny_model,
)

# Sums of some hundred products in float64, which keeps 53 bits, in another order.
EXACT = 1e-11
GROUPS_A_BLOCK = 4  # q k v, o, gate and up, down
LAYERS = 2


def a_model(
    folder: Path, *, dtype: torch.dtype = torch.float64, grouped: bool = True, **adapter: Any
) -> LoadedModel:
    """The same adapter with the same values, grouped or not."""
    loaded = load_model(
        model_plan(folder),
        adapter_plan(**{"kind": "lora", **adapter}),
        kernel_plan(),
        vocabulary=None,
        device=torch.device("cpu"),
        seed=0,
    )
    loaded.module.to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in loaded.trainable:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise.to(dtype), alpha=0.1)
    if grouped:
        assert group_lora(loaded.module, "default") > 0
    return loaded


def outcome(loaded: LoadedModel) -> list[Tensor]:
    """The loss of a batch, and the gradients of everything trained."""
    loss = loaded.loss_sum(make_batch([documents(20, 11), documents(25)]))
    trained = [parameter for _, parameter in loaded.trainable]
    return [loss.detach(), *torch.autograd.grad(loss, trained)]


def by_peft(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr("expert.model.adapters.settle_lora", lambda wrapped, adapter: None)
        return outcome(a_model(folder, grouped=False, **options))


def assert_equal(one: list[Tensor], other: list[Tensor], tolerance: float) -> None:
    for ours, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@each("family", ["llama", "qwen3", "mistral"])
def test_losses_and_gradients_are_those_of_peft(tmp_path, monkeypatch, family):
    folder = tiny_model(tmp_path / "model", family)
    assert_equal(outcome(a_model(folder)), by_peft(folder, monkeypatch), EXACT)


def test_dora_is_that_of_layers_one_by_one(tmp_path):
    # Those are held to PEFT's in test_dora.py and test_lora.py.
    folder = tiny_model(tmp_path / "model", "qwen3")
    apart = outcome(a_model(folder, kind="dora", grouped=False))
    assert_equal(outcome(a_model(folder, kind="dora")), apart, EXACT)


def test_layers_with_a_bias_are_grouped_too(tmp_path, monkeypatch):
    folder = tiny_model(tmp_path / "model", "llama", attention_bias=True, mlp_bias=True)
    assert_equal(outcome(a_model(folder)), by_peft(folder, monkeypatch), EXACT)


def test_every_linear_layer_of_a_block_is_in_a_group(tmp_path):
    loaded = a_model(tiny_model(tmp_path / "model", "llama"), grouped=False)
    assert group_lora(loaded.module, "default") == GROUPS_A_BLOCK * LAYERS
    grouped = [layer for layer in loaded.module.modules() if getattr(layer, "group", None)]
    assert len(grouped) == 7 * LAYERS


@each("asked", [["q_proj", "v_proj"], ["k_proj"], ["up_proj", "o_proj"]], ids=str)
def test_only_some_layers_may_have_an_adapter(tmp_path, monkeypatch, asked):
    folder = tiny_model(tmp_path / "model", "llama")
    ours = outcome(a_model(folder, target_modules=asked))
    assert_equal(ours, by_peft(folder, monkeypatch, target_modules=asked), EXACT)


def test_layers_that_drop_inputs_stay_apart(tmp_path):
    loaded = a_model(tiny_model(tmp_path / "model", "llama"), grouped=False, dropout=0.1)
    assert group_lora(loaded.module, "default") == 0


def test_weights_of_gpt2_which_lie_the_other_way_stay_as_they_are(tmp_path):
    loaded = a_model(tiny_model(tmp_path / "model", "gpt2"), grouped=False)
    assert group_lora(loaded.module, "default") == 0


def test_a_layer_that_reads_something_else_computes_by_itself(tmp_path):
    attention = next(
        module
        for module in a_model(tiny_model(tmp_path / "model", "llama")).module.modules()
        if hasattr(module, "k_proj")
    )
    x, y = (torch.randn(3, 64, dtype=torch.float64) for _ in range(2))
    alone = attention.k_proj(y)
    attention.q_proj(x)
    torch.testing.assert_close(attention.k_proj(y), alone, rtol=EXACT, atol=EXACT)
    together = attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
    assert attention.q_proj.group.held is None, "nothing of a batch is kept"
    torch.testing.assert_close(attention.k_proj(x), together[1], rtol=EXACT, atol=EXACT)


def test_what_is_recomputed_is_the_same(tmp_path):
    folder = tiny_model(tmp_path / "model", "llama")
    loaded = a_model(folder)
    right = outcome(loaded)
    recompute(loaded.blocks, LAYERS)
    assert_equal(outcome(loaded), right, EXACT)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_compiler_takes_all_blocks_as_one_graph(tmp_path, kind):
    loaded = a_model(tiny_model(tmp_path / "model", "qwen3"), kind=kind)
    right = outcome(loaded)
    torch._dynamo.reset()
    seen: list[str] = []

    def noting(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    torch._dynamo.utils.counters.clear()
    backend: Any = aot_autograd(fw_compiler=noting)
    compile_blocks(loaded.blocks, backend=backend, fullgraph=True)
    assert_equal(outcome(loaded), right, EXACT)
    # The first block's input asks for no gradient; all others share a graph.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert any("group_product" in target for target in seen)
    assert not any("addmm" in target for target in seen)


@torch.no_grad()
@each("name", ["q_proj", "down_proj"])
def test_a_small_change_arrives_in_bfloat16(tmp_path, name):
    """The adapter is rounded together with the product: changes of 0.1 % are not lost."""
    loaded = a_model(tiny_model(tmp_path / "model", "llama"), dtype=torch.bfloat16)
    layer: Any = next(m for n, m in loaded.module.named_modules() if n.endswith(name))
    layer.lora_B["default"].weight.mul_(0.002)
    a, b = (part["default"].weight.double() for part in (layer.lora_A, layer.lora_B))
    inputs = layer.get_base_layer().in_features
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4000, inputs, generator=generator).bfloat16()
    meant = (x.double() @ a.T @ b.T) * layer.scaling["default"]
    base = x.double() @ layer.get_base_layer().weight.double().T
    assert meant.norm() < 0.002 * base.norm()
    changed = layer(x).double() - base
    share = float((changed * meant).sum() / meant.square().sum())
    # 256,000 roundings of at most 2^-9 of a value: their mean is within a few percent of a change
    # of 0.1 %. PEFT's sum lets half of it arrive.
    assert share == pytest.approx(1, abs=0.1)


def test_what_is_saved_is_what_an_ungrouped_model_saves(tmp_path):
    folder = tiny_model(tmp_path / "model", "llama")
    for name, grouped in (("one", True), ("other", False)):
        save_trained(a_model(folder, dtype=torch.float32, grouped=grouped), tmp_path / name)
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("one", "other")]
    assert files[0].read_bytes() == files[1].read_bytes()

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from expert.model.attention import IMPLEMENTATIONS, attention_kwargs
from expert.model.blocks import checkpoint_blocks, compile_blocks, compiled_graphs, find_blocks
from tests.each import each
from tests.model.test_attention import a_batch, a_model

# torch's own tracing looks at .grad of every input, and is warned by torch.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

# Layouts of documents in two rows of sixteen places.
LAYOUTS = [[[7, 5, 4], [3, 13]], [[16], [1, 15]], [[2, 2, 12], [8, 8]]]


def with_lora(model: Any, dropout: float = 0.0) -> nn.Module:
    config = peft.LoraConfig(r=2, lora_dropout=dropout, target_modules=["q_proj", "down_proj"])
    adapted: nn.Module = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zero at first: nothing would depend on the other factor
            nn.init.normal_(parameter)
    return adapted


def forward(model: Any, layout: int = 0, seed: int = 0) -> Tensor:
    """Logits of a batch of changing content and constant shape."""
    torch.manual_seed(seed)
    batch = a_batch(LAYOUTS[layout], seed=seed)
    inputs = {"input_ids": batch.tokens, "position_ids": batch.positions, "use_cache": False}
    logits: Tensor = model(**inputs, **attention_kwargs("sdpa", batch)).logits
    return logits


def gradients(model: nn.Module, seed: int = 0) -> list[Tensor]:
    model.zero_grad()
    forward(model, seed=seed).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def a_trained_model(*, lora: bool = False, lokr: bool = False, dropout: float = 0.0) -> nn.Module:
    model: Any = a_model("Qwen3", attention_dropout=0.0 if lokr else dropout)
    model.set_attn_implementation(IMPLEMENTATIONS["sdpa"])
    if lokr:  # with a dropout of its own
        options: dict[str, Any] = {"target_modules": ["down_proj"], "init_weights": False}
        config = peft.LoKrConfig(r=2, alpha=4, rank_dropout=dropout, **options)
        return peft.get_peft_model(model, config).train()
    return (with_lora(model, dropout) if lora else model).train()


def counted(model: nn.Module) -> list[int]:
    """Counts how often the MLP of every block runs from now on."""
    runs = [0 for _ in find_blocks(model)]
    for index, block in enumerate(find_blocks(model)):

        def note(*args: Any, index: int = index) -> None:
            runs[index] += 1

        block.mlp.register_forward_pre_hook(note)  # type: ignore[union-attr]
    return runs


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "Gemma2"])
def test_the_blocks_of_known_families_are_found(family):
    model: Any = a_model(family)
    assert find_blocks(model) == list(model.model.layers)
    assert find_blocks(with_lora(model)) == list(model.model.layers)


def test_experts_inside_blocks_are_not_taken_for_blocks():
    def block() -> nn.Module:
        return nn.Sequential(nn.ModuleList(nn.Linear(2, 2) for _ in range(8)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixed = nn.ModuleList([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)])
            self.short = nn.ModuleList([nn.Linear(2, 2)])
            self.blocks = nn.ModuleList([block(), block()])

    model = Model()
    assert find_blocks(model) == list(model.blocks)
    assert find_blocks(nn.Linear(2, 2)) == []


@each("adapter", [{}, {"lora": True}, {"lokr": True}])
@each("dropout", [0.0, 0.5])
@each("count", [1, 2])
def test_recomputed_gradients_are_the_plain_ones_bit_by_bit(adapter, dropout, count):
    model = a_trained_model(**adapter, dropout=dropout)
    plain = gradients(model)
    runs = counted(model)
    checkpoint_blocks(find_blocks(model), count)
    again = gradients(model)
    assert runs == [2 if index < count else 1 for index in range(2)]
    assert len(plain) == len(again) > 0
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
    if dropout:
        other_noise = gradients(model, seed=1)
        assert not all(torch.equal(a, b) for a, b in zip(again, other_noise, strict=True))


@pytest.mark.parametrize(("backend", "lora"), [("eager", True), ("aot_eager", False)])
def test_compiled_blocks_give_equal_outputs_and_compile_once(backend, lora):
    torch._dynamo.reset()
    model = a_trained_model(lora=lora)
    plain = [gradients(model, seed) for seed in range(3)]
    logits = [forward(model, layout) for layout in range(3)]
    checkpoint_blocks(find_blocks(model), 1)
    before = compiled_graphs()
    compile_blocks(find_blocks(model), backend=backend, fullgraph=True)
    compiled = [gradients(model, 0)]
    # One graph for all blocks; with an adapter the first has an input that needs no gradient.
    assert compiled_graphs() - before == (2 if lora else 1)
    before = compiled_graphs()
    compiled += [gradients(model, seed) for seed in (1, 2)]
    again = [forward(model, layout) for layout in range(3)]
    assert compiled_graphs() - before == 0
    # The same operations in float64; only their fusion could round differently.
    for one, other in zip(logits, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    for seed in range(3):
        for one, other in zip(plain[seed], compiled[seed], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_compiled_recomputation_draws_the_same_dropout():
    torch._dynamo.reset()
    model = a_trained_model(lora=True, dropout=0.3)
    compile_blocks(find_blocks(model), backend="eager")
    kept = gradients(model)
    checkpoint_blocks(find_blocks(model), 2)
    recomputed = gradients(model)
    assert all(torch.equal(one, other) for one, other in zip(kept, recomputed, strict=True))

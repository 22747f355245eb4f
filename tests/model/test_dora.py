"""DoRA with expanded row norms, compared with PEFT's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from expert.model import adapters
from expert.model.load import LoadedModel
from expert.model.lora.dora import fast_dora_class, replace_dora_layers, row_norms
from expert.model.saving import load_trainable
from tests.each import each
from tests.model.models import (
    documents,
    load,
    make_batch,
    stir,
    tiny_model,
    trainable_tensors,
)
from tests.model.test_lora import INPUTS, OUTPUTS
from tests.model.test_lora import adapted as adapted_layer

# Sums of some fifty products in float64, which keeps 53 bits, leave 1e-14; room for four of them
# after one another and for optimizer steps, and far below what a wrong term would make.
EXACT = 1e-10
# Float32 keeps 24 bits; sums over 64 and 128 places in other orders, through two blocks and back:
# a few hundred roundings.
FLOAT_ERROR = 1000 * 2**-24
# A rounding to bfloat16 is at most this, of a value.
BFLOAT16_ERROR = 2**-8


def adapted(
    base: str = "linear", *, bias: bool = True, dropout: float = 0.0, dtype: torch.dtype
) -> Any:
    """PEFT's layer with its own DoRA, and values that change the layer."""
    return adapted_layer(base, dtype, bias=bias, dropout=dropout, size=0.1, dora=True)


def pair(**options: Any) -> tuple[Any, Any]:
    """(ours, PEFT's own) with the same values."""
    ours, theirs = adapted(**options), adapted(**options)
    replace_dora_layers(ours, "default")
    for layer in (ours, theirs):  # PEFT's first magnitudes differ in the last place
        layer.load_state_dict(theirs.state_dict())
        stir([p for p in layer.parameters() if p.requires_grad])
    return ours, theirs


def run(layer: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The layer's output and all its gradients, for a fixed input, weighing and dropout."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 7, INPUTS, generator=generator).to(dtype).requires_grad_()
    weighing = torch.randn(2, 7, OUTPUTS, generator=generator).to(dtype)
    layer.zero_grad()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        out = layer(x)
    out.backward(weighing)
    found = {"out": out.detach(), "x": x.grad}
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad:
            found[name] = parameter.grad.clone()
    return found


@each("dropout", [0.0, 0.3])
@each(("base", "bias"), [("linear", True), ("linear", False), ("conv1d", True)])
def test_output_and_gradients_equal_those_of_peft_in_float64(base: str, bias: bool, dropout: float):
    ours, theirs = pair(base=base, bias=bias, dropout=dropout, dtype=torch.float64)
    found, expected = run(ours, torch.float64), run(theirs, torch.float64)
    assert len(expected) == 2 + 3  # A, B and the magnitude beside output and input
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=EXACT, atol=EXACT)


@given(
    rank=st.integers(1, 20),
    width=st.integers(1, 70),
    outputs=st.integers(1, 30),
    scaling=st.floats(0.01, 32.0),
    size=st.sampled_from([0.0, 1e-4, 0.05, 1.0]),
    seed=st.integers(0, 1000),
)
def test_row_norms_are_those_of_the_whole_matrix(
    rank: int, width: int, outputs: int, scaling: float, size: float, seed: int
):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((outputs, width), (rank, width), (outputs, rank))
    weight, a, b = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    b = b * size
    whole = torch.linalg.vector_norm(weight + scaling * b @ a, dim=1)
    squares = weight.square().sum(1)
    norms = row_norms(squares, weight, a, b, scaling)
    # What the terms were rounded to counts, where they nearly cancel: an error in the square.
    terms = squares + (scaling * b @ a).square().sum(1)
    assert ((norms.square() - whole.square()).abs() <= 1e-13 * terms).all()


def test_rows_that_the_adapter_cancels_have_small_norms_and_no_nan():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 64, generator=generator), torch.randn(200, 3, generator=generator)
    weight = -2.0 * b @ a
    squares = weight.square().sum(1)
    norms = row_norms(squares, weight, a, b, 2.0)
    assert (norms > 0).all()
    # The root of a square's rounding: 64 products of 24 bits each, three times over.
    assert (norms <= (200 * 2**-24) ** 0.5 * squares.sqrt()).all()


def test_a_bfloat16_layer_is_nearer_to_float64_than_peft():
    ours, theirs = pair(dtype=torch.bfloat16)
    exact = adapted(dtype=torch.float64)
    exact.load_state_dict(theirs.state_dict())
    expected = run(exact, torch.float64)
    mine, other = run(ours, torch.bfloat16), run(theirs, torch.bfloat16)
    for name in expected:
        largest = expected[name].norm()
        error, usual = ((r[name] - expected[name]).norm() / largest for r in (mine, other))
        assert error < 2 * BFLOAT16_ERROR, name
        assert error < 1.2 * usual, name  # the same roundings of in- and output, fewer between


def test_a_merged_layer_is_the_one_peft_merges_and_does_what_the_layer_did():
    ours, theirs = pair(dtype=torch.float64)
    before = run(ours, torch.float64)["out"]
    ours.merge()
    theirs.merge()
    assert torch.equal(ours.base_layer.weight, theirs.base_layer.weight)
    inputs = torch.randn(2, 7, INPUTS, generator=torch.Generator().manual_seed(2)).double()
    torch.testing.assert_close(ours(inputs), before, rtol=EXACT, atol=EXACT)
    ours.unmerge()
    torch.testing.assert_close(ours(inputs), before, rtol=EXACT, atol=EXACT)


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose attention has biases, and they are not zero."""
    from safetensors.torch import load_file, save_file

    folder = tiny_model(tmp_path_factory.mktemp("biased"), attention_bias=True, num_hidden_layers=1)
    file = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(value.shape, generator=generator) if name.endswith("bias") else value
        for name, value in load_file(file).items()
    }
    assert any(name.endswith("bias") for name in tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def loaded_pair(
    monkeypatch: pytest.MonkeyPatch, folder: Path, quantization: str, **options: Any
) -> tuple[LoadedModel, LoadedModel]:
    """(ours, one with PEFT's own layers) with the same values."""
    ours = load(folder, "dora", quantization, **options)
    with monkeypatch.context() as patch:
        patch.setattr(adapters, "replace_dora_layers", lambda wrapped, adapter: None)
        theirs = load(folder, "dora", quantization, **options)
    stir([parameter for _, parameter in ours.trainable])
    load_trainable(theirs, trainable_tensors(ours))
    return ours, theirs


def faster_layers(loaded: LoadedModel) -> list[nn.Module]:
    return [module for module in loaded.module.modules() if type(module) is fast_dora_class()]


def gradients(loaded: LoadedModel) -> dict[str, Tensor]:
    batch = make_batch([documents(9, 6), documents(12, seed=1)], length=16)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        loss = loaded.loss_sum(batch)
    loss.backward()
    found = {"loss": loss.detach()}
    for name, parameter in loaded.trainable:
        assert parameter.grad is not None
        found[name], parameter.grad = parameter.grad, None
    return found


@pytest.mark.parametrize("quantization", ["none", "int4", "int8"])
def test_a_quantised_model_with_biases_learns_as_with_peft(
    biased: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
):
    ours, theirs = loaded_pair(monkeypatch, biased, quantization)
    assert len(faster_layers(ours)) == 7
    assert not faster_layers(theirs)
    assert list(ours.module.state_dict()) == list(theirs.module.state_dict())
    assert [name for name, _ in ours.trainable] == [name for name, _ in theirs.trainable]
    for _ in range(3):
        found, expected = gradients(ours), gradients(theirs)
        largest = max(g.abs().max().item() for n, g in expected.items() if n != "loss")
        for name in expected:
            limit = FLOAT_ERROR * largest
            torch.testing.assert_close(found[name], expected[name], rtol=FLOAT_ERROR, atol=limit)
        for model, own in ((ours, found), (theirs, expected)):
            with torch.no_grad():
                for name, parameter in model.trainable:
                    parameter.sub_(own[name], alpha=0.02 / largest)

"""DoRA with expanded row norms, compared with PEFT's; its layers alone are in test_lora.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from expert.model import adapters
from expert.model.load import LoadedModel
from expert.model.lora.dora import fast_dora_class, row_norms
from expert.model.saving import load_trainable
from tests.model.models import (
    documents,
    load,
    make_batch,
    stir,
    tiny_model,
    trainable_tensors,
)

# Float32 keeps 24 bits; sums over 64 and 128 places in other orders, through two blocks and back:
# a few hundred roundings.
FLOAT_ERROR = 1000 * 2**-24


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
    ours = load(biased, "dora", quantization)
    monkeypatch.setattr(adapters, "replace_dora_layers", lambda wrapped, adapter: None)
    theirs = load(biased, "dora", quantization)
    stir([parameter for _, parameter in ours.trainable])
    load_trainable(theirs, trainable_tensors(ours))
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

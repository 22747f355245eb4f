"""The built-in character model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from expert.manifest.schema.manifest import CharGptShape
from expert.model.chargpt import CharGpt, load_char_gpt
from expert.model.saving import save_trained
from tests.each import each
from tests.model.models import documents, load, load_characters, make_batch

SIZE = CharGptShape(layers=2, heads=2, width=8, block_size=12)
# Float32 keeps 24 bits; sums of a few hundred terms in another order differ by tens of roundings.
FLOAT_ERROR = 100 * 2**-24


def norm(x: Tensor, weight: Tensor) -> Tensor:
    spread = ((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) / (spread + 1e-5).sqrt() * weight


def obvious_logits(model: CharGpt, tokens: list[int]) -> Tensor:
    """One document, one head and one place at a time."""
    weights = dict(model.named_parameters())
    x = weights["embedding.weight"][tokens] + weights["positions.weight"][: len(tokens)]
    size = model.size.width // model.size.heads
    for index in range(model.size.layers):
        own = {k.split(".", 2)[2]: v for k, v in weights.items() if k.startswith(f"blocks.{index}")}
        query, key, value = (norm(x, own["attention_norm.weight"]) @ own["qkv.weight"].T).chunk(
            3, -1
        )
        mixed = torch.zeros_like(x)
        for head in range(model.size.heads):
            part = slice(head * size, (head + 1) * size)
            for place in range(len(tokens)):
                scores = key[: place + 1, part] @ query[place, part] / math.sqrt(size)
                mixed[place, part] = scores.softmax(0) @ value[: place + 1, part]
        x = x + mixed @ own["attention_out.weight"].T
        inner = F.gelu(norm(x, own["mlp_norm.weight"]) @ own["mlp_in.weight"].T)
        x = x + inner @ own["mlp_out.weight"].T
    return norm(x, weights["norm.weight"]) @ weights["embedding.weight"].T


def rough(model: CharGpt) -> CharGpt:
    """The model with weights large enough for attention to matter."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
    return model


def test_logits_equal_a_slow_reference():
    model = rough(CharGpt(SIZE, 11))
    tokens = documents(9, vocabulary=11)[0]
    with torch.no_grad():
        torch.testing.assert_close(
            model(torch.tensor([tokens]))[0],
            obvious_logits(model, tokens),
            rtol=FLOAT_ERROR,
            atol=FLOAT_ERROR * 10,
        )


@each("autocast, expected", [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)])
def test_blocks_add_up_in_bfloat16_under_its_autocast_alone(
    autocast: torch.dtype, expected: torch.dtype
):
    model, seen = CharGpt(SIZE, 11), []
    for block in model.blocks:
        block.register_forward_hook(lambda module, taken, made: seen.append(made.dtype))
    with torch.autocast("cpu", autocast):
        model(torch.tensor([documents(9, vocabulary=11)[0]]))
    model(torch.tensor([documents(9, vocabulary=11)[0]]))
    assert seen == [expected] * SIZE.layers + [torch.float32] * SIZE.layers


def test_the_first_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    one = CharGpt(SIZE, 11, seed=3)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after)
    torch.manual_seed(2)
    other = CharGpt(SIZE, 11, seed=3)
    same = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    assert not torch.equal(one.head(), CharGpt(SIZE, 11, seed=4).head())


def test_packed_loss_equals_the_loss_of_documents_alone():
    loaded = load_characters(30, layers=2, heads=2, width=16, block_size=16)
    found = documents(6, 9, 12, vocabulary=30)
    packed = loaded.loss_sum(make_batch([found[:2], found[2:]], length=16))
    alone = sum(loaded.loss_sum(make_batch([[document]])) for document in found)
    torch.testing.assert_close(packed, alone, rtol=FLOAT_ERROR, atol=0)


def test_dropout_acts_in_training_alone():
    model = CharGpt(SIZE.model_copy(update={"dropout": 0.5}), 11)
    tokens = torch.tensor(documents(6, vocabulary=11))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_generation_repeats_with_its_generator_and_sees_the_last_block():
    model = rough(CharGpt(SIZE, 11))
    start = torch.tensor(documents(10, vocabulary=11), dtype=torch.int32)
    runs = [
        model.generate(start, 6, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    ]
    assert runs[0].shape == (1, 16)
    assert runs[0].dtype == torch.int32
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert model.training
    greedy = model.generate(start, 1, temperature=0)
    assert greedy[0, -1] == model(start)[0, -1].argmax()


def test_a_saved_model_comes_back(tmp_path: Path):
    size = {"layers": 1, "heads": 2, "width": 8, "block_size": 8, "dropout": 0.25}
    loaded = load_characters("cab", seed=5, **size)
    save_trained(loaded, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {"model_type": "char-gpt", **size, "vocabulary": 3}
    vocabulary = json.loads((tmp_path / "vocabulary.json").read_text())
    assert vocabulary == {"type": "characters", "characters": "cab"}
    model, characters = load_char_gpt(tmp_path)
    assert characters == "cab"
    assert model.size == CharGptShape(**size)
    for name, parameter in loaded.trainable:
        assert torch.equal(model.get_parameter(name), parameter)
    again = load(tmp_path, "full")  # as a base
    assert again.characters == "cab"
    batch = make_batch([[[0, 1, 2, 1]]])
    assert torch.equal(loaded.evaluate(batch)[0], again.evaluate(batch)[0])

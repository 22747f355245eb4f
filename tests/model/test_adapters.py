"""Adapters made from the plan, against plain PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from expert.model.adapters import ADAPTER, adalora_schedule, low_rank_layers
from expert.model.load import LoadedModel
from expert.model.saving import load_trainable, save_trained
from tests.each import each
from tests.model.models import (
    Batch,
    documents,
    load,
    make_batch,
    plain_base,
    refusal,
    stir,
    tiny_model,
    trainable_tensors,
)

KINDS = ("lora", "dora", "ia3", "lokr", "adalora")
CASES = [
    (kind, quantization)
    for kind in KINDS
    for quantization in ("none", "int4", "int8")
    if kind != "lokr" or quantization == "none"  # refused: PEFT has no such layer
]
# Float32 keeps 24 bits; the packed and the plain way sum in other orders, through two blocks and
# back: a few hundred roundings.
FLOAT_ERROR = 1000 * 2**-24


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("gpt2"), "gpt2")


def packed_batch(*lengths: int) -> Batch:
    first, second, third = documents(*(lengths or (9, 6, 12)))
    return make_batch([[first, second], [third]], length=len(first) + len(second) + 1)


def train(
    loaded: LoadedModel, batch: Batch, steps: int = 5, rate: float = 0.02, autocast: bool = False
) -> list[float]:
    """The losses of the steps, and the one after them."""

    def mean_loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loaded.loss_sum(batch) / batch.targets

    optimizer = torch.optim.AdamW([p for _, p in loaded.trainable], lr=rate, weight_decay=0.0)
    losses = []
    for step in range(1, steps + 1):
        loss = mean_loss()
        loss.backward()
        optimizer.step()
        loaded.after_step(step)
        optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, mean_loss().item()]


def base_weights(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    return {n: p for n, p in loaded.module.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "adalora"])
def test_transposed_layers_of_gpt2_are_trained(gpt2: Path, kind: str):
    losses = train(load(gpt2, kind, feedforward_modules=[]), packed_batch())
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize(
    ("kind", "quantization", "adapter_dtype", "autocast"),
    [
        *((*case, torch.bfloat16, False) for case in CASES),
        ("lora", "none", torch.float32, True),
        *(
            pytest.param(*case, torch.float32, True, marks=pytest.mark.slow)
            for case in CASES
            if case != ("lora", "none")
        ),
    ],
)
def test_a_bfloat16_base_learns(
    qwen: Path, kind: str, quantization: str, adapter_dtype: torch.dtype, autocast: bool
):
    loaded = load(qwen, kind, quantization, precision="bf16", adapter_dtype=adapter_dtype)
    assert loaded.head().dtype == torch.bfloat16
    own = torch.float32 if kind == "adalora" else adapter_dtype
    assert {parameter.dtype for _, parameter in loaded.trainable} == {own}
    frozen = {n: p.detach().clone() for n, p in base_weights(loaded).items()}
    losses = train(loaded, packed_batch(3, 2, 4), steps=1, rate=0.05, autocast=autocast)
    assert losses[-1] < losses[0] - 0.01
    for name, weight in base_weights(loaded).items():
        assert torch.equal(weight, frozen[name]), name


def plain_peft(loaded: LoadedModel, folder: Path, tmp_path: Path) -> Any:
    """The saved adapter on the base, loaded by transformers and PEFT alone."""
    from peft import PeftModel

    save_trained(loaded, tmp_path)
    return PeftModel.from_pretrained(plain_base(folder), tmp_path, is_trainable=True).train()


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "lokr", "adalora"])
def test_loss_and_gradients_equal_plain_peft_with_labels(qwen: Path, kind: str, tmp_path: Path):
    loaded = load(qwen, kind)
    stir(parameter for _, parameter in loaded.trainable)
    found = documents(9, 6, 12)
    batch = make_batch([found[:2], found[2:]], length=16)
    loss = loaded.loss_sum(batch)
    loss.backward()

    plain = plain_peft(loaded, qwen, tmp_path)
    total, value = torch.zeros(()), 0.0
    for document in found:
        ids = torch.tensor([document])
        result = plain(input_ids=ids, labels=ids)
        weight = len(document) - 1
        total = total + result.loss * weight
        logits = result.logits[0, :-1].detach()
        value += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
    total.backward()
    assert loss.item() == pytest.approx(value, rel=FLOAT_ERROR)
    if kind != "adalora":
        assert loss.item() == pytest.approx(total.item(), rel=FLOAT_ERROR)
    gradients = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in plain.named_parameters()
        if parameter.requires_grad
    }
    assert gradients.keys() == dict(loaded.trainable).keys()
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    for name, parameter in loaded.trainable:
        torch.testing.assert_close(
            parameter.grad, gradients[name], rtol=FLOAT_ERROR, atol=FLOAT_ERROR * largest
        )


@pytest.mark.parametrize("kind", KINDS)
def test_first_values_depend_on_the_seed_alone(qwen: Path, kind: str):
    torch.manual_seed(1)
    first = trainable_tensors(load(qwen, kind, seed=5))
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after), "the global generator was used"
    torch.manual_seed(2)
    second = trainable_tensors(load(qwen, kind, seed=5))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    if kind != "ia3":  # which begins with ones
        other = trainable_tensors(load(qwen, kind, seed=6))
        assert any(not torch.equal(first[name], other[name]) for name in first)


def test_none_trains_soft_prompts_alone(qwen: Path):
    prompts = [{"name": "style", "tokens": 3}]
    loaded = load(qwen, "none", soft_prompts=prompts)
    assert [name for name, _ in loaded.trainable] == ["soft_prompts.style"]
    batch = make_batch([[document] for document in documents(8, 6)], soft_tokens=3)
    losses = train(loaded, batch, rate=0.1)
    assert losses[-1] < losses[0] - 0.01


@each(
    ("folder", "options", "told"),
    [
        (
            "qwen",
            {"target_modules": ["q_proj", "query"]},
            "target_modules: query: the model has no such linear layer to adapt  (choose from",
        ),
        ("llama", {"target_modules": ["lm_head"]}, "lm_head: the head cannot have an adapter"),
        (
            "qwen",
            {"kind": "lokr", "quantization": "int4"},
            "training.config.adapter_type: lokr cannot be trained on int4 base weights",
        ),
        ("gpt2", {"kind": "lokr"}, "lokr does not support transposed weights"),
        ("qwen", {"quantization": "int4", "init": "pissa"}, "base weights, which are in int4"),
        (
            "qwen",
            {"kind": "full", "quantization": "int8"},
            "int8 base weights cannot be trained themselves",
        ),
        (
            "qwen",
            {"kind": "adalora", "total_steps": None},
            "adalora prunes ranks over the whole run and needs its length, which is unknown",
        ),
    ],
)
def test_what_cannot_be_adapted_is_refused(qwen, llama, gpt2, folder, options, told):
    folders = {"qwen": qwen, "llama": llama, "gpt2": gpt2}
    assert told in refusal(lambda: load(folders[folder], **options))


@each("steps", [2, 3, 7, 10, 12, 40, 1000])
@each("rank", [1, 2, 5, 16])
def test_adalora_has_a_schedule_for_every_length(steps: int, rank: int):
    from peft import AdaLoraConfig

    schedule: dict[str, Any] = adalora_schedule(rank, steps)
    AdaLoraConfig(**schedule)  # refuses a schedule without room to prune
    assert schedule["init_r"] > rank == schedule["target_r"]


def test_adalora_resumes_bit_for_bit(qwen: Path):
    batch, steps = packed_batch(), 12
    whole = load(qwen, "adalora", total_steps=steps)
    parts = load(qwen, "adalora", total_steps=steps)
    resumed = load(qwen, "adalora", total_steps=steps, seed=9)
    for first, last in [(1, 5), (6, 10), (11, 12)]:
        for loaded in (whole, parts):
            updates(loaded, batch, range(first, last + 1))
        kept = {name: value.clone() for name, value in trainable_tensors(parts).items()}
        load_trainable(resumed, kept)
        parts, resumed = resumed, parts
    expected, found = trainable_tensors(whole), trainable_tensors(parts)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def updates(loaded: LoadedModel, batch: Batch, steps: range) -> None:
    for step in steps:
        (loaded.loss_sum(batch) / batch.targets).backward()
        with torch.no_grad():
            for _, parameter in loaded.trainable:
                parameter.sub_(parameter.grad, alpha=0.5)  # type: ignore[arg-type]
        loaded.after_step(step)
        for _, parameter in loaded.trainable:
            parameter.grad = None


def test_pissa_starts_as_the_base_does_and_is_saved_for_the_base_as_it_is(qwen, tmp_path):
    plain, loaded = load(qwen, "none"), load(qwen, init="pissa")
    batch = packed_batch()
    before = plain.loss_sum(batch).item()
    assert loaded.loss_sum(batch).item() == pytest.approx(before, rel=FLOAT_ERROR)
    weight = next(value for name, value in plain.module.named_parameters() if "q_proj" in name)
    layer = low_rank_layers(loaded.module)[0]
    added = layer.scaling[ADAPTER] * (layer.lora_B[ADAPTER].weight @ layer.lora_A[ADAPTER].weight)
    values = torch.linalg.svdvals(weight)[: len(layer.lora_A[ADAPTER].weight)]
    found = torch.linalg.svdvals(added)[: len(values)]
    # Values of a random matrix are close to each other: the power iteration finds them to 1e-4.
    torch.testing.assert_close(found, values, rtol=1e-3, atol=0.0)

    losses = train(loaded, batch, rate=0.005)
    assert losses[-1] < losses[0] - 0.01
    trained = plain_peft(loaded, qwen, tmp_path)
    ids = torch.tensor([documents(9)[0]])
    expected = loaded.module(input_ids=ids).logits
    # Two factors of a sum that cancels: a little more than float32's error.
    torch.testing.assert_close(trained(input_ids=ids).logits, expected, rtol=1e-3, atol=1e-4)
    again = load(qwen, init="pissa")
    load_trainable(again, trainable_tensors(loaded))
    assert torch.equal(again.module(input_ids=ids).logits, expected)


@each("family", ["qwen3", "llama"])  # one shares embedding and head
def test_embedding_and_head_are_trained_in_float32_and_saved_for_peft(family, tmp_path):
    folder = tiny_model(tmp_path / "base", family)
    parts = ["embed_tokens", "lm_head"]
    loaded = load(folder, adapter_dtype=torch.float32, modules_to_save=parts, precision="bf16")
    whole = {n: p for n, p in loaded.trainable if "embed_tokens" in n or "lm_head" in n}
    assert len(whole) == (1 if family == "qwen3" else 2)
    assert {parameter.dtype for parameter in whole.values()} == {torch.float32}
    first = {name: parameter.detach().clone() for name, parameter in whole.items()}
    losses = train(loaded, packed_batch(), rate=0.005, autocast=True)
    assert losses[-1] < losses[0] - 0.01
    assert not any(torch.equal(parameter, first[name]) for name, parameter in whole.items())

    saved = load(folder, modules_to_save=parts)
    load_trainable(saved, trainable_tensors(loaded))
    trained, ids = plain_peft(saved, folder, tmp_path / "adapter"), torch.tensor([documents(9)[0]])
    expected = saved.module(input_ids=ids).logits
    torch.testing.assert_close(trained(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)

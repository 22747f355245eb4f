"""Saved results, loaded by PEFT and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from expert.model.errors import ModelError
from expert.model.load import LoadedModel
from expert.model.saving import load_trainable, save_trained
from tests.model.models import (
    documents,
    load,
    make_batch,
    plain_base,
    tiny_model,
    trainable_tensors,
)
from tests.model.test_adapters import train

KINDS = ("lora", "dora", "ia3", "lokr", "adalora")
# Float32 keeps 24 bits; packed rows and single documents sum in other orders: some roundings.
FLOAT_ERROR = 200 * 2**-24
DOCUMENT = documents(11)[0]


def trained(loaded: LoadedModel) -> LoadedModel:
    """The model after a small run; AdaLoRA's is a whole one, which ends with the ranks it keeps."""
    train(loaded, make_batch([documents(9, 6)]), steps=20 if loaded.ranks else 4)
    return loaded


def our_logits(loaded: LoadedModel) -> Tensor:
    loaded.module.eval()
    with torch.no_grad():
        return loaded.hidden(make_batch([[DOCUMENT]])) @ loaded.head().T


def plain_logits(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=torch.tensor([DOCUMENT])).logits[0]
        return logits


def assert_same(ours: Tensor, theirs: Tensor, error: float = FLOAT_ERROR) -> None:
    largest = theirs.abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=error, atol=error * largest)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_peft_loads_a_saved_adapter(qwen: Path, kind: str, tmp_path: Path):
    from peft import PeftModel

    loaded = trained(load(qwen, kind))
    before = plain_logits(plain_base(qwen))
    ours = our_logits(loaded)
    assert not torch.allclose(ours, before, atol=0.01), "the adapter does nothing"
    save_trained(loaded, tmp_path)
    assert_same(ours, plain_logits(PeftModel.from_pretrained(plain_base(qwen), tmp_path)))
    assert_same(ours, our_logits(loaded))  # saving changed nothing


def test_an_adapter_finds_its_base_by_itself(qwen: Path, tmp_path: Path):
    from peft import AutoPeftModelForCausalLM

    loaded = trained(load(qwen))
    save_trained(loaded, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(qwen)
    assert config["target_modules"] == sorted(config["target_modules"])
    assert config["inference_mode"] is True
    assert_same(
        our_logits(loaded), plain_logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path))
    )


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_of_a_quantised_base_loads_on_the_same_base(
    qwen: Path, kind: str, tmp_path: Path
):
    from peft import PeftModel
    from transformers import BitsAndBytesConfig

    loaded = trained(load(qwen, kind, "int4"))
    save_trained(loaded, tmp_path)
    options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config = BitsAndBytesConfig(
        **options, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32
    )
    base = plain_base(qwen, quantization_config=config, device_map={"": "cpu"})
    plain = PeftModel.from_pretrained(base, tmp_path).train()  # see quantised.py on evaluation
    with torch.no_grad():
        theirs = plain(input_ids=torch.tensor([DOCUMENT])).logits[0]
    assert_same(our_logits(loaded), theirs)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_whole_model_loads_with_transformers(family: str, tmp_path: Path):
    folder = tiny_model(tmp_path / "base", family)
    loaded = trained(load(folder, "full"))
    save_trained(loaded, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.bin"))
    again = plain_base(tmp_path / "out")
    assert again.config._attn_implementation == "sdpa"
    assert_same(our_logits(loaded), plain_logits(again))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "expert" not in json.dumps(config)


@pytest.mark.parametrize("kind", [*KINDS, "full", "none"])
def test_trainable_tensors_come_back(qwen: Path, kind: str):
    prompts = [{"name": "style", "tokens": 2}] if kind in ("none", "lora") else []
    first = load(qwen, kind, soft_prompts=prompts)
    with torch.no_grad():
        for _, parameter in first.trainable:
            parameter.add_(0.1)
    other = load(qwen, kind, seed=4, soft_prompts=prompts)
    load_trainable(other, trainable_tensors(first))
    expected, found = trainable_tensors(first), trainable_tensors(other)
    assert list(expected) == list(found)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert all(found[name] is not expected[name] for name in expected)


def test_tensors_of_another_model_are_refused_and_change_nothing(qwen: Path):
    loaded = load(qwen, target_modules=["q_proj"])
    before = {name: value.clone() for name, value in trainable_tensors(loaded).items()}
    other = {name: value + 1 for name, value in before.items()}
    first = next(iter(other))
    other[first] = other[first][:1]
    other["stranger"] = torch.zeros(1)
    with pytest.raises(ModelError) as caught:
        load_trainable(loaded, other)
    told = f"checkpoint: 2 tensors do not fit this model: stranger, {first}  (resume with"
    assert str(caught.value).startswith(told)
    after = trainable_tensors(loaded)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_adapter_of_a_cached_model_names_its_hub_id_and_commit(tmp_path: Path):
    snapshot = tiny_model(tmp_path / "models--somebody--qwen" / "snapshots" / "abc")
    prompts = [{"name": "lead", "tokens": 2}]
    loaded = load(snapshot, name="somebody/qwen", place="hf cache", soft_prompts=prompts)
    save_trained(loaded, tmp_path / "out")
    for folder in (tmp_path / "out", tmp_path / "out" / "soft_prompts" / "lead"):
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "somebody/qwen"
        assert config["revision"] == "abc"

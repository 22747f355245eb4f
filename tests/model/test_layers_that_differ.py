"""Models whose layers differ: documents of packed rows stay apart, and what is planned is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from expert.answer.steps import AnswerModel, GrowingSteps
from expert.core.errors import ExpertError
from expert.model.recurrent import keep_documents_apart
from expert.planning.machine import host
from expert.planning.memory.memory import saved_per_token
from expert.planning.memory.workload import Workload
from expert.planning.models.architectures import ARCHITECTURES
from expert.planning.models.shapes import ModelShape, shape_from_config
from tests.each import each
from tests.model.models import (
    documents,
    family_config,
    load,
    make_batch,
    refusal,
    tiny_model,
    trainable_tensors,
)
from tests.planning.planning import manifest, plan


def shape_of_folder(folder: Path) -> ModelShape:
    return shape_from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))


FAMILIES = [kind for kind, row in ARCHITECTURES.items() if row.recurrent]
FLOAT_ERROR = 2e-6  # sums in another order
OF_DECAYS = 2e-3  # small differences of sums of logs, among them that of what is forgotten


def test_families_with_layers_that_carry_a_state():
    assert FAMILIES == ["qwen3_5_text", "qwen3_5_moe_text", "lfm2"]


@each(
    ("family", "attention"),
    [
        ("gpt_oss", "eager"),
        *product([*FAMILIES, "gemma4_text", "qwen3_moe", "mixtral"], ["sdpa", "eager"]),
    ],
)
def test_packed_documents_are_each_as_if_alone(tmp_path, family, attention):
    """Loss and every gradient; one document is longer than a chunk of 64, one is shorter than the
    convolution."""
    folder = tiny_model(tmp_path / "model", family)
    found = documents(70, 5, 90, 2, 20)

    def learnt(*batches: Any) -> tuple[float, dict[str, torch.Tensor]]:
        loaded = load(folder, "full", attention=attention)
        loss = torch.stack([loaded.loss_sum(batch) for batch in batches]).sum()
        loss.backward()
        found = {name: weight.grad for name, weight in loaded.trainable if weight.grad is not None}
        return loss.item(), found

    loss, gradients = learnt(make_batch([found[:3], found[3:]], length=200))
    alone, of_each = learnt(*(make_batch([[document]]) for document in found))
    assert loss == pytest.approx(alone, rel=FLOAT_ERROR)
    for name, gradient in gradients.items():
        decays = OF_DECAYS if name.endswith(("A_log", "dt_bias", "in_proj_a.weight")) else 2e-5
        assert (gradient - of_each[name]).norm() <= decays * of_each[name].norm(), name


@each("family", FAMILIES)
def test_without_the_numbers_of_documents_they_would_leak(tmp_path, family, monkeypatch):
    folder = tiny_model(tmp_path / "model", family)
    first, second, third = documents(30, 20, 30)
    loaded = load(folder, "none")
    before, _ = loaded.evaluate(make_batch([[first, second]]))
    after, _ = loaded.evaluate(make_batch([[third, second]]))
    alone = [loaded.evaluate(make_batch([[each]]))[0] for each in (first, third)]
    torch.testing.assert_close(before - alone[0], after - alone[1], rtol=1e-5, atol=1e-5)
    monkeypatch.setattr("expert.model.load.documents_of", torch.ones_like)
    leaked, _ = loaded.evaluate(make_batch([[first, second]]))
    assert abs(leaked.item() - before.item()) > 1e-3


@each("family", FAMILIES)
def test_adapters_train_and_learn(tmp_path, family):
    loaded = load(tiny_model(tmp_path / "model", family))
    names = {name.rsplit(".lora_", 1)[0].rsplit(".", 1)[-1] for name in trainable_tensors(loaded)}
    assert names >= {"out_proj", "q_proj", "k_proj", "v_proj"}
    assert names & {"in_proj", "in_proj_qkv"}
    optimizer = torch.optim.AdamW([weight for _, weight in loaded.trainable], lr=1e-2)
    batch = make_batch([documents(30, 20), documents(25)], length=50)
    losses = []
    for _ in range(12):
        loss = loaded.loss_sum(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@each("family", FAMILIES)
def test_rows_that_answer_together_answer_as_alone_and_leave_when_they_are_done(tmp_path, family):
    from types import SimpleNamespace

    loaded = load(tiny_model(tmp_path / "model", family), "none")
    loaded.causal_lm.set_attn_implementation("sdpa")
    loaded.module.eval()
    trained: Any = SimpleNamespace(loaded=loaded, device=torch.device("cpu"))
    model, prompts = AnswerModel(trained), documents(9, 3, 14)
    assert not model.fixed
    with torch.no_grad():
        together = model.begin(prompts, 8)
        assert isinstance(together, GrowingSteps)
        alone = [model.begin([prompt], 8) for prompt in prompts]
        for step in range(6):
            expected = torch.cat([each.scores for each in alone])
            torch.testing.assert_close(together.scores, expected, rtol=1e-4, atol=3e-5)
            if step == 3:
                together.keep(torch.tensor([0, 2]))
                del alone[1]
            tokens = torch.cat([each.scores for each in alone]).argmax(1)
            together.advance(tokens)
            for each, token in zip(alone, tokens, strict=True):
                each.advance(token[None])


@each("family", [*FAMILIES, "gemma4_text", "qwen3_moe", "mixtral", "gpt_oss"])
def test_planned_parameters_are_those_of_the_model(family):
    from transformers import AutoModelForCausalLM

    config = family_config(family, tie_word_embeddings=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_from_config(config.to_dict())
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
    assert shape.recurrent_layers == (family in FAMILIES)


def kept_bytes(model: torch.nn.Module, compute: Callable[[], object]) -> int:
    """What autograd keeps while `compute` runs, without the model's weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept, alive = {}, []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # so that its memory is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute()
    return sum(kept.values())


@each("family", FAMILIES)
def test_planned_bytes_are_what_a_layer_keeps(family):
    """In bfloat16, without the layer's own input."""
    from transformers import AutoModelForCausalLM

    config = family_config(family, hidden_size=256, num_hidden_layers=1, layer_types=None)
    config.layer_types = [ARCHITECTURES[family].recurrent]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(False)
    keep_documents_apart(model)
    layer, length = model.model.layers[0], 256
    mixing = layer.conv if family == "lfm2" else layer.linear_attn
    hidden = torch.randn(1, length, 256, dtype=torch.bfloat16, requires_grad=True)
    numbers = torch.ones(1, length, dtype=torch.int32)
    kept = kept_bytes(model, lambda: mixing(hidden_states=hidden, seq_idx=numbers))
    planned = shape_from_config(config.to_dict()).recurrent_bytes
    assert planned == pytest.approx(kept / length, rel=0.05)


@each("changes", [{"hidden_size_per_layer_input": 0, "attention_k_eq_v": True}, {}])
def test_parameters_are_those_of_the_model_as_published_and_as_transformers_saves_it(changes):
    """transformers writes its layers that differ as {"05": …}; the published files do not have
    them. Keys that are left out have the class's values."""
    from transformers import AutoModelForCausalLM

    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    own: dict[str, Any] = {"num_hidden_layers": 12, "layer_types": kinds, "head_dim": 16}
    own |= {"num_global_key_value_heads": 1, "global_head_dim": 48, **changes}
    config = family_config("gemma4_text", **own)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    saved = config.to_dict()
    assert "05" in saved["per_layer_config"]
    published = {key: value for key, value in saved.items() if key != "per_layer_config"} | own
    for written in (saved, published):
        shape = shape_from_config(written)
        assert shape.parameters == sum(weight.numel() for weight in model.parameters())
        assert shape.widest_head == 48


def test_a_model_that_the_plan_did_not_know_refuses_answers_that_share_a_prompt(tmp_path):
    loaded = load(tiny_model(tmp_path / "model", "lfm2"), "none")
    batch: Any = make_batch([documents(9)])
    object.__setattr__(batch, "branch", torch.zeros_like(batch.tokens))
    assert "would see each other" in refusal(lambda: loaded.hidden(batch))


def test_planned_bytes_are_what_a_model_with_embeddings_of_every_layer_keeps():
    from transformers import AutoModelForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_key_value_heads": 1}
    sizes |= {"head_dim": 128, "global_head_dim": 256, "hidden_size_per_layer_input": 64}
    config = family_config("gemma4_text", **sizes, use_double_wide_mlp=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(False)
    hidden = torch.randn(1, 128, 512, dtype=torch.bfloat16, requires_grad=True)
    own = model.model.get_per_layer_inputs(torch.ones(1, 128, dtype=torch.int64), None)
    given: dict[str, Any] = {"inputs_embeds": hidden, "per_layer_inputs": own, "use_cache": False}
    shape = shape_from_config(config.to_dict())
    work = Workload(shape=shape, rows=1, row_tokens=128, adapter="none", compiled=False)
    planned = saved_per_token(replace(work, attention="sdpa")) * shape.layers + shape.other_bytes
    assert planned == pytest.approx(kept_bytes(model, lambda: model.model(**given)) / 128, rel=0.05)


def test_heads_wider_than_flash_kernels_take_and_embeddings_of_every_layer(tmp_path):
    folder = tiny_model(tmp_path / "models" / "base", "gemma4_text", global_head_dim=512)
    data = manifest({}, base_models=[{"name": str(folder)}])
    assert plan(data, "h200").kernels.attention == "sdpa"
    data["soft_prompts"] = [{"name": "lead", "tokens": 4}]
    with pytest.raises(
        ExpertError, match="soft_prompts: this model has embeddings for every layer"
    ):
        plan(data, "h200")


def test_methods_that_share_a_prompt_are_refused(tmp_path):
    folder = tiny_model(tmp_path / "models" / "base", "lfm2")
    data = manifest({"method": "dpo"}, base_models=[{"name": str(folder)}])
    with pytest.raises(ExpertError, match="dpo reads a prompt once for all its answers"):
        plan(data, "h200")


def test_passes_are_neither_compiled_nor_captured(tmp_path):
    folder = tiny_model(tmp_path / "models" / "base", "qwen3_5_text")
    made = plan(manifest({}, base_models=[{"name": str(folder)}]), "h200")
    kernels = made.kernels
    assert [kernels.compile, kernels.cuda_graphs, kernels.fused_blocks] == [False] * 3
    assert any("plain torch" in remark.text for remark in made.remarks)


@each(
    ("triton", "capability", "words"),
    [("3.6.0", (9, 0), "3.7.1 on Hopper"), ("3.6.0", (8, 9), ""), ("3.7.1", (9, 0), "")],
)
def test_kernels_of_linear_attention_that_are_wrong_on_a_card_are_not_used(
    triton, capability, words, monkeypatch
):
    """The package itself raises an error there, in the first backward."""
    versions = {"fla-core": "0.6.0", "triton": triton}
    monkeypatch.setattr(host, "package_version", lambda name: host.Fact(versions.get(name), ""))
    assert words in host.linear_kernels_lacking(capability)
    assert bool(host.linear_kernels_lacking(capability)) == bool(words)

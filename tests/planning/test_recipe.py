"""Adapters, rates, schedules, evaluation and checkpoints."""

from __future__ import annotations

import json

import pytest

from expert.planning.choose.sequences import NoRoomForText
from tests.each import each
from tests.planning.planning import NO_TENSORS, decision, manifest, plan
from tests.wording import wording

RELEASED = {"type": "lora", "r": 8, "alpha": 8, "dropout": 0.05, "target_modules": ["q_proj"]}


def test_the_config_falls_back_to_the_released_adapter():
    data = manifest(base_models=[{"name": "Qwen3-0.6B", "adapters": [RELEASED]}])
    made = plan(data)
    assert (made.adapter.rank, made.adapter.alpha, made.adapter.dropout) == (8, 8, 0.05)
    assert made.adapter.target_modules == ["q_proj"]
    assert decision(made, "adapter.rank")[1] == wording("of-the-base-model")


def test_without_any_word_the_adapter_is_rank_16_on_every_linear_layer():
    made = plan(manifest())
    assert (made.adapter.rank, made.adapter.alpha, made.adapter.dropout) == (16, 32, 0)
    assert made.adapter.target_modules == "all-linear"
    assert made.adapter.trainable_parameters == 10_092_544


@pytest.mark.parametrize(
    ("kind", "rate"), [("lora", 2e-4), ("dora", 2e-4), ("full", 2e-5), ("ia3", 5e-3)]
)
def test_the_rate_is_the_usual_one_for_what_learns(kind, rate):
    assert plan(manifest({"adapter_type": kind})).optim.learning_rate == rate


def test_ia3_and_full_have_no_rank():
    for kind in ("ia3", "full"):
        made = plan(manifest({"adapter_type": kind}))
        assert made.adapter.rank is None
        assert made.adapter.alpha is None


def test_soft_prompts_alone_train_only_their_tokens():
    prompt = {"name": "style", "tokens": 48, "init_method": "text", "init_text": "Be brief."}
    made = plan(manifest({"adapter_type": "none"}, soft_prompts=[prompt]))
    assert made.adapter.trainable_parameters == 48 * 1024
    assert made.adapter.soft_prompts[0]["tokens"] == 48


@each(
    ("config", "steps", "ratio"),
    [
        ({}, None, 0.03),
        ({"warmup_steps": 10}, 10, None),
        ({"warmup_steps": 0}, 0, None),
        ({"warmup_steps": 0, "warmup_ratio": 0.1}, None, 0.1),
        ({"warmup_steps": 50, "warmup_ratio": 0.1}, None, 0.1),
    ],
)
def test_the_warm_up_ratio_wins_over_steps(config, steps, ratio):
    made = plan(manifest(config))
    assert (made.optim.warmup_steps, made.optim.warmup_ratio) == (steps, ratio)


@pytest.mark.parametrize("off", [0, None])
def test_clipping_can_be_switched_off(off):
    assert plan(manifest({"max_grad_norm": off})).optim.max_grad_norm == 0


def test_save_steps_without_a_strategy_means_steps():
    made = plan(manifest({"save_steps": 250, "eval_steps": 100}))
    assert (made.watch.save_strategy, made.watch.save_steps) == ("steps", 250)
    assert (made.watch.evaluation_strategy, made.watch.eval_steps) == ("steps", 100)


def test_null_keeps_every_checkpoint():
    assert plan(manifest({"save_total_limit": None})).watch.keep_checkpoints is None
    assert plan(manifest()).watch.keep_checkpoints == 3


def test_without_validation_rows_nothing_is_evaluated():
    data = manifest()
    data["training"]["dataset"]["validation_split"] = 0
    made = plan(data)
    assert made.watch.evaluation_strategy == "no"
    assert made.watch.load_best is False
    assert made.data.validation == "none"


def test_a_stream_is_saved_by_steps_and_never_cached():
    data = manifest({"max_steps": 100})
    data["training"]["dataset"]["streaming"] = True
    made = plan(data)
    assert (made.watch.save_strategy, made.watch.save_steps) == ("steps", 500)
    assert made.data.cache is None
    assert made.loader.workers == 4
    assert made.length.total_steps == 100


@each(
    ("name", "template"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", "chatml"),
        ("01-ai/Yi-1.5-6B", "chatml"),
        ("mistralai/Mistral-7B-v0.3", "mistral"),
        ("codellama/CodeLlama-7b-hf", "llama"),
        ("microsoft/phi-2", "phi"),
        ("deepseek-ai/deepseek-coder-1.3b-base", "deepseek"),
        ("google/gemma-2b", "gemma"),
        ("openai-community/gpt2", "alpaca"),
        ("somebody/daphnia", "alpaca"),
    ],
)
def test_the_template_of_a_folder_follows_the_last_part_of_the_model_s_name(
    name, template, tmp_path
):
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    assert plan(manifest(base_models=[{"name": str(folder)}])).model.prompt_template == template


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "Qwen3-0.6B", "openai-community/gpt2"])
def test_a_model_of_the_hub_is_asked_by_its_own_template(name):
    made = plan(manifest(base_models=[{"name": name}]))
    assert decision(made, "model.prompt_template")[:2] == (
        "tokenizer",
        wording("tokenizers-own-template-once"),
    )
    asked = plan(manifest(base_models=[{"name": name, "prompt_template": "phi"}]))
    assert asked.model.prompt_template == "phi"


def test_a_model_of_the_hub_is_asked_the_same_way_once_it_was_fetched(tmp_path):
    cached = tmp_path / "hub" / "models--openai-community--gpt2" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}", encoding="utf-8")
    (cached / "model.safetensors").write_bytes(NO_TENSORS)
    base = [{"name": "openai-community/gpt2"}]
    made = plan(manifest(base_models=base), environ={"HF_HOME": str(tmp_path)})
    assert (made.model.place, made.model.prompt_template) == ("hf cache", "tokenizer")


def test_a_tokenizer_with_a_template_of_its_own_is_used(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    config = {"chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert plan(manifest(base_models=[{"name": str(folder)}])).model.prompt_template == "tokenizer"


def test_soft_prompts_that_fill_a_length_left_open_are_refused():
    prompts = [{"name": f"part-{number}", "tokens": 512} for number in range(4)]
    with pytest.raises(NoRoomForText) as caught:
        plan(manifest(soft_prompts=prompts))
    assert str(caught.value) == wording("tokens-leave-no-room")
    prompts[0]["tokens"] = 511
    plan(manifest(soft_prompts=prompts))

"""Adapters, rates, schedules, evaluation and checkpoints."""

from __future__ import annotations

import json

import pytest

from expert.core.errors import ExpertError
from tests.each import each
from tests.planning.planning import NO_TENSORS, decision, manifest, plan

RELEASED = {"type": "lora", "r": 8, "alpha": 8, "dropout": 0.05, "target_modules": ["q_proj"]}


def test_the_config_falls_back_to_the_released_adapter_and_else_to_rank_16_everywhere():
    data = manifest(base_models=[{"name": "Qwen3-0.6B", "adapters": [RELEASED]}])
    made = plan(data)
    assert (made.adapter.rank, made.adapter.alpha, made.adapter.dropout) == (8, 8, 0.05)
    assert made.adapter.target_modules == ["q_proj"]
    assert decision(made, "adapter.rank")[1] == "set in adapters[0] of the base model"
    made = plan(manifest())
    assert (made.adapter.rank, made.adapter.alpha, made.adapter.dropout) == (16, 32, 0)
    assert made.adapter.target_modules == "all-linear"
    assert made.adapter.trainable_parameters == 10_092_544


def test_soft_prompts_alone_train_only_their_tokens():
    prompt = {"name": "style", "tokens": 48, "init_method": "text", "init_text": "Be brief."}
    made = plan(manifest({"adapter_type": "none"}, soft_prompts=[prompt]))
    assert made.adapter.trainable_parameters == 48 * 1024
    assert made.adapter.soft_prompts[0]["tokens"] == 48
    prompts = [{"name": f"part-{number}", "tokens": 512} for number in range(4)]
    with pytest.raises(ExpertError) as caught:  # they fill the length that was left open
        plan(manifest(soft_prompts=prompts))
    told = "soft_prompts: 2048 tokens leave no room for text in sequences of 2048  (use fewer"
    assert str(caught.value).startswith(told)
    prompts[0]["tokens"] = 511
    plan(manifest(soft_prompts=prompts))


NO_RANK = {"adapter.rank": None, "adapter.alpha": None}


@each(
    ("config", "dataset", "expected"),
    [
        ({"adapter_type": "lora"}, {}, {"optim.learning_rate": 2e-4}),
        ({"adapter_type": "dora"}, {}, {"optim.learning_rate": 2e-4}),
        ({"adapter_type": "full"}, {}, {"optim.learning_rate": 2e-5, **NO_RANK}),
        ({"adapter_type": "ia3"}, {}, {"optim.learning_rate": 5e-3, **NO_RANK}),
        ({}, {}, {"optim.warmup_steps": None, "optim.warmup_ratio": 0.03}),
        ({"warmup_steps": 10}, {}, {"optim.warmup_steps": 10, "optim.warmup_ratio": None}),
        ({"warmup_steps": 0}, {}, {"optim.warmup_steps": 0, "optim.warmup_ratio": None}),
        (
            {"warmup_steps": 50, "warmup_ratio": 0.1},
            {},
            {"optim.warmup_steps": None, "optim.warmup_ratio": 0.1},
        ),
        ({"max_grad_norm": 0}, {}, {"optim.max_grad_norm": 0}),
        ({"max_grad_norm": None}, {}, {"optim.max_grad_norm": 0}),
        # Steps without a strategy mean steps.
        ({"save_steps": 250}, {}, {"watch.save_strategy": "steps", "watch.save_steps": 250}),
        ({"eval_steps": 9}, {}, {"watch.evaluation_strategy": "steps", "watch.eval_steps": 9}),
        ({"save_total_limit": None}, {}, {"watch.keep_checkpoints": None}),
        ({}, {}, {"watch.keep_checkpoints": 3}),
        (
            {},
            {"validation_split": 0},
            {
                "watch.evaluation_strategy": "no",
                "watch.load_best": False,
                "data.validation": "none",
            },
        ),
        (
            {"max_steps": 100},
            {"streaming": True},
            {
                "watch.save_strategy": "steps",
                "watch.save_steps": 500,
                "data.cache": None,
                "loader.workers": 4,
                "length.total_steps": 100,
            },
        ),
    ],
)
def test_what_a_manifest_leaves_open_is_settled(config, dataset, expected):
    data = manifest(config)
    data["training"]["dataset"] |= dataset
    values = {each.path: each.value for each in plan(data).decisions}
    assert {path: values[path] for path in expected} == expected


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
    config = json.dumps({"chat_template": "{{ messages }}"})
    (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")
    assert plan(manifest(base_models=[{"name": str(folder)}])).model.prompt_template == "tokenizer"


def test_a_model_of_the_hub_is_asked_by_its_own_template_before_and_after_the_download(tmp_path):
    for name in ("Qwen/Qwen3-0.6B", "Qwen3-0.6B", "openai-community/gpt2"):
        made = plan(manifest(base_models=[{"name": name}]))
        own = "tokenizer", "the tokenizer's own template; chatml if it has none"
        assert decision(made, "model.prompt_template")[:2] == own
        asked = plan(manifest(base_models=[{"name": name, "prompt_template": "phi"}]))
        assert asked.model.prompt_template == "phi"
    cached = tmp_path / "hub" / "models--openai-community--gpt2" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}", encoding="utf-8")
    (cached / "model.safetensors").write_bytes(NO_TENSORS)
    base = [{"name": "openai-community/gpt2"}]
    made = plan(manifest(base_models=base), environ={"HF_HOME": str(tmp_path)})
    assert (made.model.place, made.model.prompt_template) == ("hf cache", "tokenizer")


@each("kind", [{}, {"adapter_init": "pissa"}])
def test_a_base_that_the_adapter_changes_is_not_quantised_to_fit(kind):
    settings = {"max_seq_length": 2048, **kind}
    made = plan(manifest(settings, base_models=[{"name": "Llama-3.1-8B"}]), "rtx-3060")
    assert made.model.quantization == ("none" if kind else "int4")
    assert made.fits == (not kind)
    assert any("--set adapter_init=default fits" in text for text in made.warnings) == bool(kind)

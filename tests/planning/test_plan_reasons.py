"""Advice, warnings, fixes and reasons in a plan."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expert.planning.machine.machine import Fact
from tests.each import each
from tests.planning.planning import decision, machine, manifest, plan, remarks


def test_advice_fits_together():
    """Following all of the advice together must still fit."""
    base = {"name": "Llama-3.1-8B", "quantization": "int4"}
    config = {"gradient_checkpointing": True, "batch_size": 32, "packing": False}
    made = plan(manifest(config, base_models=[base]))
    advised = " ".join(remarks(made, "advice"))
    assert advised
    if "quantization: none" in advised:
        base = {**base, "quantization": "none"}
    if "gradient_checkpointing: false" in advised:
        config = {**config, "gradient_checkpointing": False}
    assert plan(manifest(config, base_models=[base])).fits


WAYS_OUT = [
    ({"fused_loss": False, "packing": False, "micro_batch_size": 16}, {}, "rtx-3060"),
    ({"gradient_checkpointing": False, "micro_batch_size": 9}, {"name": "Llama-3.1-8B"}, "a100"),
    ({"micro_batch_size": 8, "gradient_checkpointing": False}, {"name": "Llama-3.1-8B"}, "l40s"),
    ({"adapter_type": "full", "distributed": "replicated"}, {"name": "Qwen3-8B"}, "rtx-4090"),
    ({"attention": "eager", "max_seq_length": 8192}, {"name": "Llama-3.2-1B"}, "rtx-3060"),
]


@each(("config", "base", "card"), WAYS_OUT)
def test_suggested_changes_make_the_plan_fit(config, base, card):
    """Making all changes that the warning names gives a plan that fits."""
    model = {"name": "Qwen3-0.6B", "quantization": "none", **base}
    made = plan(manifest(config, base_models=[model]), card)
    assert not made.fits
    [text] = [text for text in remarks(made, "warning") if text.startswith("memory.fits")]
    assert text.endswith(" fits"), text
    config, model = with_options(config, model, text.removesuffix(" fits"))
    assert plan(manifest(config, base_models=[model]), card).fits


def with_options(config, model, text):
    """The settings and the model with every --set that a text names."""
    for key, value in re.findall(r"--set (\w+)=(\w+)", text):
        if key == "quantization":
            model = {**model, "quantization": value}
        else:
            config = {**config, key: int(value) if value.isdecimal() else value}
    return config, model


@each(
    ("config", "change"),
    [
        ({"max_seq_length": 1024}, "--set optim=adamw_bnb_8bit fits"),
        ({"max_seq_length": 1024, "optim": "sgd"}, "--set rank=8 fits"),
        ({"max_seq_length": 1024, "optim": "sgd", "alpha": 32}, "--set rank=8 --set alpha=16 fits"),
    ],
)
def test_what_a_person_would_try_is_tried_and_the_cheapest_change_is_named(config, change):
    config = {"packing": False, **config}
    made = plan(manifest(config, base_models=[{"name": "Llama-3.1-8B"}]), "rtx-4060")
    assert not made.fits
    [text] = [text for text in remarks(made, "warning") if text.startswith("memory.fits")]
    assert text.endswith(f": {change}")


MISSPELT = {"target_modules": ["q_porj", "v_proj"]}
MORE_THAN_A_STEP = {"batch_size": 3, "packing": False, "micro_batch_size": 5}


@each(
    ("config", "card", "text"),
    [
        ({"use_tf32": True}, "t4", "TF32 was requested, but T4 (7.5) has none"),
        ({"torch_compile": True}, None, "compiling is not worth it on a CPU"),
        ({"device": "cpu"}, "h200", "this plan is for H200 SXM"),
        (MISSPELT, "rtx-4090", "no known layer is called q_porj"),
        ({"dataloader_num_workers": 8}, "h200", "a thread feeds prepared"),
        (MORE_THAN_A_STEP, "rtx-4090", "a whole step is only 3 sequences"),
        ({"eval_batch_size": 4096, "packing": False}, "rtx-3060", "4,096 sequences would not fit"),
        # Costly settings are honoured with a warning.
        ({"attention": "eager"}, "rtx-4090", "eager attention keeps every score"),
        ({"fused_loss": False}, "rtx-4090", "the full logits are stored"),
        ({"bf16": False, "fp16": False}, "rtx-4090", "fp32 uses the tensor cores only"),
        ({"bf16": True}, None, "bf16 on a CPU is slower than fp32"),
        ({"max_seq_length": 100_000}, "rtx-4090", "longer than the 40960 positions"),
        ({"device": "cuda"}, None, "device: cuda, but there is no GPU"),
        ({"deterministic": True, "cudnn_benchmark": True}, "rtx-4090", "cudnn_benchmark"),
    ],
)
def test_what_is_not_done_as_written_is_reported(config, card, text):
    assert any(text in f"{each.path}: {each.text}" for each in plan(manifest(config), card).remarks)


def with_data(config: dict[str, Any] | None = None, **dataset: Any) -> dict[str, Any]:
    data = manifest({"max_steps": 5, **(config or {})})
    data["training"]["dataset"] |= dataset
    return data


def characters(config: dict[str, Any], **shape: int) -> dict[str, Any]:
    base = {"name": "char-gpt", **({"architecture": shape} if shape else {})}
    training = {"dataset": {"path": "shakespeare"}, "config": config}
    return {"name": "bard", "base_models": [base], "training": training}


def test_the_character_model_is_told_what_its_sizes_decide_and_no_adapter_is_advised():
    told = remarks(plan(characters({"max_seq_length": 99, "packing": True})), "superseded")
    assert "data.max_seq_length: max_seq_length: block_size 256 decides" in told
    assert "data.packing: packing: a corpus is cut into full blocks anyway" in told
    small = remarks(plan(characters({"micro_batch_size": 192}), None, vram="1GB"), "warning")
    [text] = [text for text in small if "memory.fits" in text]
    assert "lora" not in text
    assert "int4" not in text
    # This took a minute when counts were searched one by one.
    absurd = characters({"batch_size": 999_999_999_989}, layers=1, heads=1, width=8, block_size=1)
    assert plan(absurd, "h200").batch.examples_per_update == 999_999_999_989


def test_rows_and_workers_that_are_lacking_are_reported(tmp_path):
    evaluates = {"evaluation_strategy": "epoch", "load_best_model_at_end": True}
    told = remarks(plan(with_data(evaluates, validation_split=0)), "warning")
    assert "watch.evaluation_strategy: there are no validation rows to evaluate" in told
    assert "watch.load_best: there is no evaluation to choose the best checkpoint by" in told
    streamed = with_data({"dataloader_num_workers": 64}, streaming=True)
    told = remarks(plan(streamed, None, machine=machine(cores=2)), "warning")
    assert "loader.workers: 64 workers on 2 cores slow each other down" in told
    (tmp_path / "train.jsonl").write_text("", encoding="utf-8")
    made = plan(manifest(), folder=tmp_path)
    assert "length.rows: there are no rows to train on: train.jsonl is empty" in remarks(
        made, "warning"
    )
    assert decision(made, "length.expected_seconds")[1] == "unknown: there are no rows"
    (tmp_path / "train.jsonl").write_text('{"text": "abc"}\n' * 1000, encoding="utf-8")
    here = replace(machine(), disk_free_bytes=Fact(1000, "test"))
    made = plan(manifest(), None, machine=here, folder=tmp_path)
    assert any(line.startswith("disk.total_bytes: needs ") for line in remarks(made, "warning"))


def test_rows_of_a_run_are_counted_exactly(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "abc"}\n' * 50, encoding="utf-8")
    data = manifest({"batch_size": 1, "epochs": 1.1})
    data["training"]["dataset"]["validation_split"] = 0
    assert plan(data, folder=tmp_path).length.total_steps == 55
    data["training"]["dataset"] = {"tasks": {"a": {"train": "train.jsonl"}}}
    assert plan(data, folder=tmp_path).length.rows == 45  # a task without validation rows is split
    sources = {
        decision(plan(with_data(**dataset)), "data.validation")[2]: dataset
        for dataset in ({}, {"validation_split": 0.2}, {"validation_path": "held.jsonl"})
    }
    assert sources == {"preset": {}, "manifest": {"validation_path": "held.jsonl"}}
    for name in ("../../etc", "a/b", "..", "a b"):
        cache = Path(plan(manifest(name=name)).data.cache or "")
        assert cache.parent == Path("nowhere/datasets_optimized")
        assert ".." not in cache.parts


@pytest.mark.parametrize(
    ("overlong", "tokens", "sequences"), [("cut", 92_160, 16), ("split", 1_894_736, 16)]
)
def test_long_rows_count_by_what_becomes_of_them(tmp_path, overlong, tokens, sequences):
    (tmp_path / "train.jsonl").write_text(("x" * 39_999 + "\n") * 200, encoding="utf-8")
    made = plan(manifest({"overlong": overlong, "max_seq_length": 512}), folder=tmp_path)
    assert made.length.tokens_per_epoch == tokens
    assert made.batch.sequences_per_update == sequences
    # Parts of 512 tokens are rows of their own, as they are when they have been packed.
    parts = 21 if overlong == "split" else 1
    assert made.length.rows == 180 * parts

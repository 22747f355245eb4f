"""Resuming another run is refused: keys that affect weights and the base are compared."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expert.core.rundir import RunFolder
from expert.manifest.reader import read_manifest
from expert.manifest.schema.config import TrainingConfig
from expert.manifest.schema.manifest import Adapter, BaseModelSpec
from expert.planning.draft import KEPT, ResumedChoices
from expert.planning.machine.machine import Fact
from expert.planning.survey import Survey
from expert.run.session.identity import NO_EFFECT_ON_WEIGHTS, identity
from expert.run.stored.changes import kept_of
from expert.training.checkpoint import CheckpointError
from tests.data.damaging import damage, put_back
from tests.each import each
from tests.jobs.runs import copied, events_of, losses_of, run, weights_of, write_expert
from tests.planning.planning import decision, manifest, plan

SETTINGS = {"epochs": 1, "save_steps": 2, "evaluation_strategy": "no", "max_steps": 4}
NO_ROWS: Any = SimpleNamespace(
    train=None, stream=object(), encoder=SimpleNamespace(fingerprint="words")
)


def base_model(**values: Any) -> dict[str, Any]:
    return {"base_models": [{"name": "Qwen3-0.6B", **values}]}


def with_adapter(**values: Any) -> dict[str, Any]:
    return base_model(adapters=[values])


IA3 = {"adapter_type": "ia3", "target_modules": ["k_proj", "down_proj"]}
CHARACTERS = {"layers": 2, "heads": 2, "width": 32, "block_size": 16}
DPO = {"method": "dpo"}
OTHER: dict[str, Any] = {
    "method": "dpo",
    "loss_type": (DPO, DPO | {"loss_type": "hinge"}),
    "beta": (DPO, DPO | {"beta": 0.5}),
    "label_smoothing": (DPO, DPO | {"label_smoothing": 0.1}),
    "simpo_gamma": ({"method": "simpo"}, {"method": "simpo", "simpo_gamma": 0.5}),
    "sft_weight": (DPO, DPO | {"sft_weight": 0.5}),
    "desirable_weight": ({"method": "kto"}, {"method": "kto", "desirable_weight": 0.5}),
    "undesirable_weight": ({"method": "kto"}, {"method": "kto", "undesirable_weight": 0.5}),
    "adapter_type": "dora",
    "rank": 8,
    "alpha": 64,
    "dropout": 0.1,
    "target_modules": ["q_proj"],
    "feedforward_modules": (IA3, IA3 | {"feedforward_modules": ["down_proj"]}),
    "start_from": ({}, {"start_from": "elsewhere"}),
    "adapter_init": "pissa",
    "modules_to_save": ["lm_head"],
    "loraplus_lr_ratio": 16.0,
    "epochs": ({"epochs": 1}, {"epochs": 2}),
    "max_steps": 7,
    "learning_rate": 0.5,
    "batch_size": 4,
    "batch_tokens": 65536,
    "gradient_accumulation_steps": 2,
    "warmup_steps": 3,
    "warmup_ratio": 0.5,
    "lr_scheduler": "linear",
    "lr_scheduler_kwargs": {"min_lr": 1e-6},
    "optim": "sgd",
    "weight_decay": 0.1,
    "betas": [0.9, 0.95],
    "adam_epsilon": 1e-6,
    "max_grad_norm": 0.5,
    "seed": 7,
    "max_seq_length": 512,
    "packing": "concat",
    "group_by_length": (
        {"packing": False, "group_by_length": False},
        {"packing": False, "group_by_length": True},
    ),
    "overlong": "drop",
    "train_on_prompt": True,
    "bf16": ({"bf16": True}, {"bf16": False, "fp16": False}),
    "fp16": ({}, {"fp16": True}),
    "use_tf32": False,
    "attention": "eager",
    "use_sdpa": ({"packing": False, "attention": "eager"}, {"packing": False, "use_sdpa": True}),
    "flash_attention_2": ({"attention": "eager"}, {"flash_attention_2": True}),
    "fused_blocks": False,
}
"""Values that are not those of an empty manifest, or two settings that differ in the key."""
OTHER_BASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "base_models.name": (base_model(), base_model(name="Qwen3-1.7B")),
    "base_models.revision": (base_model(), base_model(revision="v2")),
    "base_models.quantization": (base_model(), base_model(quantization="int4")),
    "base_models.prompt_template": (base_model(), base_model(prompt_template="alpaca")),
    "base_models.architecture": (
        base_model(name="char-gpt", architecture=CHARACTERS),
        base_model(name="char-gpt", architecture=CHARACTERS | {"heads": 4}),
    ),
    "adapters.target_modules": (base_model(), with_adapter(target_modules=["q_proj"])),
    "adapters.r": (base_model(), with_adapter(r=8)),
    "adapters.alpha": (base_model(), with_adapter(alpha=64)),
    "adapters.dropout": (base_model(), with_adapter(dropout=0.1)),
}


COUNTED = Survey(rows=1000, tokens=100_000, because="counted")


def test_every_manifest_key_is_listed_as_affecting_weights_or_not():
    keys = {
        *TrainingConfig.model_fields,
        *(f"base_models.{key}" for key in BaseModelSpec.model_fields),
        *(f"adapters.{key}" for key in Adapter.model_fields),
    }
    decided = [*OTHER, *OTHER_BASES, "adapters.feedforward_modules", *NO_EFFECT_ON_WEIGHTS]
    assert keys - set(decided) == set(), "does it move weights? see run/session/identity.py"
    assert sorted(decided) == sorted(keys)


def pair_of(key: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    if key in OTHER_BASES:
        return [({}, more) for more in OTHER_BASES[key]]
    if key == "adapters.feedforward_modules":
        modules = with_adapter(feedforward_modules=["down_proj"])
        return [(IA3, base_model()), (IA3, modules)]
    value = OTHER[key]
    pair = value if isinstance(value, tuple) else ({}, {key: value})
    return [(config, {}) for config in pair]


@each("key", [*OTHER, *OTHER_BASES, "adapters.feedforward_modules"])
def test_another_value_of_a_key_is_another_identity(key):
    then, now = (
        identity(plan(manifest(config, **more), survey=COUNTED), NO_ROWS, {})
        for config, more in pair_of(key)
    )
    assert then != now, f"{key}: both are {now}"


def test_the_precision_that_a_machine_chose_is_kept_on_another_that_has_it():
    assert plan(manifest(), "t4", kept=ResumedChoices(precision="fp32")).kernels.precision == "fp32"
    bf16 = ResumedChoices(precision="bf16")
    assert plan(manifest(), None, device="cpu", kept=bf16).kernels.precision == "bf16"
    assert plan(manifest(), "t4", kept=bf16).kernels.precision == "fp16"
    asked = plan(manifest({"bf16": False, "fp16": False}), kept=bf16)
    assert asked.kernels.precision == "fp32"


@each(
    ("config", "kept", "card", "attention"),
    [
        ({}, "flash", "h200", "flash"),
        ({}, "flash4", "h200", "flash4"),
        ({"fused_blocks": False}, "flash4", "h200", "flash4"),
        ({}, "flex", "rtx-4090", "flex"),
        ({}, "flash4", "rtx-4090", "flash"),
        ({}, "flash", "t4", "sdpa"),
        ({"attention": "flash"}, "flash4", "h200", "flash"),
        ({"torch_compile": True}, "flash4", "h200", "flex"),
    ],
)
def test_the_attention_that_a_machine_chose_is_kept_where_it_can_run(
    config, kept, card, attention, monkeypatch
):
    there = "expert.planning.choose.kernels.package_version"
    monkeypatch.setattr(there, lambda name: Fact("4.0", "importlib.metadata"))
    long = Survey(rows=10_000_000, tokens=5_000_000_000, because="counted")
    settled = plan(manifest(config), card, survey=long, kept=ResumedChoices(attention=kept))
    assert settled.kernels.attention == attention


def test_tf32_and_int8_that_a_machine_chose_are_kept_on_another():
    fp8 = base_model(quantization="fp8")
    for card in ("t4", "h200"):
        assert not plan(manifest(), card, kept=ResumedChoices(tf32=False)).kernels.tf32
    assert not plan(manifest(), "t4", kept=ResumedChoices(tf32=True)).kernels.tf32
    assert plan(manifest({"use_tf32": True}), kept=ResumedChoices(tf32=False)).kernels.tf32
    assert plan(manifest(**fp8), "h200").model.quantization == "fp8"
    kept = plan(manifest(**fp8), "h200", kept=ResumedChoices(quantization="int8"))
    assert decision(kept, "model.quantization")[:2] == ("int8", KEPT)


# --- real runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory, base) -> tuple[Path, Path, Path]:
    """Its manifest, its run folder and a base of its own."""
    folder = tmp_path_factory.mktemp("whole")
    own = folder / "base"
    shutil.copytree(base, own)
    manifest = write_expert(folder / "expert", own, SETTINGS)
    return manifest, run(manifest).folder, own


def resumed(whole, place: Path, /, *sets: str, **more: Any) -> Path:
    """A copy of the run resumed at step 2, with other settings."""
    copy = copied(whole[1], place)
    overrides = tuple(sets)
    run(whole[0], resume=str(copy / "checkpoints" / "step-000002"), overrides=overrides, **more)
    return copy


@each(
    "setting",
    ["micro_batch_size=1", "gradient_checkpointing=full", "on_not_finite=skip", "attention=sdpa"],
)
def test_a_changed_setting_without_effect_on_weights_is_accepted(whole, tmp_path, setting):
    copy = resumed(whole, tmp_path / "copy", f"training.config.{setting}")
    assert list(losses_of(copy)) == [3, 4]
    assert events_of(copy, "resumed")[0]["changed"] == []


def test_only_what_nobody_set_is_kept(whole, tmp_path):
    read, folder = read_manifest(whole[0]), RunFolder(copied(whole[1], tmp_path / "copy"))
    base = ResumedChoices(quantization="none")
    assert kept_of(folder, read) == replace(base, precision="fp32")
    settled, recorded = (json.loads(file.read_text()) for file in (folder.plan, folder.manifest))
    settled["kernels"] |= {"device": "cuda", "attention": "flash", "tf32": True}
    folder.plan.write_text(json.dumps(settled))
    base = replace(base, fused_blocks=False)
    assert kept_of(folder, read) == replace(base, precision="fp32", attention="flash", tf32=True)
    recorded["training"]["config"] |= {"bf16": False, "attention": "flash", "use_tf32": True}
    folder.manifest.write_text(json.dumps(recorded))
    assert kept_of(folder, read) == base


def test_replaced_weights_of_the_base_are_refused_unless_that_is_allowed(whole, tmp_path):
    weights = whole[2] / "model.safetensors"
    with put_back(whole[2], tmp_path / "kept"):
        damage(weights, "last byte", random.Random(1))  # of the same size and time
        with pytest.raises(CheckpointError, match=r'base\.weights: was "sha256 \w+…, is "sha256 '):
            resumed(whole, tmp_path / "refused")
        copy = resumed(whole, tmp_path / "copy", allow_changed=True)
        [line] = events_of(copy, "resumed")[0]["changed"]
        assert line.startswith("base.weights: was ")
    weights.touch()
    same = resumed(whole, tmp_path / "same")  # the same bytes with another time
    assert weights_of(same) == weights_of(whole[1])

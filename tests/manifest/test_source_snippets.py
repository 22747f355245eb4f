"""Every configuration snippet and every command of the five source documents, written anew: each is
accepted with the meaning its document gives it, or told what takes its place.

The same list, with what becomes of each, is in docs/COMING_FROM.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import EXAMPLES, Runner
from tests.each import each
from tests.manifest.reading import error_of, notices_of, read
from tests.wording import wording

MANIFEST = "base_model: tiny\ndataset: rows.jsonl\n"
CHARACTERS = "dataset: shakespeare\n"

# What a manifest of the first two documents has under training.config.
OPTIMISED = {
    "batch_size": 16,
    "gradient_accumulation_steps": 4,
    "max_seq_length": 2048,
    "dataloader_num_workers": 8,
    "dataloader_prefetch_factor": 8,
    "dataloader_persistent_workers": True,
    "fp16": False,
    "bf16": True,
    "use_tf32": True,
    "use_sdpa": True,
    "optim": "adamw_torch_fused",
    "group_by_length": True,
    "gradient_checkpointing": False,
    "pretokenized_cache": "datasets_optimized/expert-json/tokenized",
}


def settings_of(text: str, before: str = MANIFEST) -> Any:
    return read(before + text).manifest.training.config


def holds(settings: Any, expected: Mapping[str, Any]) -> bool:
    return {key: getattr(settings, key) for key in expected} == dict(expected)


# --- the proposal for the RTX 4090 and its task list ---------------------------------------------


def test_the_optimised_settings_of_a_manifest_are_taken_as_they_are():
    data = {"base_model": "tiny", "training": {"dataset": "rows.jsonl", "config": OPTIMISED}}
    assert holds(read(json.dumps(data), "json").manifest.training.config, OPTIMISED)


def test_group_by_length_is_reported_what_packing_does_for_it():
    told = notices_of(MANIFEST + "group_by_length: true\n")
    assert any(wording("superseded-packing-leaves-no") in each for each in told)


def test_the_fields_of_the_dataclass_are_settings_that_are_not_given():
    text = """
bf16: Optional[bool] = None
use_tf32: Optional[bool] = None
use_sdpa: Optional[bool] = None
pretokenized_cache: Optional[str] = None
dataloader_num_workers: Optional[int] = None
dataloader_prefetch_factor: Optional[int] = None
# ... and more
"""
    assert holds(
        settings_of(text),
        {"bf16": "auto", "use_tf32": "auto", "use_sdpa": "auto", "pretokenized_cache": None},
    )


def test_quantised_weights_are_computed_with_in_bf16():
    text = "load_in_4bit: true\nbnb_4bit_compute_dtype: torch.bfloat16\n"
    made = read(MANIFEST + text + "bnb_4bit_quant_type: nf4\nbnb_4bit_use_double_quant: true\n")
    assert made.manifest.base_models[0].quantization == "int4"
    assert made.manifest.training.config.bf16 is True


def test_the_number_of_processes_that_tokenise_is_reported_to_be_every_core():
    told = notices_of(MANIFEST + "num_proc: 8\n")
    assert any(wording("superseded-rows-tokenised-once") in each for each in told)


def test_a_cache_named_on_windows_is_the_same_folder():
    text = "pretokenized_cache: datasets_optimized\\expert-json\\tokenized\n"
    assert settings_of(text).pretokenized_cache == OPTIMISED["pretokenized_cache"]


# --- the notes on a starved loader ---------------------------------------------------------------


@pytest.mark.parametrize("section", ["data", "dataloader", "training"])
def test_the_arguments_of_the_loader_are_settings(section):
    inside = "num_workers: 4, pin_memory: true, persistent_workers: true, prefetch_factor: 2"
    assert holds(
        settings_of(f"{section}: {{{inside}, batch_size: 1}}\n"),
        {
            "dataloader_num_workers": 4,
            "dataloader_pin_memory": True,
            "dataloader_persistent_workers": True,
            "dataloader_prefetch_factor": 2,
            "batch_size": 1,
        },
    )


@each(
    ("text", "expected"),
    [
        ("accumulation_steps: 4\nbatch_size: 1\n", {"gradient_accumulation_steps": 4}),
        ("mixed_precision: bf16\n", {"bf16": True, "fp16": False}),
        ("torch_compile: true\ncompile_mode: reduce-overhead\n", {"torch_compile": True}),
        ("compile_mode: reduce-overhead\n", {"torch_compile_mode": "reduce-overhead"}),
        ("batch_size: 4\n", {"batch_size": 4}),
    ],
)
def test_what_the_notes_put_off_is_a_setting(text, expected):
    assert holds(settings_of(text), expected)


@pytest.mark.parametrize("line", ["deepspeed: zero3.json", "fsdp: [full_shard]"])
def test_what_shards_over_several_gpus_is_sharded(line):
    assert holds(settings_of(line), {"distributed": "sharded"})


# --- the guide for the RTX 5090 ------------------------------------------------------------------

AFTER = """
model:
  slm_name: owner/model-8b
  slm_load_in_8bit: False          # was True
  slm_load_in_4bit: False
  slm_dtype: "bfloat16"
  attn_implementation: "flash_attention_2"
training:
  per_device_train_batch_size: 32
  per_device_eval_batch_size: 64
  gradient_accumulation_steps: 1
  optimizer: "adamw_torch_fused"
  torch_compile: True
  num_workers: 12
  allow_tf32: True
dataset: rows.jsonl
"""


def test_the_settings_of_the_guide_are_read_under_its_own_names():
    made = read(AFTER).manifest
    assert (made.base_models[0].name, made.base_models[0].quantization) == (
        "owner/model-8b",
        "none",
    )
    assert holds(
        made.training.config,
        {
            "bf16": True,
            "fp16": False,
            "attention": "flash",
            "batch_size": 32,
            "eval_batch_size": 64,
            "gradient_accumulation_steps": 1,
            "optim": "adamw_torch_fused",
            "torch_compile": True,
            "dataloader_num_workers": 12,
            "use_tf32": True,
        },
    )


def test_the_settings_before_it_are_read_too():
    text = AFTER.replace("slm_load_in_8bit: False", "slm_load_in_8bit: True").replace(
        '"adamw_torch_fused"', '"adamw"'
    )
    made = read(text).manifest
    assert made.base_models[0].quantization == "int8"
    assert made.training.config.optim == "adamw_torch"


@each(
    ("text", "expected"),
    [
        (  # out of memory
            "per_device_train_batch_size: int = 24  # less than 32\n"
            "gradient_accumulation_steps: int = 2   # more than 1\n",
            {"batch_size": 24, "gradient_accumulation_steps": 2},
        ),
        (  # loss spikes
            "warmup_steps: int = 200  # more than 100\nlearning_rate: float = 1e-4  # half\n",
            {"warmup_steps": 200, "learning_rate": 1e-4},
        ),
        (  # a starved GPU
            "num_workers: int = 8   # fewer than 12\nprefetch_factor: int = 2  # not 4\n",
            {"dataloader_num_workers": 8, "dataloader_prefetch_factor": 2},
        ),
        ('attn_implementation: str = "flash_attention_2"\n', {"attention": "flash"}),
        ("torch_compile: False\n", {"torch_compile": False}),
        ("optim: adamw_torch_fused\n", {"optim": "adamw_torch_fused"}),
        ("torch_dtype: torch.bfloat16\ndevice_map: cuda\n", {"bf16": True}),
        ("gradient_checkpointing: false\n", {"gradient_checkpointing": False}),
        ("allow_tf32: true\n", {"use_tf32": True}),
    ],
)
def test_every_snippet_of_the_guide_is_a_setting(text, expected):
    assert holds(settings_of(text), expected)


# --- the guide for the character GPT -------------------------------------------------------------


@pytest.mark.parametrize("rows", [96, 128, 160, 192])
def test_the_settings_of_the_character_gpt_are_read_from_its_config(rows):
    text = (
        "device: auto\ntraining:\n"
        f"  batch_size: {rows}  # what fits the card\n"
        "  use_compile: true\n  gradient_clip: 1.0\n  log_interval: 100\n  epochs: 25\n"
        "  use_amp: true\n  checkpoint_every: 5\ndata: {max_chars: 1000000, num_workers: 4, "
        "persistent_workers: true, prefetch_factor: 2, pin_memory: true}\n"
    )
    made = read(CHARACTERS + text).manifest
    assert made.base_models[0].name == "char-gpt"
    assert made.training.dataset.max_chars == 1_000_000
    assert holds(
        made.training.config,
        {
            "batch_size": rows,
            "torch_compile": True,
            "max_grad_norm": 1.0,
            "logging_steps": 100,
            "epochs": 25,
            "device": "auto",
            "save_every_epochs": 5,
            "dataloader_num_workers": 4,
            "dataloader_persistent_workers": True,
            "dataloader_prefetch_factor": 2,
            "dataloader_pin_memory": True,
        },
    )


def test_a_clip_of_0_is_no_clipping_and_compilation_can_be_left_out():
    text = "training:\n  gradient_clip: 0\n  use_compile: false\n"
    assert holds(settings_of(text, CHARACTERS), {"max_grad_norm": 0, "torch_compile": False})


def test_choosing_algorithms_by_trial_is_a_setting():
    assert settings_of("cudnn_benchmark: true\n", CHARACTERS).cudnn_benchmark is True


# --- the commands --------------------------------------------------------------------------------

# The scripts of the documents, and what is run in their place.
COMMANDS = {
    "expert/cli/scripts/find_datasets.py": "find-datasets",
    "expert/cli/scripts/pretokenize_datasets.py": "pretokenize --manifest",
    "python cli/clear_cuda_cache.py": "clear-cuda-cache",
    "expert-cli train --manifest": "train --dry-run --set max_steps=10 --manifest",
    "expert/cli/scripts/benchmark_training.py": "benchmark --help",
    "tests/test_expert.py": "validate --help",
    "python train.py --dataset shakespeare": "train --dry-run --dataset shakespeare",
    "python diagnose_training.py": "diagnose --no-kernels --manifest",
    "watch -n 1 nvidia-smi": "watch --help",
    "load_base_model, setup_trainer of expert_trainer.py": "plan --manifest",
}


@pytest.fixture
def expert_json(tmp_path: Path) -> Path:
    """A folder expert-json with a manifest, as the documents have it."""
    folder = tmp_path / "expert-json"
    folder.mkdir()
    rows = [{"instruction": f"say {n}", "response": json.dumps({"n": n})} for n in range(24)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = {**OPTIMISED, "max_seq_length": 64, "bf16": "auto", "device": "cpu"}
    training = {"dataset": {"path": "train.jsonl"}, "config": config}
    data = {"name": "expert-json", "base_model": {"name": "tiny"}, "training": training}
    (folder / "manifest.json").write_text(json.dumps(data), encoding="utf-8")
    return folder / "manifest.json"


@pytest.mark.parametrize("script", COMMANDS)
def test_what_takes_the_place_of_a_script_runs(script, expert_json, capsys, monkeypatch):
    monkeypatch.chdir(expert_json.parent.parent)
    monkeypatch.setenv("HF_HOME", str(expert_json.parent / "hub"))
    command = COMMANDS[script].split()
    if command[-1] == "--manifest":
        command.append("expert-json/manifest.json")
    ran = Runner(capsys, monkeypatch)(*command)
    assert ran.code == 0, ran.err


def test_the_commands_are_those_of_the_document():
    text = (EXAMPLES.parent / "docs" / "COMING_FROM.md").read_text(encoding="utf-8")
    for script, command in COMMANDS.items():
        name = script.split("/")[-1].split(" --")[0].removeprefix("python ")
        assert name.split(" of ")[-1] in text, script
        assert f"expert {command.split()[0]}" in text


def test_a_class_instead_of_its_lines_is_refused_with_what_to_keep():
    text = "from dataclasses import dataclass\n\n@dataclass\nclass Config:\n    epochs: int = 3\n"
    assert wording("keep-name-type-value") in error_of(text)

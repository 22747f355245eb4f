"""Every other name under which people write a key, and the one home each key has here."""

from __future__ import annotations

from collections.abc import Iterable

from expert.manifest.schema.config import TrainingConfig
from expert.manifest.schema.dataset import DatasetSpec, Decoding, FieldMapping, RowChecks
from expert.manifest.schema.manifest import BaseModelSpec, Manifest, Training

CONFIG = "training.config"
CORPORA = ("shakespeare", "python-stdlib")
DATASET = "training.dataset"

# Other spellings of a key of training.config. They are understood there, directly under
# `training`, under `model` and at the top level: files of other trainers differ in just this.
CONFIG_ALIASES = {
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "n_epochs": "epochs",
    "max_epochs": "epochs",
    "per_device_train_batch_size": "batch_size",
    "train_batch_size": "batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "grad_accum_steps": "gradient_accumulation_steps",
    "gradient_accumulation": "gradient_accumulation_steps",
    "lr": "learning_rate",
    "lr_scheduler_type": "lr_scheduler",
    "scheduler": "lr_scheduler",
    "lora_r": "rank",
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "lora_target_modules": "target_modules",
    "finetuning_type": "adapter_type",
    "attn_implementation": "attention",
    "use_compile": "torch_compile",
    "compile": "torch_compile",
    "compile_mode": "torch_compile_mode",
    "gradient_clip": "max_grad_norm",
    "grad_clip": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "log_interval": "logging_steps",
    "log_every": "logging_steps",
    "num_workers": "dataloader_num_workers",
    "prefetch_factor": "dataloader_prefetch_factor",
    "pin_memory": "dataloader_pin_memory",
    "persistent_workers": "dataloader_persistent_workers",
    "optimizer": "optim",
    "tf32": "use_tf32",
    "max_length": "max_seq_length",
    "max_seq_len": "max_seq_length",
    "cutoff_len": "max_seq_length",
    "sequence_len": "max_seq_length",
    "eval_strategy": "evaluation_strategy",
    "random_seed": "seed",
    "report_to": "trackers",
    "save_every": "save_every_epochs",
    "save_interval": "save_every_epochs",
    "save_every_n_epochs": "save_every_epochs",
    "checkpoint_every": "save_every_epochs",
    "checkpoint_interval": "save_every_epochs",
    "checkpoint_every_epochs": "save_every_epochs",
    "use_flash_attention": "flash_attention_2",
    "use_flash_attn": "flash_attention_2",
    "use_liger": "fused_loss",
    "use_liger_kernel": "fused_loss",
    "early_stopping": "early_stopping_patience",
    "patience": "early_stopping_patience",
    "out_dir": "output_dir",
    "save_dir": "output_dir",
    "checkpoint_dir": "output_dir",
    "adam_eps": "adam_epsilon",
    "max_vram": "vram_limit",
    "sample_packing": "packing",
    "flash_attention": "flash_attention_2",
    "lora_target": "target_modules",
    "adapter": "adapter_type",
    "micro_batch": "micro_batch_size",
    "train_on_inputs": "train_on_prompt",
    "allow_tf32": "use_tf32",
    "accumulation_steps": "gradient_accumulation_steps",
    "grad_accum": "gradient_accumulation_steps",
    "neat_packing": "packing",
    "enable_liger_kernel": "fused_loss",
    "liger_fused_linear_cross_entropy": "fused_loss",
    "cut_cross_entropy": "fused_loss",
    "num_warmup_steps": "warmup_steps",
    "random_state": "seed",
    "model_max_length": "max_seq_length",
    "r": "rank",
    "peft_target_modules": "target_modules",
    "batch_max_tokens": "batch_tokens",
    "full_determinism": "deterministic",
}

# Keys that become something other than one key of training.config; migrate.py knows how.
DTYPE_NAMES = ("dtype", "torch_dtype", "slm_dtype", "precision")
AMP_NAMES = ("use_amp", "amp", "mixed_precision")
LOAD_IN_NAMES = ("load_in_4bit", "slm_load_in_4bit", "load_in_8bit", "slm_load_in_8bit")
MODEL_NAMES = ("slm_name", "model_name", "model_name_or_path", "base_model_name")
ADAM_BETAS = ("adam_beta1", "adam_beta2")
SPECIAL_NAMES = (*DTYPE_NAMES, *AMP_NAMES, *LOAD_IN_NAMES, *MODEL_NAMES, *ADAM_BETAS, "use_dora")

DATASET_ALIASES = {
    "dataset": "path",
    "name": "path",
    "file": "path",
    "train_file": "path",
    "train_path": "path",
    "data_path": "path",
    "val_path": "validation_path",
    "valid_path": "validation_path",
    "validation_file": "validation_path",
    "eval_path": "validation_path",
    "test_file": "test_path",
    "val_split": "validation_split",
    "val_set_size": "validation_split",
    "val_size": "validation_split",
    "dataset_name": "path",
    "dataset_text_field": "text_field",
    "eval_dataset": "validation_path",
    "train_dataset": "path",
    "train_data": "path",
    "val_data": "validation_path",
    "max_train_samples": "max_samples",
}
# Keys of the data set that are understood at the top level and under `training` too.
LOOSE_DATASET_KEYS = {
    "field_mapping": "field_mapping",
    "text_field": "text_field",
    "max_chars": "max_chars",
    "max_samples": "max_samples",
    "validation_path": "validation_path",
    "test_path": "test_path",
    "validation_split": "validation_split",
    "streaming": "streaming",
    **{
        alias: home
        for alias, home in DATASET_ALIASES.items()
        if alias not in ("dataset", "name", "file")
    },
}
# Keys of `constraints` that the oldest files have at the top level.
LOOSE_CONSTRAINTS = ("load_order", "incompatible_with", "requires", "max_chain")

# Shape of the character model as people write it under `model`.
SHAPE_ALIASES = {
    "n_layer": "layers",
    "n_layers": "layers",
    "num_layers": "layers",
    "layers": "layers",
    "n_head": "heads",
    "n_heads": "heads",
    "num_heads": "heads",
    "heads": "heads",
    "n_embd": "width",
    "embed_dim": "width",
    "d_model": "width",
    "hidden_size": "width",
    "width": "width",
    "block_size": "block_size",
    "context_length": "block_size",
    "dropout": "dropout",
}

CONFIG_KEYS = frozenset(TrainingConfig.model_fields)
DATASET_KEYS = frozenset(DatasetSpec.model_fields)
BASE_MODEL_KEYS = ("quantization", "prompt_template")


def home_of(key: str) -> str | None:
    """Where a key that stands alone belongs: `batch_size` -> `training.config.batch_size`."""
    if key in CONFIG_KEYS:
        return f"{CONFIG}.{key}"
    if key in CONFIG_ALIASES:
        return f"{CONFIG}.{CONFIG_ALIASES[key]}"
    if key in LOOSE_DATASET_KEYS:
        return f"{DATASET}.{LOOSE_DATASET_KEYS[key]}"
    return None


# Sections whose keys --set understands by their name alone.
SHORT_NAMES: tuple[tuple[tuple[str | int, ...], Iterable[str]], ...] = (
    (("training",), Training.model_fields),
    (("training", "dataset"), DatasetSpec.model_fields),
    (("training", "dataset", "validation"), RowChecks.model_fields),
    (("training", "dataset", "field_mapping"), FieldMapping.model_fields),
    (("training", "decoding"), Decoding.model_fields),
    (("base_models", 0), BaseModelSpec.model_fields),
)


def homes_of_short_name(key: str) -> list[tuple[str | int, ...]]:
    """The sections that have a key of this name; none where a file may have it at the top level,
    or where it is no key at all."""
    at_the_top = {*Manifest.model_fields, *MODEL_NAMES, *SPECIAL_NAMES, *BASE_MODEL_KEYS}
    at_the_top |= {"base_model", "model", "dataset", "data", "adapters", "config"}
    if key in at_the_top or home_of(key) is not None:
        return []
    return [home for home, keys in SHORT_NAMES if key in keys]

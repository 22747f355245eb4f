"""Aliases of keys, and the section each key belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from expert.manifest.schema.config import TrainingConfig
from expert.manifest.schema.dataset import DatasetSpec, Decoding, FieldMapping, RowChecks
from expert.manifest.schema.manifest import BaseModelSpec, Manifest, Training

CONFIG = "training.config"
CORPORA = ("shakespeare", "python-stdlib")
DATASET = "training.dataset"


def _by_alias(names: Mapping[str, str]) -> dict[str, str]:
    return {alias: key for key, aliases in names.items() for alias in aliases.split()}


# Aliases of keys of training.config. Like the keys, they are read there, under `training`, under
# `model` and at the top level.
CONFIG_ALIASES = _by_alias(
    {
        "epochs": "num_epochs num_train_epochs n_epochs max_epochs",
        "batch_size": "per_device_train_batch_size train_batch_size",
        "eval_batch_size": "per_device_eval_batch_size batch_size_val",
        "eval_steps": "run_val_every_n_steps",
        "save_steps": "save_every_n_steps",
        "gradient_checkpointing": "enable_activation_checkpointing",
        "gradient_accumulation_steps": (
            "grad_accum_steps gradient_accumulation accumulation_steps grad_accum"
        ),
        "learning_rate": "lr",
        "lr_scheduler": "lr_scheduler_type scheduler",
        "rank": "lora_r lora_rank r",
        "alpha": "lora_alpha",
        "dropout": "lora_dropout",
        "target_modules": "lora_target_modules lora_target peft_target_modules",
        "adapter_type": "finetuning_type adapter",
        "attention": "attn_implementation",
        "torch_compile": "use_compile compile",
        "torch_compile_mode": "compile_mode",
        "max_grad_norm": "gradient_clip grad_clip gradient_clipping clip_grad_norm",
        "logging_steps": "log_interval log_every log_every_n_steps",
        "dataloader_num_workers": "num_workers",
        "dataloader_prefetch_factor": "prefetch_factor",
        "dataloader_pin_memory": "pin_memory",
        "dataloader_persistent_workers": "persistent_workers",
        "optim": "optimizer",
        "use_tf32": "tf32 allow_tf32",
        "max_seq_length": "max_length max_seq_len cutoff_len sequence_len model_max_length",
        "evaluation_strategy": "eval_strategy",
        "seed": "random_seed random_state",
        "trackers": "report_to",
        "save_every_epochs": (
            "save_every save_interval save_every_n_epochs checkpoint_every "
            "checkpoint_interval checkpoint_every_epochs"
        ),
        "flash_attention_2": (
            "use_flash_attention use_flash_attn flash_attention use_flash_attention_2"
        ),
        "fused_loss": (
            "use_liger use_liger_kernel enable_liger_kernel "
            "liger_fused_linear_cross_entropy cut_cross_entropy"
        ),
        "early_stopping_patience": "early_stopping patience early_stopping_steps",
        "output_dir": "out_dir save_dir checkpoint_dir",
        "adam_epsilon": "adam_eps",
        "vram_limit": "max_vram",
        "packing": "sample_packing neat_packing packed",
        "micro_batch_size": "micro_batch",
        "train_on_prompt": "train_on_inputs train_on_input",
        "warmup_steps": "num_warmup_steps",
        "batch_tokens": "batch_max_tokens",
        "deterministic": "full_determinism",
    }
)

# Names that are more than an alias of one key of training.config (peers/converted_keys.py).
DTYPE_NAMES = ("dtype", "torch_dtype", "slm_dtype", "precision")
AMP_NAMES = ("use_amp", "amp", "mixed_precision")
LOAD_IN_NAMES = ("load_in_4bit", "slm_load_in_4bit", "load_in_8bit", "slm_load_in_8bit")
MODEL_NAMES = ("slm_name", "model_name", "model_name_or_path", "base_model_name")
ADAM_BETAS = ("adam_beta1", "adam_beta2")
SPECIAL_NAMES = (*DTYPE_NAMES, *AMP_NAMES, *LOAD_IN_NAMES, *MODEL_NAMES, *ADAM_BETAS, "use_dora")

DATASET_ALIASES = _by_alias(
    {
        "path": (
            "dataset name file train train_file train_path data_path dataset_name train_dataset "
            "train_data"
        ),
        "validation_path": (
            "val valid val_path valid_path validation_file eval_path eval_dataset val_data"
        ),
        "test_path": "test test_file",
        "validation_split": "val_split val_set_size val_size test_split_size",
        "text_field": "dataset_text_field text_column_name",
        "max_samples": "max_train_samples",
    }
)
# Keys of training.dataset that are also read at the top level and under `training`.
_LOOSE = (
    *("field_mapping", "text_field", "max_chars", "max_samples"),
    *("validation_path", "test_path", "validation_split", "streaming"),
)
LOOSE_DATASET_KEYS = {key: key for key in _LOOSE} | {
    alias: home
    for alias, home in DATASET_ALIASES.items()
    if alias not in ("dataset", "name", "file", "train", "val", "valid", "test")
}
# Keys of `constraints` that old files have at the top level.
LOOSE_CONSTRAINTS = ("load_order", "incompatible_with", "requires", "max_chain")

# Keys under `model` for the shape of the character model.
SHAPE_ALIASES = _by_alias(
    {
        "layers": "n_layer n_layers num_layers layers",
        "heads": "n_head n_heads num_heads heads",
        "width": "n_embd embed_dim d_model hidden_size width",
        "block_size": "block_size context_length",
        "dropout": "dropout",
    }
)

CONFIG_KEYS = frozenset(TrainingConfig.model_fields)
DATASET_KEYS = frozenset(DatasetSpec.model_fields)
BASE_MODEL_KEYS = ("quantization", "prompt_template")


def canonical_path(key: str) -> str | None:
    """The path of a key or alias: `batch_size` -> `training.config.batch_size`."""
    if key in CONFIG_KEYS:
        return f"{CONFIG}.{key}"
    if key in CONFIG_ALIASES:
        return f"{CONFIG}.{CONFIG_ALIASES[key]}"
    if key in LOOSE_DATASET_KEYS:
        return f"{DATASET}.{LOOSE_DATASET_KEYS[key]}"
    return None


# Sections whose keys --set takes without the path.
SHORT_NAMES: tuple[tuple[tuple[str | int, ...], Iterable[str]], ...] = (
    (("training",), Training.model_fields),
    (("training", "dataset"), DatasetSpec.model_fields),
    (("training", "dataset", "validation"), RowChecks.model_fields),
    (("training", "dataset", "field_mapping"), FieldMapping.model_fields),
    (("training", "decoding"), Decoding.model_fields),
    (("base_models", 0), BaseModelSpec.model_fields),
)


def sections_with_key(key: str) -> list[tuple[str | int, ...]]:
    """The sections that have a key of this name; none if it may be at the top level of a file."""
    at_the_top = {*Manifest.model_fields, *SPECIAL_NAMES, *BASE_MODEL_KEYS}
    at_the_top |= {"base_model", "model", "dataset", "data", "adapters", "config"}
    if key in at_the_top or canonical_path(key) is not None:
        return []
    return [home for home, keys in SHORT_NAMES if key in keys]

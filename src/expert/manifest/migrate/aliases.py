"""Aliases of keys, from aliases.toml, and the section each key belongs to."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from expert.core.files import read_text
from expert.manifest.schema.config import TrainingConfig
from expert.manifest.schema.dataset import DatasetSpec, Decoding, FieldMapping, RowChecks
from expert.manifest.schema.manifest import BaseModelSpec, Manifest, Training

CONFIG = "training.config"
CORPORA = ("shakespeare", "python-stdlib")
DATASET = "training.dataset"


TABLES: Mapping[str, Any] = tomllib.loads(read_text(Path(__file__).with_name("aliases.toml")))


def _by_alias(section: str) -> dict[str, str]:
    return {alias: key for key, names in TABLES[section].items() for alias in names.split()}


CONFIG_ALIASES = _by_alias("config")

# Names that are more than an alias of one key of training.config (peers/keys.py).
DTYPE_NAMES = ("dtype", "torch_dtype", "slm_dtype", "precision")
AMP_NAMES = ("use_amp", "amp", "mixed_precision")
LOAD_IN_NAMES = ("load_in_4bit", "slm_load_in_4bit", "load_in_8bit", "slm_load_in_8bit")
MODEL_NAMES = ("slm_name", "model_name", "model_name_or_path", "base_model_name")
ADAM_BETAS = ("adam_beta1", "adam_beta2")
SPECIAL_NAMES = (*DTYPE_NAMES, *AMP_NAMES, *LOAD_IN_NAMES, *MODEL_NAMES, *ADAM_BETAS, "use_dora")

DATASET_ALIASES = _by_alias("dataset")
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

SHAPE_ALIASES = _by_alias("shape")

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

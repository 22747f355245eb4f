from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from expert.core.errors import ManifestError, Problem
from expert.manifest.check.problems import unknown_keys
from expert.manifest.migrate.aliases import (
    CONFIG_ALIASES,
    DATASET_ALIASES,
    LOOSE_DATASET_KEYS,
    SPECIAL_NAMES,
)
from expert.manifest.reader import interpret_document
from expert.manifest.schema.config import TrainingConfig
from expert.manifest.schema.dataset import DatasetSpec, Decoding
from expert.manifest.schema.manifest import BaseModelSpec, Manifest, Training
from expert.manifest.text.document import parse_document
from expert.manifest.text.item import Notice
from tests.each import each
from tests.manifest.reading import error_of, read

DOCUMENTS = Path(__file__).parents[2]
KNOWN = sorted(
    {
        *TrainingConfig.model_fields,
        *DatasetSpec.model_fields,
        *Decoding.model_fields,
        *BaseModelSpec.model_fields,
        *Training.model_fields,
        *Manifest.model_fields,
        *CONFIG_ALIASES,
        *DATASET_ALIASES,
        *LOOSE_DATASET_KEYS,
        *SPECIAL_NAMES,
    }
)


def _read(section: tuple[str, ...], key: str) -> tuple[list[Problem], list[Notice]]:
    """What is said of a key that was written into a section."""
    data: dict[str, Any] = {"base_models": [{"name": "X"}], "training": {"dataset": {"path": "a"}}}
    place = data
    for name in section:
        place = place.setdefault(name, {})
    place.setdefault(key, None)
    root = parse_document(json.dumps(data), "json", source="m.json").root
    return unknown_keys(root, strict=False)


def _told(section: tuple[str, ...], key: str) -> list[str]:
    """Fixes of the problems with a key that was written into a section."""
    return [problem.fix for problem in _read(section, key)[0]]


TOP: tuple[str, ...] = ()
TRAINING, DATASET, CONFIG = ("training",), ("training", "dataset"), ("training", "config")


@each(
    ("section", "key", "meant"),
    [
        (TOP, "lerning_rate", "'training.config.learning_rate'"),
        (TOP, "trainning", "'training'"),
        (TRAINING, "lerning_rate", "'training.config.learning_rate'"),
        (TRAINING, "epoch", "'training.config.epochs'"),
        (DATASET, "max_bad_row", "'max_bad_rows'"),
        ((*DATASET, "field_mapping"), "context", "'input'"),
        (DATASET, "pth", "'path'"),
        *((CONFIG, key, "'epochs'") for key in ("epoks", "epochss", "epoch")),
        (CONFIG, "learningRate", "'learning_rate'"),
        (TOP, "batchsize", "'training.config.batch_size'"),
    ],
)
def test_a_misspelt_key_is_refused_with_what_was_meant(section, key, meant):
    assert _told(section, key) == [f"did you mean {meant}?"]


@each("section", [TOP, TRAINING, DATASET, ("training", "decoding")])
def test_known_keys_and_metadata_words_are_never_refused(section):
    words = (
        *("packaging", "tracking", "compiler", "tracker", "speed", "lr_schedule", "train_paths"),
        *("date", "test", "task", "datasets", "service", "ranking", "complete", "models", "owner"),
        *("source", "splits", "trained_on", "metrics", "notes", "gpu", "status", "category"),
        *("paths", "files", "text_fields", "tokenizer"),  # other forms
        *("generator", "validator"),  # other endings
        *("test_size", "train_size", "local_rank", "min_vram", "lora"),  # other words between lines
        *("path2", "validation_2", "load_in_2bit"),
    )
    assert [word for word in (*KNOWN, *words) if _told(section, word)] == []


@each(
    ("section", "key"),
    [
        (TOP, "epoch"),
        (TOP, "sed"),
        (TOP, "warmup_step"),
        (TOP, "val_splitt"),
        (TRAINING, "rnak"),
        (DATASET, "paths"),
    ],
)
def test_a_doubtful_key_is_kept_and_asked_about(section, key):
    problems, [notice] = _read(section, key)
    assert (problems, notice.kind) == ([], "warning")
    assert "did you mean" in notice.text


def _problems(text: str) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        interpret_document(parse_document(text, "yaml", source="m.yaml"))
    return [str(problem) for problem in caught.value.problems]


@each("more", ["", "lr: 0.1\ntraining: {config: {seed: 1}}\n"])
@each(("key", "meant"), [("epoch", "epochs"), ("sed", "seed"), ("warmup_step", "warmup_steps")])
def test_a_key_similar_to_a_setting_is_refused_in_a_flat_file(more, key, meant):
    told = _problems(f"base_model: X\ndataset: a.jsonl\n{key}: 1\n{more}")
    assert told == [f"line 3: {key}: unknown key  (did you mean 'training.config.{meant}'?)"]
    made = read("base_model: X\ntraining: {dataset: a.jsonl}\nepoch: 1\n")  # settings elsewhere
    assert [notice.path for notice in made.notices if notice.kind == "warning"] == ["epoch"]


def test_a_misspelt_setting_and_the_path_of_one_are_refused_without_strict():
    text = "base_model: X\ndataset: {path: a.jsonl, splt: x}\nlerning_rate: 3\n"
    assert error_of(text).splitlines()[1:] == [
        ("  - line 3: lerning_rate: unknown key  (did you mean 'training.config.learning_rate'?)"),
        "  line 2: dataset: note: kept as metadata, without effect: splt",
    ]
    # As a user may write it after reading where a key belongs.
    for key, meant in (("training.config.epochs", "epochs"), ("training.dataset.path", "training")):
        (told,) = _problems(f"base_model: X\ndataset: a.jsonl\n{key}: 7\n")
        assert re.search(f"{key}: unknown key  \\(did you mean '{meant}'", told)


@each(
    ("key", "told"),
    [
        ("temperature", "'temperature' belongs at 'training.decoding.temperature'"),
        ("max_bad_rows", "'max_bad_rows' belongs at 'training.dataset.max_bad_rows'"),
        ("rope_scaling", "'rope_scaling' belongs at 'base_models[].rope_scaling'"),
    ],
)
def test_where_a_misplaced_key_belongs_is_reported_so_that_it_can_be_written(key, told):
    made = read(f"base_model: X\ndataset: a.jsonl\n{key}: 7\n")
    warned = [note.text for note in made.notices if note.kind == "warning"]
    assert warned == [f"kept as metadata: {told}"]

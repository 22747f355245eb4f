"""What reads is valid in the editor too, and a slip of the pen in training.config is not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from jsonschema import Draft7Validator

from expert.core.errors import ManifestError
from expert.manifest.editor import editor_schema
from expert.manifest.migrate.aliases import (
    CONFIG_ALIASES,
    CONFIG_KEYS,
    LOOSE_DATASET_KEYS,
    SPECIAL_NAMES,
)
from expert.manifest.migrate.values import CONFIG_VALUES, MODEL_VALUES
from expert.manifest.text.document import read_document
from expert.manifest.upgrade import upgrade
from tests.each import each
from tests.manifest.reading import REAL_FILES, files_in
from tests.manifest.strategies import manifest_of

SCHEMA = editor_schema()
VALIDATOR = Draft7Validator(SCHEMA)


def with_config(**config: Any) -> dict[str, Any]:
    return {
        "name": "x",
        "base_models": [{"name": "m"}],
        "training": {"dataset": {"path": "a.jsonl"}, "config": config},
    }


def faults(data: Any) -> list[str]:
    return [
        f"{list(error.absolute_path)}: {error.message}" for error in VALIDATOR.iter_errors(data)
    ]


def reads(data: Mapping[str, Any]) -> bool:
    try:
        manifest_of(data)
    except ManifestError:
        return False
    return True


def test_the_schema_is_one_of_draft_7_and_has_no_dangling_reference():
    Draft7Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "http://json-schema.org/draft-07/schema#"
    assert "$id" not in SCHEMA
    assert "$defs" not in json.dumps(SCHEMA)
    references = {value for key, value in pairs(SCHEMA) if key == "$ref"}
    assert len(references) > 10
    for reference in references:
        node: Any = SCHEMA
        for step in reference.removeprefix("#/").split("/"):
            assert step in node, reference
            node = node[step]


def pairs(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield key, value
            yield from pairs(value)
    elif isinstance(node, list):
        for value in node:
            yield from pairs(value)


@pytest.mark.skipif(not REAL_FILES, reason="the published manifests are not beside the checkout")
@pytest.mark.parametrize("path", REAL_FILES, ids=lambda path: path.stem)
def test_a_published_manifest_is_valid_before_and_after_its_upgrade(path):
    assert faults(json.loads(path.read_text("utf-8"))) == []
    assert faults(json.loads(upgrade(read_document(path))[0])) == []


@each("path", files_in("good"), ids=lambda path: path.name)
def test_a_manifest_that_is_good_to_the_reader_is_valid(path):
    assert faults(read_document(path).root.plain()) == []


def test_an_unknown_key_is_not_valid_in_the_config_and_metadata_elsewhere():
    for key in ("batchsize", "epoch", "learning_rat", "gpus"):
        (fault,) = faults(with_config(**{key: 1}))
        assert fault.startswith(f"['training', 'config']: '{key}' ")
    for key in ("lr_scheduler_kwargs", "gradient_checkpointing_kwargs"):
        assert faults(with_config(**{key: {"num_cycle": 1}})) != []
    data = {**with_config(), "made_by": {"tool": 1}}
    data["training"]["trained_on"] = "2025-11-03"
    assert faults(data) == []


@each(
    ("key", "value"),
    [
        *(("epochs", 0), ("epochs", "three"), ("rank", 257), ("bf16", "yes"), ("optim", "adam")),
        *(("betas", [0.9]), ("betas", [0.9, 1.0]), ("batch_size", 1.5), ("packing", "best")),
    ],
)
def test_a_wrong_value_is_wrong_to_the_editor_and_to_the_reader(key, value):
    assert faults(with_config(**{key: value})) != []
    assert not reads(with_config(**{key: value}))


def test_old_names_and_superseded_keys_of_the_config_are_deprecated():
    keys = SCHEMA["definitions"]["TrainingConfig"]["properties"]
    for name in [*CONFIG_ALIASES, *SPECIAL_NAMES, *LOOSE_DATASET_KEYS, *CONFIG_KEYS]:
        text = keys[name]["description"]
        is_old = text.startswith(("Superseded", "read as "))
        assert (name in CONFIG_KEYS) is not text.startswith("read as "), name
        assert keys[name].get("deprecated", False) is is_old, name
        assert keys[name].get("deprecationMessage", text) == text, name


@each(("key", "words"), [*CONFIG_VALUES.items(), *MODEL_VALUES.items()])
def test_every_other_spelling_of_a_value_is_valid(key, words):
    for word in words:
        data = with_config()
        model, config = data["base_models"][0], data["training"]["config"]
        (model if key in MODEL_VALUES else config)[key] = word
        assert faults(data) == [], word


# Things the reader takes that are in no table.
ODD = [
    {"base_model": "m", "training": {"dataset": "a.jsonl"}},
    {"base_models": ["m"], "training": {"data": "a.jsonl", "config": None}},
    {"model": "m", "data": {"file": "a.jsonl"}, "epochs": 2},
    {"model": {"n_layer": 2, "n_embd": 12, "n_head": 2, "dropout": 0.1}, "dataset": "a.txt"},
    {"slm_name": "m", "load_in_4bit": True, "use_amp": "bf16", "data_path": "a.jsonl"},
    {"base_models": [], "model_name": "m", "dataset": "a.jsonl"},
    {"model": {"name": "m", "lora_dropout": "auto", "lr": 0.1}, "dataset": "a.jsonl"},
    {**with_config(), "schema_version": 2.0, "version": 1.0},
    {**with_config(), "schema_version": None, "soft_prompts": [{"name": "p", "length": 8}]},
    {**with_config(), "load_order": 3, "requires": []},
    with_config(target_modules="q_proj, v_proj"),
    with_config(target_modules="all"),
    with_config(adapter_type="qlora"),
    with_config(report_to="none"),
    with_config(trackers=["none"]),
    with_config(early_stopping=True, evaluation_strategy="epochs"),
    with_config(early_stopping_patience=False),
    with_config(epochs=None, bf16=None, batch_size=16.0),
    with_config(dtype="bfloat16", adam_beta1=0.8, use_dora=True),
    with_config(torch_dtype="torch.bfloat16"),
    with_config(precision="BF16"),
    with_config(use_amp=False),
    with_config(quantization="nf4", val_path="b.jsonl"),
    with_config(save_strategy=False),
    {"base_model": "X", "training": {"dataset": {"train": "a.jsonl", "validation": "b.jsonl"}}},
]


@each("data", ODD, ids=[json.dumps(data)[:60] for data in ODD])
def test_what_the_reader_takes_in_no_table_is_valid_as_well(data):
    assert reads(data)
    assert faults(data) == []

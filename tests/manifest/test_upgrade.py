"""Upgrading writes the same manifest in the 2.0 layout, and nothing gets lost on the way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.core.errors import ManifestError
from expert.manifest.reader import understand
from expert.manifest.schema.config import TrainingConfig
from expert.manifest.text.document import Document, parse_document, read_document
from expert.manifest.text.write import to_json, to_yaml
from expert.manifest.upgrade import FIRST_KEYS, PERFORMANCE_KEYS, upgrade
from tests.each import each
from tests.manifest.items import as_item
from tests.manifest.reading import REAL_FILES, files_in
from tests.manifest.strategies import any_manifest, any_spelling, document_of, manifest_of
from tests.wording import wording

OLD: dict[str, Any] = {
    "version": "1.0.0",
    "name": "x",
    "capabilities": ["a"],
    "schema_version": "1.0",
    "base_model": {"name": "m", "quantization": "nf4"},
    "adapters": [{"type": "lora", "r": 8}],
    "training": {
        "dataset": {"train_file": "a.jsonl"},
        "config": {
            "num_epochs": 2,
            "_comment": "why two",
            "lr": 2e-4,
            "optimizer": "adamw",
            "torch_compile": False,
            "rank": 8,
        },
    },
    "made_by": {"tool": "t", "_comment": "which"},
}


def upgraded(data: Mapping[str, Any]) -> dict[str, Any]:
    text, _ = upgrade(document_of(data))
    result: dict[str, Any] = json.loads(text)
    return result


def upgraded_yaml(text: str) -> str:
    return upgrade(parse_document(text, "yaml"))[0]


def check_upgrade(data: Mapping[str, Any]) -> None:
    before = manifest_of(data).model_dump()
    tree = as_item(dict(data))
    for kind, text in (("json", to_json(tree)), ("yaml", to_yaml(tree))):
        first, _ = upgrade(parse_document(text, kind))  # type: ignore[arg-type]
        after = understand(parse_document(first, kind)).manifest  # type: ignore[arg-type]
        assert after.model_dump() == before, kind
        second, notices = upgrade(parse_document(first, kind))  # type: ignore[arg-type]
        assert second == first, kind
        assert [told for told in notices if told.kind == "read as"] == []


def test_the_old_layout_becomes_the_new_one_with_canonical_names_and_values():
    after = upgraded(OLD)
    assert after["schema_version"] == "2.0"
    assert after["base_models"] == [
        {"name": "m", "quantization": "int4", "adapters": [{"type": "lora", "r": 8}]}
    ]
    assert "base_model" not in after
    assert "adapters" not in after
    assert after["training"]["dataset"] == {"path": "a.jsonl"}
    config = after["training"]["config"]
    assert (config["epochs"], config["learning_rate"], config["optim"]) == (2, 2e-4, "adamw_torch")
    assert after["made_by"] == OLD["made_by"]
    assert list(after["base_models"][0]["adapters"][0]) == ["type", "r"]


def test_every_performance_key_is_written_out_as_auto_unless_the_user_set_it():
    config = upgraded(OLD)["training"]["config"]
    assert config["torch_compile"] is False
    assert config["optim"] == "adamw_torch"
    absent = [key for key in PERFORMANCE_KEYS if key not in ("torch_compile", "optim")]
    assert len(absent) == len(PERFORMANCE_KEYS) - 2
    assert {config[key] for key in absent} == {"auto"}
    assert "pretokenized_cache" not in config


def test_writing_auto_out_says_nothing_new():
    assert {TrainingConfig.model_fields[key].default for key in PERFORMANCE_KEYS} == {"auto"}


def test_the_notices_tell_what_was_renamed_and_what_was_written_out():
    _, notices = upgrade(document_of(OLD))
    texts = [str(told) for told in notices]
    assert any("num_epochs: read as training.config.epochs" in text for text in texts)
    assert texts[-1].startswith(wording("note-written-out-auto"))


def test_top_level_keys_stand_in_the_usual_order_and_the_rest_in_their_own():
    assert list(upgraded(OLD)) == [
        *("schema_version", "name", "version", "base_models", "training"),
        *("capabilities", "made_by"),
    ]
    assert tuple(key for key in FIRST_KEYS if key in upgraded(OLD)) == (
        *("schema_version", "name", "version", "base_models", "training"),
    )


def test_config_keys_keep_the_order_of_the_user_and_the_added_ones_follow():
    keys = list(upgraded(OLD)["training"]["config"])
    assert keys[:6] == ["epochs", "_comment", "learning_rate", "optim", "torch_compile", "rank"]
    added = [key for key in PERFORMANCE_KEYS if key not in ("torch_compile", "optim")]
    assert keys[6:] == ["adapter_type", *added]


def test_a_top_level_comment_key_stays_behind_the_key_it_followed():
    after = list(upgraded({"_file": "f", **OLD, "tags": [], "_tags": "t", "license": "l"}))
    assert after[0] == "_file"
    assert after[-3:] == ["tags", "_tags", "license"]


def test_doubled_comment_keys_are_all_kept():
    text = to_json(as_item({**OLD, "training": {"dataset": "a.jsonl"}}))
    text = text.replace('"name": "x"', '"_comment": "one", "_comment": "two", "name": "x"', 1)
    after = json.loads(upgrade(parse_document(text, "json"))[0])
    assert (after["_comment"], after["_comment_2"]) == ("one", "two")


def test_comment_keys_of_a_section_that_dissolves_find_a_new_home():
    data = {
        "model": {"type": "char-gpt", "n_layer": 2, "_why": "small"},
        "data": {"path": "a.txt", "_from": "web", "_comment": "new"},
        "training": {"dataset": {"_comment": "old"}},
    }
    after = upgraded(data)
    assert after["base_models"][0]["_why"] == "small"
    assert after["training"]["dataset"] == {
        "path": "a.txt",
        "_from": "web",
        "_comment": "old",
        "_comment_2": "new",
    }


def test_sections_that_only_hold_looking_for_them_do_not_appear():
    after = upgraded({"base_model": "m", "training": {"dataset": "a.jsonl"}, "name": "x"})
    assert list(after["training"]) == ["dataset", "config"]
    assert list(after) == ["schema_version", "name", "base_models", "training"]
    assert list(after["training"]["config"]) == list(PERFORMANCE_KEYS)


def test_a_config_of_null_becomes_one_with_the_performance_keys():
    data = {"base_model": "m", "training": {"dataset": "a.jsonl", "config": None}}
    assert list(upgraded(data)["training"]["config"]) == list(PERFORMANCE_KEYS)


FLAT_YAML = """\
# Reads sonnets.

# the model
model:  # its shape
  # as small as can be
  n_layer: 2
  type: char-gpt  # from scratch
# the rows
dataset: sonnets.txt  # public domain
lr: 1e-3  # high
# the type
dtype: bfloat16
use_amp: true  # on every card
training:
  # two are enough
  num_epochs: 2
license: mit  # ours
# the end
"""
UPGRADED_YAML = """\
# Reads sonnets.
# the model
schema_version: "2.0"
name: sonnets

base_models:
  - name: char-gpt  # from scratch
    # its shape
    architecture:
      # as small as can be
      layers: 2

training:
  dataset:
    # the rows
    path: sonnets.txt  # public domain
  config:
    learning_rate: 0.001  # high
    # the type
    bf16: true
    fp16: false
    # two are enough
    epochs: 2
    adapter_type: full
    use_tf32: auto
    attention: auto
    torch_compile: auto
    gradient_checkpointing: auto
    optim: auto
    packing: auto
    micro_batch_size: auto
    eval_batch_size: auto
    fused_loss: auto
    dataloader_num_workers: auto
    dataloader_prefetch_factor: auto
    dataloader_persistent_workers: auto
    dataloader_pin_memory: auto

license: mit  # ours
# on every card
# the end
"""


def test_a_flat_yaml_file_is_nested_and_keeps_every_comment():
    document = parse_document(FLAT_YAML, "yaml", source="sonnets.yaml")
    text, _ = upgrade(document)
    assert text == UPGRADED_YAML


def test_the_upgraded_yaml_stays_as_it_is():
    assert upgraded_yaml(UPGRADED_YAML) == UPGRADED_YAML


def test_a_header_stays_at_the_head_though_other_keys_come_first():
    text = upgraded_yaml("# header\nname: x\nbase_model: m\ntraining: {dataset: a.jsonl}\n")
    assert text.startswith('# header\nschema_version: "2.0"\nname: x\n')


def test_a_broken_manifest_is_not_upgraded():
    with pytest.raises(ManifestError, match=r"training\.config\.epoch.*did you mean 'epochs'"):
        upgraded({**OLD, "training": {"dataset": "a.jsonl", "config": {"epoch": 1}}})


@pytest.mark.skipif(not REAL_FILES, reason="the published manifests are not beside the checkout")
@pytest.mark.parametrize("path", REAL_FILES, ids=lambda path: path.stem)
def test_a_published_manifest_reads_the_same_after_its_upgrade(path):
    before = understand(read_document(path)).manifest
    text, _ = upgrade(read_document(path))
    after = understand(parse_document(text, "json")).manifest
    assert after.model_dump() == before.model_dump()
    assert upgrade(parse_document(text, "json"))[0] == text
    assert comment_texts(json.loads(text)) == comment_texts(json.loads(path.read_text("utf-8")))


@each("path", files_in("good"), ids=lambda path: path.name)
def test_a_good_manifest_reads_the_same_after_its_upgrade_and_stays_so(path):
    document = read_document(path)
    before = understand(read_document(path)).manifest
    text, _ = upgrade(read_document(path))
    again = parse_document(text, document.format, source=str(path), folder=path.parent)
    assert yaml_comments(again) == yaml_comments(document)
    assert understand(again).manifest.model_dump() == before.model_dump()
    assert upgrade(parse_document(text, document.format))[0] == text


def yaml_comments(document: Document) -> list[str]:
    found = [text for item in document.root.walk() for text in (*item.above, item.beside) if text]
    return sorted([*found, *document.closing_comments])


def comment_texts(data: Any) -> list[str]:
    """Everything under comment keys, in any order."""
    if isinstance(data, list):
        return sorted(text for value in data for text in comment_texts(value))
    if not isinstance(data, dict):
        return []
    found = [str(value) for key, value in data.items() if key.startswith("_")]
    return sorted([*found, *(text for value in data.values() for text in comment_texts(value))])


@given(any_manifest())
def test_any_manifest_reads_the_same_after_its_upgrade(data):
    check_upgrade(data)


@given(st.data())
def test_any_spelling_of_a_manifest_is_upgraded_to_the_same_manifest(draws):
    data = draws.draw(any_manifest())
    spelt = draws.draw(any_spelling(data))
    assert manifest_of(spelt).model_dump() == manifest_of(data).model_dump()
    check_upgrade(spelt)

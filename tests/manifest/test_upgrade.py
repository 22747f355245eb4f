"""Upgrading writes the same manifest in the 2.0 layout, and nothing gets lost on the way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.core.errors import ManifestError
from expert.manifest.reader import interpret_document
from expert.manifest.schema.config import TrainingConfig
from expert.manifest.text.document import Document, parse_document, read_document
from expert.manifest.text.write import to_json, to_yaml
from expert.manifest.upgrade import PERFORMANCE_KEYS, upgrade
from tests.each import each
from tests.manifest.items import as_item, manifest_item
from tests.manifest.reading import REAL_FILES, files_in
from tests.manifest.strategies import any_manifest, any_spelling, document_of, manifest_of
from tests.manifest.test_editor_schema import faults

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


def check_upgrade(data: Mapping[str, Any]) -> None:
    before = manifest_of(data).model_dump()
    tree = as_item(dict(data))
    for kind, text in (("json", to_json(tree)), ("yaml", to_yaml(tree))):
        first, _ = upgrade(parse_document(text, kind))  # type: ignore[arg-type]
        after = interpret_document(parse_document(first, kind)).manifest  # type: ignore[arg-type]
        assert after.model_dump() == before, kind
        second, notices = upgrade(parse_document(first, kind))  # type: ignore[arg-type]
        assert second == first, kind
        assert [told for told in notices if told.kind == "read as"] == []


def test_the_old_layout_becomes_the_new_one_with_canonical_names_and_values():
    text, notices = upgrade(document_of(OLD))
    after = json.loads(text)
    assert after["schema_version"] == "2.0"
    assert after["base_models"] == [
        {"name": "m", "quantization": "int4", "adapters": [{"type": "lora", "r": 8}]}
    ]
    assert after["training"]["dataset"] == {"path": "a.jsonl"}
    assert after["made_by"] == OLD["made_by"]
    assert list(after["base_models"][0]["adapters"][0]) == ["type", "r"]
    # Known keys in their order, then those of the user in theirs.
    assert list(after) == [
        *("schema_version", "name", "version", "base_models", "training"),
        *("capabilities", "made_by"),
    ]
    config = after["training"]["config"]
    assert (config["epochs"], config["learning_rate"], config["optim"]) == (2, 2e-4, "adamw_torch")
    # Every performance key is written out, unless the user set it: that says nothing new.
    added = [key for key in PERFORMANCE_KEYS if key not in ("torch_compile", "optim")]
    theirs = ["epochs", "_comment", "learning_rate", "optim", "torch_compile", "rank"]
    assert list(config) == [*theirs, "adapter_type", *added]
    assert config["torch_compile"] is False
    assert {config[key] for key in added} == {"auto"}
    assert {TrainingConfig.model_fields[key].default for key in PERFORMANCE_KEYS} == {"auto"}
    texts = [str(told) for told in notices]
    assert any("num_epochs: read as training.config.epochs" in text for text in texts)
    assert texts[-1].startswith("training.config: note: written out as auto: bf16, fp16, use_tf32")


def test_comment_keys_stay_behind_the_key_they_followed_and_doubled_ones_are_kept():
    after = list(upgraded({"_file": "f", **OLD, "tags": [], "_tags": "t", "license": "l"}))
    assert after[0] == "_file"
    assert after[-3:] == ["tags", "_tags", "license"]
    text = to_json(as_item({**OLD, "training": {"dataset": "a.jsonl"}}))
    text = text.replace('"name": "x"', '"_comment": "one", "_comment": "two", "name": "x"', 1)
    doubled = json.loads(upgrade(parse_document(text, "json"))[0])
    assert (doubled["_comment"], doubled["_comment_2"]) == ("one", "two")


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


def test_no_empty_sections_are_added():
    for config in ({}, {"config": None}):
        training = {"dataset": "a.jsonl", **config}
        after = upgraded({"base_model": "m", "training": training, "name": "x"})
        assert list(after["training"]) == ["dataset", "config"]
        assert list(after) == ["schema_version", "name", "base_models", "training"]
        assert list(after["training"]["config"]) == list(PERFORMANCE_KEYS)


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
    assert upgrade(document)[0] == UPGRADED_YAML
    assert upgrade(parse_document(UPGRADED_YAML, "yaml"))[0] == UPGRADED_YAML


def test_a_header_stays_at_the_head_though_other_keys_come_first():
    text = "# header\nname: x\nbase_model: m\ntraining: {dataset: a.jsonl}\n"
    after = upgrade(parse_document(text, "yaml"))[0]
    assert after.startswith('# header\nschema_version: "2.0"\nname: x\n')


def test_a_broken_manifest_is_not_upgraded():
    with pytest.raises(ManifestError, match=r"training\.config\.epoch.*did you mean 'epochs'"):
        upgraded({**OLD, "training": {"dataset": "a.jsonl", "config": {"epoch": 1}}})


@pytest.mark.skipif(not REAL_FILES, reason="the published manifests are not beside the checkout")
@pytest.mark.parametrize("path", REAL_FILES, ids=lambda path: path.stem)
def test_a_published_manifest_reads_the_same_after_its_upgrade(path):
    before = interpret_document(read_document(path)).manifest
    text, _ = upgrade(read_document(path))
    after = interpret_document(parse_document(text, "json")).manifest
    assert after.model_dump() == before.model_dump()
    assert upgrade(parse_document(text, "json"))[0] == text
    assert comment_texts(json.loads(text)) == comment_texts(json.loads(path.read_text("utf-8")))


@each("path", files_in("good"), ids=lambda path: path.name)
def test_a_good_manifest_reads_the_same_after_its_upgrade_and_stays_so(path):
    document = read_document(path)
    before = interpret_document(read_document(path)).manifest
    text, _ = upgrade(read_document(path))
    again = parse_document(text, document.format, source=str(path), folder=path.parent)
    assert yaml_comments(again) == yaml_comments(document)
    assert interpret_document(again).manifest.model_dump() == before.model_dump()
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


@given(st.data())
def test_any_manifest_in_any_spelling_is_valid_and_reads_the_same_written_or_upgraded(draws):
    data = draws.draw(any_manifest())
    spelt = draws.draw(any_spelling(data))
    manifest = manifest_of(data)
    assert manifest_of(spelt).model_dump() == manifest.model_dump()
    assert faults(data) == faults(spelt) == faults(upgraded(data)) == []
    tree = manifest_item(manifest)
    for kind, text in (("json", to_json(tree)), ("yaml", to_yaml(tree))):
        again = interpret_document(parse_document(text, kind)).manifest  # type: ignore[arg-type]
        assert again == manifest, kind
        assert again.model_dump() == manifest.model_dump(), kind
    check_upgrade(spelt)

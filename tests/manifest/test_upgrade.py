"""Upgrading writes the same manifest in the 2.0 layout as plain JSON or YAML."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from expert.core.errors import ManifestError
from expert.jobs.manifest import PERFORMANCE_KEYS, upgrade
from expert.manifest.reader import interpret_document
from expert.manifest.schema.config import TrainingConfig
from expert.manifest.text.document import Format, parse_document, read_document
from expert.manifest.text.yaml_text import parse_yaml, to_yaml
from tests.each import each
from tests.manifest.reading import REAL_FILES, files_in
from tests.manifest.strategies import TREES, any_manifest, document_of, manifest_of

OLD: dict[str, Any] = {
    "version": "1.0.0",
    "name": "x",
    "capabilities": ["a"],
    "schema_version": "1.0",
    "base_model": {"name": "m", "quantization": "nf4"},
    "adapters": [{"type": "lora", "r": 8}],
    "training": {
        "dataset": {"train_file": "a.jsonl"},
        "config": {"num_epochs": 2, "_comment": "not kept", "lr": 2e-4, "torch_compile": False},
    },
    "made_by": {"tool": "t"},
}


def test_the_old_layout_becomes_the_new_one_with_canonical_names_and_values():
    text, notices = upgrade(document_of(OLD))
    after = json.loads(text)
    assert list(after) == [
        *("schema_version", "name", "version", "base_models", "training"),
        *("capabilities", "made_by"),
    ]
    assert after["schema_version"] == "2.0"
    assert after["base_models"] == [
        {"name": "m", "quantization": "int4", "adapters": [{"type": "lora", "r": 8}]}
    ]
    assert after["training"]["dataset"] == {"path": "a.jsonl"}
    config = after["training"]["config"]
    assert (config["epochs"], config["learning_rate"], config["torch_compile"]) == (2, 2e-4, False)
    assert "_comment" not in config
    # Every performance key is written out, unless the user set it.
    added = [key for key in PERFORMANCE_KEYS if key != "torch_compile"]
    assert {config[key] for key in added} == {"auto"}
    assert {TrainingConfig.model_fields[key].default for key in PERFORMANCE_KEYS} == {"auto"}
    texts = [str(notice) for notice in notices]
    assert any("num_epochs: read as training.config.epochs" in text for text in texts)
    assert "written out as auto: bf16, fp16" in texts[-1]


def test_a_flat_yaml_file_is_nested_and_a_broken_one_refused():
    flat = "model: {n_layer: 2, type: char-gpt}  # small\ndataset: sonnets.txt\nlr: 1e-3\n"
    after = yaml.safe_load(upgrade(parse_document(flat, "yaml", source="sonnets.yaml"))[0])
    assert list(after) == ["schema_version", "name", "base_models", "training"]
    assert after["base_models"] == [{"name": "char-gpt", "architecture": {"layers": 2}}]
    assert after["training"]["config"]["learning_rate"] == 1e-3
    with pytest.raises(ManifestError, match=r"training\.config\.epoch.*did you mean 'epochs'"):
        upgrade(document_of({**OLD, "training": {"dataset": "a", "config": {"epoch": 1}}}))


@each("path", [*files_in("good"), *REAL_FILES], ids=lambda path: path.name)
def test_a_manifest_reads_the_same_after_its_upgrade_and_stays_so(path):
    document = read_document(path)
    before = interpret_document(read_document(path)).manifest
    text, _ = upgrade(read_document(path))
    again = parse_document(text, document.format, source=str(path), folder=path.parent)
    assert interpret_document(again).manifest.model_dump() == before.model_dump()
    assert upgrade(parse_document(text, document.format))[0] == text


@given(TREES)
def test_yaml_is_written_so_that_it_and_every_other_reader_reads_the_same(tree):
    text = to_yaml({"a": tree})
    assert parse_yaml(text, "m.yaml")[0].plain() == {"a": tree}
    assert yaml.safe_load(text) == {"a": tree}


@given(any_manifest(), st.sampled_from(["json", "yaml"]))
def test_any_manifest_reads_the_same_upgraded(data: dict[str, Any], kind: Format):
    text = json.dumps(data) if kind == "json" else to_yaml(data)
    first, _ = upgrade(parse_document(text, kind))
    again = interpret_document(parse_document(first, kind)).manifest
    assert again.model_dump() == manifest_of(data).model_dump()
    second, notices = upgrade(parse_document(first, kind))
    assert second == first
    assert [notice for notice in notices if notice.kind == "read as"] == []

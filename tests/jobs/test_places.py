"""What a manifest names and is not there is told before anything is made or fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

from expert.jobs.places import doubts_about
from expert.manifest.reader import read_manifest

NOWHERE = {"EXPERT_HOME": "/nowhere", "HF_HOME": "/nowhere"}


def written(folder: Path, text: str) -> Path:
    path = folder / "manifest.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def doubts(folder: Path, text: str) -> list[tuple[str, str]]:
    found = doubts_about(read_manifest(written(folder, text)), environ=NOWHERE)
    return [(doubt.path, doubt.text) for doubt in found]


def test_misspelt_models_and_rows_are_all_told_with_what_was_meant(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    folder = tmp_path / "models" / "support-base"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    models = "base_models: [tinny, suport-base, Qwen3-0.6b-bse, own/weights]\n"
    rows = "training: {dataset: {path: row.jsonl, test_path: elsewhere.jsonl}}\n"
    gone = "is not on this machine, and is no model that is known by name"
    assert doubts(tmp_path, models + rows) == [
        ("base_models[0].name", f"tinny: {gone}  (did you mean 'tiny'?)"),
        ("base_models[1].name", f"suport-base: {gone}  (did you mean 'support-base'?)"),
        ("base_models[2].name", f"Qwen3-0.6b-bse: {gone}  (did you mean 'Qwen3-0.6B-Base'?)"),
        (
            "training.dataset.path",
            f"row.jsonl: there is no {tmp_path / 'row.jsonl'}  (did you mean 'rows.jsonl'?)",
        ),
        (
            "training.dataset.test_path",
            f"elsewhere.jsonl: there is no {tmp_path / 'elsewhere.jsonl'}  "
            "(check training.dataset.path)",
        ),
    ]


@pytest.mark.parametrize("model", ["tiny", "Qwen/Qwen3-0.6B", "Qwen3-0.6B", "owner/new-model"])
@pytest.mark.parametrize("rows", ["rows.jsonl", "shakespeare", "owner/rows"])
def test_what_is_there_or_may_be_on_the_hub_raises_no_doubt(tmp_path, model, rows):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    assert doubts(tmp_path, f"base_model: {model}\ndataset: {rows}\n") == []

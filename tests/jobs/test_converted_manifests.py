"""Files that people bring from other trainers, as far as the rows and the steps of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from expert.jobs.manifest import check_manifests
from expert.run.open import open_run
from tests.jobs.runs import ROWS, base_model, write_expert


def opened(file: Path) -> tuple[Any, Any]:
    found = open_run(file)
    return found.plan, found.data


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_a_step_of_so_many_tokens_has_them_whatever_was_known_before(tmp_path, suffix):
    """Lines of .json rows cannot be counted: the first plan knows nothing of their lengths."""
    base = base_model()
    config = {"batch_size": "auto", "batch_tokens": 128}
    file = write_expert(tmp_path, base, config, dataset={"path": f"rows.{suffix}"})
    text = "\n".join(map(json.dumps, ROWS)) if suffix == "jsonl" else json.dumps(ROWS)
    (tmp_path / f"rows.{suffix}").write_text(text, encoding="utf-8")
    plan, data = opened(file)
    index = data.train.index
    tokens = index.statistics().tokens / index.bins * plan.batch.sequences_per_update
    assert tokens == pytest.approx(128, rel=0.15)  # whole sequences hold whole rows
    assert plan.batch.examples_per_update > 128 / 64


def test_the_rows_of_a_list_of_data_sets_are_the_rows_of_the_run(tmp_path):
    rows = [{"ask": f"say {n}", "reply": f"it is {n}", "output": "wrong"} for n in range(20)]
    (tmp_path / "talk.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "run.yaml").write_text(
        f"base_model: {base_model()}\nadapter: lora\nsequence_len: 64\nval_set_size: 0.1\n"
        "datasets: [{path: talk.json, field_instruction: ask, field_output: reply}]\n"
        "micro_batch_size: 4\nnum_epochs: 1\nchat_template: chatml\nreport_to: none\n",
        encoding="utf-8",
    )
    plan, made = opened(tmp_path / "run.yaml")
    assert made.train.index.examples == 18  # of 20, a tenth held out
    assert plan.batch.examples_per_update == 4


def test_prepared_tokens_go_into_the_folder_that_windows_named(tmp_path):
    base = base_model()
    cache = "datasets_optimized\\demo\\tokenized"
    opened(write_expert(tmp_path, base, {"pretokenized_cache": cache}))
    assert (tmp_path / "datasets_optimized" / "demo" / "tokenized").is_dir()
    assert not list(tmp_path.glob("*\\*"))


def test_a_manifest_of_a_model_that_reads_images_fails_the_check(tmp_path):
    folder = tmp_path / "models" / "mine"
    folder.mkdir(parents=True)
    config = {"architectures": ["LlavaForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    file = write_expert(tmp_path, "mine", {})
    (checked,) = check_manifests([file])
    assert checked.error is not None
    assert "base_models[0].name" in str(checked.error)
    assert "(LlavaForConditionalGeneration) is a model for images" in str(checked.error)

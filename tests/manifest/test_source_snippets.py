"""The configurations and the commands of the five source documents, written anew: each file is read
as its document means it, and what takes the place of each script runs.

Their single settings are lines of docs/COMING_FROM.md, which tests/test_coming_from.py reads.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.running import EXAMPLES, Runner
from tests.each import each
from tests.manifest.reading import error_of
from tests.wording import wording

# What a manifest of the first two documents has under training.config.
OPTIMISED = {
    "batch_size": 16,
    "gradient_accumulation_steps": 4,
    "max_seq_length": 2048,
    "dataloader_num_workers": 8,
    "dataloader_prefetch_factor": 8,
    "dataloader_persistent_workers": True,
    "fp16": False,
    "bf16": True,
    "use_tf32": True,
    "use_sdpa": True,
    "optim": "adamw_torch_fused",
    "group_by_length": True,
    "gradient_checkpointing": False,
    "pretokenized_cache": "datasets_optimized/expert-json/tokenized",
}


# --- the commands --------------------------------------------------------------------------------

# The scripts of the documents, and what is run in their place.
COMMANDS = {
    "expert/cli/scripts/find_datasets.py": "find-datasets",
    "expert/cli/scripts/pretokenize_datasets.py": "pretokenize --manifest",
    "python cli/clear_cuda_cache.py": "clear-cuda-cache",
    "expert-cli train --manifest": "train --dry-run --set max_steps=10 --manifest",
    "expert/cli/scripts/benchmark_training.py": "benchmark --help",
    "tests/test_expert.py": "validate --help",
    "python train.py --dataset shakespeare": "train --dry-run --dataset shakespeare",
    "python diagnose_training.py": "diagnose --no-kernels --manifest",
    "watch -n 1 nvidia-smi": "watch --help",
    "load_base_model, setup_trainer of expert_trainer.py": "plan --manifest",
}
"""The scripts of the documents, and what is run in their place."""


@pytest.fixture
def expert_json(tmp_path: Path) -> Path:
    """A folder expert-json with a manifest, as the documents have it."""
    folder = tmp_path / "expert-json"
    folder.mkdir()
    rows = [{"instruction": f"say {n}", "response": json.dumps({"n": n})} for n in range(24)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = {**OPTIMISED, "max_seq_length": 64, "bf16": "auto", "device": "cpu"}
    training = {"dataset": {"path": "train.jsonl"}, "config": config}
    data = {"name": "expert-json", "base_model": {"name": "tiny"}, "training": training}
    (folder / "manifest.json").write_text(json.dumps(data), encoding="utf-8")
    return folder / "manifest.json"


@each(("script", "command"), COMMANDS.items())
def test_what_takes_the_place_of_a_script_runs_and_is_in_the_document(
    script, command, expert_json, capsys, monkeypatch
):
    text = (EXAMPLES.parent / "docs" / "COMING_FROM.md").read_text(encoding="utf-8")
    name = script.split("/")[-1].split(" --")[0].removeprefix("python ")
    assert name.split(" of ")[-1] in text, script
    assert f"expert {command.split()[0]}" in text
    monkeypatch.chdir(expert_json.parent.parent)
    monkeypatch.setenv("HF_HOME", str(expert_json.parent / "hub"))
    manifest = ["expert-json/manifest.json"] if command.endswith("--manifest") else []
    ran = Runner(capsys, monkeypatch)(*command.split(), *manifest)
    assert ran.code == 0, ran.err


def test_a_class_instead_of_its_lines_is_refused_with_what_to_keep():
    text = "from dataclasses import dataclass\n\n@dataclass\nclass Config:\n    epochs: int = 3\n"
    assert wording("keep-name-type-value") in error_of(text)

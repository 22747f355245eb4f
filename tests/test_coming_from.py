"""Every line of the tables in docs/COMING_FROM.md is read as documented."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from expert.core.errors import ManifestError
from expert.manifest.peers.keys import CONVERTED
from expert.manifest.peers.sections import SECTIONS
from expert.manifest.peers.unused import ANSWERS, FAMILIES
from expert.manifest.reader import ReadManifest
from tests.command_blocks import ROOT
from tests.each import each
from tests.manifest.reading import read
from tests.test_generated_documents import drawing

FILE = ROOT / "docs" / "COMING_FROM.md"
TEXT = FILE.read_text(encoding="utf-8")
MODELS = {"base_model", "model_name", "model_name_or_path", "slm_name", "checkpoint_dir", "model"}
ROWS = {"dataset", "datasets", "dataset_name", "dataset_mixture", "pretraining_dataset"}
# Keys that identify a file of a trainer where the line alone does not.
CONTEXT: dict[str, dict[str, Any]] = {
    "Axolotl": {"sequence_len": 64, "val_set_size": 0.1, "adapter": "lora", "learning_rate": 1e-4},
    "LLaMA-Factory": {"finetuning_type": "lora", "cutoff_len": 64},
    "torchtune": {"model": {"_component_": "torchtune.models.qwen2.lora_qwen2_0_5b"}},
}
KINDS = {"not used": {"not used here"}, "warned": {"warning"}, "noted": {"note", "read as"}}


def lines() -> list[tuple[str, str, str]]:
    """Trainer, what is written there, and how it is read here."""
    found, trainer, wanted = [], "", False
    for line in TEXT.partition("## Every name")[0].splitlines():
        if line.startswith("## "):
            trainer = line[3:]
        if not line.startswith("|"):
            wanted = False
        elif line.startswith("| there | here | what differs |"):
            wanted = True
        elif wanted and not line.startswith("|--"):
            there, here, *_ = (cell.strip() for cell in line.strip("|").split(" | "))
            found.append((trainer, there.strip("`").strip("'"), here))
    return found


def written(trainer: str, snippet: str) -> tuple[str, list[str]]:
    """A complete file around the line, and the keys of the line."""
    said = yaml.safe_load(snippet)
    if not snippet.startswith("{"):
        said = {snippet.partition(":")[0]: None}
    keys = list(said)
    context: dict[str, Any] = dict(CONTEXT.get(trainer, {}))
    if not MODELS & set(keys):
        context["base_model"] = "tiny"
    if not ROWS & set(keys):
        context["dataset"] = "rows.jsonl"
    before = {key: value for key, value in context.items() if key not in said}
    text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in before.items())
    if snippet.startswith("{"):
        return text + "".join(f"{key}: {json.dumps(v)}\n" for key, v in said.items()), keys
    return text + snippet + "\n", keys


def value_at(made: ReadManifest, path: str) -> tuple[bool, Any]:
    """Whether a key was set, and to what."""
    found: Any = made.manifest
    given = True
    for step in path.replace("[0]", ".0").split("."):
        if step == "0":
            found = found[0]
            continue
        assert isinstance(found, BaseModel)
        given = step in found.model_fields_set
        found = getattr(found, step)
    return given, found


def test_every_trainer_has_a_table():
    trainers = {trainer for trainer, _, _ in lines()}
    assert trainers == {
        *("Axolotl", "LLaMA-Factory", "TRL and Transformers", "Unsloth", "torchtune"),
        "Scripts and settings of the tuning guides",
    }
    assert len(lines()) > 130


@each(("trainer", "there", "here"), lines())
def test_a_line_is_read_as_the_document_says(trainer, there, here):
    text, keys = written(trainer, there)
    if here == "refused":
        with pytest.raises(ManifestError) as caught:
            read(text)
        paths = [problem.path for problem in caught.value.problems]
        assert any(path.split(".")[0].split("[")[0] in keys for path in paths), paths
        assert "unknown key" not in str(caught.value)
        return
    made = read(text)
    own = [n for n in made.notices if n.path.split(".")[0].split("[")[0] in keys]
    if here == "already so":
        assert own == []
    elif here in KINDS:
        assert {n.kind for n in own} & KINDS[here], own
    else:
        path, colon, value = here.strip("`").partition(": ")
        given, found = value_at(made, path)
        assert given or found not in (None, [], {}), path
        if colon:
            wanted = yaml.safe_load(value)
            assert found == wanted or str(found) == str(wanted)


def test_the_tables_of_names_are_what_the_code_has():
    made = drawing("draw_coming_from").document(TEXT)
    assert made == TEXT, "run .venv/bin/python docs/draw_coming_from.py"


def test_every_name_that_is_answered_is_in_the_document():
    told = set(re.findall(r"`([\w*]+)`", TEXT.partition("## Every name")[2]))
    missing = {*ANSWERS, *CONVERTED, *SECTIONS, *(f"{start}*" for start in FAMILIES)} - told
    assert missing == set()


COMMANDS = {
    "expert/cli/scripts/find_datasets.py": "find-datasets",
    "expert/cli/scripts/pretokenize_datasets.py": "pretokenize",
    "python cli/clear_cuda_cache.py": "clear-cuda-cache",
    "expert-cli train --manifest": "train",
    "expert/cli/scripts/benchmark_training.py": "benchmark",
    "tests/test_expert.py": "validate",
    "python train.py --dataset shakespeare": "train",
    "python diagnose_training.py": "diagnose",
    "watch -n 1 nvidia-smi": "watch",
    "load_base_model, setup_trainer of expert_trainer.py": "plan",
}
"""Scripts of the documents, and the command that replaces each."""


@each(("script", "command"), COMMANDS.items())
def test_what_takes_the_place_of_a_script_is_in_the_document(script, command):
    name = script.split("/")[-1].split(" --")[0].removeprefix("python ")
    assert name.split(" of ")[-1] in TEXT, script
    assert f"expert {command}" in TEXT

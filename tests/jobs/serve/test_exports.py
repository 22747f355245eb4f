"""Exported folders are served with the answers of their run, after the same checks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from expert.core.errors import Damaged, ExpertError
from expert.core.publish import publishing
from expert.jobs.export.export import export
from expert.jobs.sample.sample import sample
from expert.jobs.serve.models import load_models
from tests.core.test_publish import in_hub_cache
from tests.jobs.runs import base_model
from tests.jobs.serve.served import served
from tests.jobs.trained_runs import exported, finished, finished_characters
from tests.model.models import tiny_model

PROMPT = "say red 1"


@pytest.fixture(autouse=True)
def base_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """An export names its base without a path: it is searched for in the models folder."""
    monkeypatch.setenv("EXPERT_MODELS", str(base_model(2).parent))


def changed(folder: Path, to: Path, name: str, content: bytes) -> Path:
    """A changed export whose hashes were updated to match."""
    with publishing(to) as made:
        shutil.copytree(folder, made, dirs_exist_ok=True)
        (made / "DONE").unlink()
        (made / name).write_bytes(content)
    return to


def test_an_adapter_and_a_merged_folder_answer_as_their_run_does(tmp_path):
    merged = tmp_path / "moved"
    shutil.copytree(exported("lora", "merged").folder, merged)
    (merged / ".gitattributes").write_text("x")  # added by the hub
    (alone,) = sample(finished("lora"), [PROMPT], device="cpu").samples
    cached = in_hub_cache(tmp_path, exported("lora").folder)
    places = [f"adapter={cached}", f"dora={exported('dora').folder}", f"merged={merged}"]
    with served(*places) as here:
        asked: Any = [{"role": "user", "content": PROMPT}]
        found = {
            model.name: here.client.chat.completions.create(model=model.name, messages=asked)
            for model in here.engine.models.values()
        }
    texts = {name: one.choices[0].message.content for name, one in found.items()}
    (dora,) = sample(finished("dora"), [PROMPT], device="cpu").samples
    assert texts == {"adapter": alone.text, "merged": alone.text, "dora": dora.text}
    models = here.engine.models
    weights = [models[name].trained.loaded.causal_lm.get_input_embeddings().weight.data_ptr()
               for name in ("adapter", "dora")]  # fmt: skip
    assert weights[0] == weights[1]  # one base in memory


def test_a_base_is_served_beside_an_adapter_and_not_beside_merged_weights():
    (own, base) = load_models([str(exported("lora").folder)], device="cpu", with_base=True)
    assert (own.name, base.name) == ("demo", "base")
    with pytest.raises(ExpertError, match="is merged and has no base"):
        load_models([str(exported("lora", "merged").folder)], device="cpu", with_base=True)


def test_a_damaged_export_or_run_and_another_base_of_the_same_name_are_refused(
    tmp_path, monkeypatch
):
    for name, folder, place in (
        ("x", exported("lora").folder, ""),
        ("y", finished("lora"), "final"),
    ):
        shutil.copytree(folder, tmp_path / name)
        weights = tmp_path / name / place / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
        with pytest.raises(Damaged, match=r"adapter_model\.safetensors"):
            load_models([str(tmp_path / name)], device="cpu")
    tiny_model(tmp_path / "qwen3", num_hidden_layers=2, seed=7)
    monkeypatch.setenv("EXPERT_MODELS", str(tmp_path))
    with pytest.raises(ExpertError, match="its weights are not those"):
        load_models([str(exported("lora").folder)], device="cpu")


def test_unsupported_exports_are_refused(tmp_path):
    characters = tmp_path / "characters"
    export(finished_characters(), characters, device="cpu")
    gguf = changed(exported("lora", "merged").folder, tmp_path / "gguf", "x.gguf", b"")
    for folder, more, words in (
        (characters, {}, "the character model has no conversations to answer"),
        (gguf, {}, r"is a GGUF file  \(llama-server"),
        (exported("lora+soft").folder, {}, "soft prompts of exports are not served"),
        (exported("lora").folder, {"checkpoint": "final"}, "is an export, without checkpoints"),
    ):
        with pytest.raises(ExpertError, match=words):
            load_models([str(folder)], device="cpu", **more)

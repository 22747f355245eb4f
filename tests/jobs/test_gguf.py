"""Experts as GGUF files: their contents, what is refused, and the measured quality."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import jinja2
import numpy as np
import pytest
import torch

from expert.cli.export import exported_lines
from expert.core.errors import ExpertError
from expert.core.publish import damage
from expert.core.rundir import RunFolder
from expert.data.records import Turn
from expert.data.template.chat_template import ChatTemplate
from expert.data.template.templates import LAYOUTS, named_template
from expert.jobs.export.as_gguf import write_adapter
from expert.jobs.export.card import model_card
from expert.jobs.export.chat_format import FormatTexts, fixed_texts_of, go_template, jinja_of
from expert.jobs.export.export import export
from expert.jobs.export.exported import Exported
from expert.jobs.export.gguf_file.architecture import family_of
from expert.jobs.export.gguf_file.file import FILE_TYPES, GgufMetadata, tensor_type
from expert.jobs.export.gguf_file.k_quants import K_TYPES, k_quantised
from expert.run.stored.load import read_plan
from tests.data.tokenizers import tokenizer_json
from tests.each import each
from tests.jobs.gguf_models import small_tokenizer
from tests.jobs.runs import base_model, place, run, write_expert
from tests.jobs.test_model_card import held_to_the_run
from tests.jobs.trained_runs import exported, finished, finished_characters, with_plan
from tests.model.models import family_config


def exported_to(run_folder: Path, to: Path, **more: Any) -> Exported:
    return export(run_folder, to, device="cpu", **more)


@cache
def as_q8() -> Exported:
    """An export that several tests only read."""
    return exported_to(finished("lora"), place() / "exported q8", gguf="q8_0")


# --- tensors -------------------------------------------------------------------------------------


@each("kind, most", [("Q4_K", 0.09), ("Q5_K", 0.045), ("Q6_K", 0.022)])
def test_k_types_are_read_back_by_the_gguf_package_near_to_what_they_were(kind, most):
    """The error on normal values is 7.1 % of their root mean square with 4 bits, 3.6 % with 5,
    1.8 % with 6."""
    values = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    back = gguf.dequantize(k_quantised(values, kind), gguf.GGMLQuantizationType[kind])
    assert back.shape == values.shape
    assert float((torch.from_numpy(back) - values).square().mean().sqrt()) < most


@each("kind", K_TYPES)
def test_blocks_of_nothing_of_one_value_and_with_one_large_value_stay_what_they_are(kind):
    rows = torch.zeros(5, 256)
    rows[1], rows[2], rows[3, 17], rows[4, ::2] = 0.25, -0.25, 1e4, 3e-3
    back = gguf.dequantize(k_quantised(rows, kind), gguf.GGMLQuantizationType[kind])
    assert np.isfinite(back).all()
    assert np.abs(back - rows.numpy()).max() <= 2e-3 * 1e4
    assert np.abs(back[[0, 1, 2, 4]] - rows.numpy()[[0, 1, 2, 4]]).max() < 2e-3


@each(
    "name, shape, file, expected",
    [
        ("blk.0.attn_norm.weight", (256,), "q4_k_m", "F32"),
        ("blk.0.attn_q.weight", (256, 256), "q4_k_m", "Q4_K"),
        ("blk.2.attn_v.weight", (256, 256), "q4_k_m", "Q6_K"),
        ("blk.0.ffn_down.weight", (256, 512), "q4_k_s", "Q4_K"),
        ("blk.0.attn_v.weight", (256, 256), "q4_k_s", "Q5_K"),
        ("output.weight", (400, 256), "q4_k_m", "Q6_K"),
        ("output.weight", (400, 576), "q4_k_m", "Q8_0"),
        ("token_embd.weight", (400, 256), "q5_k_m", "Q6_K"),
        ("blk.0.attn_q.weight", (256, 576), "q4_k_m", "Q5_0"),
        ("blk.0.attn_q.weight", (256, 48), "q8_0", "F16"),
        ("rope_freqs.weight", (16,), "f16", "F32"),
        ("blk.0.attn_q.weight", (256, 48), "bf16", "BF16"),
    ],
)
def test_each_tensor_has_the_type_of_llama_cpps_mix(name, shape, file, expected):
    assert tensor_type(name, shape, file, layers=4, tied=True) == expected


# --- conversations -------------------------------------------------------------------------------


def conversations() -> list[list[Turn]]:
    asked = [Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c")]
    return [asked[:1], asked, [Turn("system", "s"), *asked]]


@each("name", LAYOUTS)
def test_a_layout_as_a_chat_template_writes_what_training_writes(name):
    template = named_template(name, eos="</s>", bos="<s>")
    written = jinja2.Environment().from_string(jinja_of(template))
    pieces = fixed_texts_of(template)
    assert isinstance(pieces, FormatTexts)
    for turns in conversations():
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        expected = template.prompt(turns)
        assert written.render(messages=messages, add_generation_prompt=True) == expected
        said = [turn.text for turn in turns if turn.role != "system"]
        assert pieces.written("s" if len(said) < len(turns) else "", said) == expected


def test_pieces_are_quoted_so_that_nothing_ends_early_and_a_template_that_does_more_is_left():
    text = go_template(FormatTexts('"""{{', ("", "`\\"), "\n", "é", ""))
    assert '"""' not in text
    assert "\\u0022\\u0022\\u0022{{" in text
    assert "\\n" in text
    odd = ChatTemplate(
        "{% for m in messages %}{{ m.content|length }}:{{ m.content }}<e>{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}",
        bos="",
        eos="<e>",
    )
    assert "does more than put fixed text between messages" in str(fixed_texts_of(odd))


def test_a_token_that_stands_before_every_text_is_in_the_template_and_in_the_cards_code(tmp_path):
    from transformers import AutoTokenizer

    base = tmp_path / "base"
    shutil.copytree(base_model(), base)
    (base / "tokenizer.json").write_text(tokenizer_json(adds_bos=True), encoding="utf-8")
    settings = {"eos_token": "<|im_end|>", "bos_token": "<s>"}
    (base / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    config = {"epochs": 12, "learning_rate": 5e-2, "load_best_model_at_end": False}
    folder = run(write_expert(tmp_path / "expert", base, config)).folder
    exported_to(folder, tmp_path / "out", kind="merged")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text.startswith("<s><|im_start|>user")
    held_to_the_run("say red 1", (folder, tmp_path / "out"))
    exported_to(folder, tmp_path / "file", gguf="f16", judged_rows=0)
    fields = gguf.GGUFReader(tmp_path / "file" / "demo-f16.gguf").fields
    assert fields["tokenizer.ggml.add_bos_token"].contents() is True
    assert not fields["tokenizer.chat_template"].contents().startswith('{{ "<s>')


# --- exports -------------------------------------------------------------------------------------


def test_a_gguf_export_is_whole_with_tokenizer_template_settings_and_those_of_ollama():
    names = {path.name for path in as_q8().folder.iterdir()}
    assert names == {"DONE", "Modelfile", "README.md", "demo-q8_0.gguf", "export.json"}
    assert damage(as_q8().folder) == ""
    reader = gguf.GGUFReader(as_q8().folder / as_q8().file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "qwen3"
    assert fields["tokenizer.ggml.model"] == "gpt2"
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert len(fields["tokenizer.ggml.tokens"]) == 400
    assert fields["tokenizer.ggml.eos_token_id"] == 2
    assert fields["tokenizer.ggml.add_bos_token"] is False
    assert "<|im_start|>assistant" in fields["tokenizer.chat_template"]
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"F32", "Q8_0"}
    text = (as_q8().folder / "Modelfile").read_text(encoding="utf-8")
    assert text.startswith("FROM ./demo-q8_0.gguf\n")
    assert 'TEMPLATE """{{ if .System }}' in text
    for setting in ('stop "<|im_end|>"', "temperature 0", "num_ctx 256", "repeat_penalty 1"):
        assert f"PARAMETER {setting}\n" in text


def test_what_rounding_costs_is_printed_recorded_and_in_the_card():
    done = as_q8()
    assert done.quality.rows == 5
    before, after = done.quality.loss
    assert before != after == pytest.approx(before, abs=0.1)
    record = json.loads((done.folder / "export.json").read_text(encoding="utf-8"))
    assert record["quality"]["loss"] == [before, after]
    assert record["type"] == "q8_0"
    assert str(done.run) not in json.dumps(record)
    words = f"loss {after:.4f} instead of {before:.4f}, token accuracy "
    assert any(words in text for text, _ in exported_lines(done))
    card = (done.folder / "README.md").read_text(encoding="utf-8")
    assert f"What q8_0 costs: {words}" in card.replace("\\", "")
    assert "ollama create demo -f Modelfile" in card
    assert "llama-server -m demo-q8_0.gguf --jinja" in card
    assert "\nlibrary_name: gguf\n" in card


def test_whole_weights_are_written_as_the_run_computed_with_them(tmp_path):
    """Weights are saved in float32 and were rounded in every step."""
    run = with_plan(finished("full"), tmp_path / "run", kernels={"precision": "bf16"})
    done = exported_to(run, tmp_path / "out", gguf="bf16", judged_rows=0)
    assert done.largest_difference == 0


def test_an_adapter_alone_adds_up_to_the_expert(tmp_path):
    done = exported_to(finished("lora"), tmp_path / "out", gguf_adapter=True)
    assert done.share < 1e-4
    reader = gguf.GGUFReader(tmp_path / "out" / "demo-lora.gguf")
    assert reader.fields["adapter.type"].contents() == "lora"
    names = {tensor.name for tensor in reader.tensors}
    assert {"blk.0.attn_q.weight.lora_a", "blk.1.ffn_down.weight.lora_b"} <= names
    text = (tmp_path / "out" / "Modelfile").read_text(encoding="utf-8")
    assert "ADAPTER ./demo-lora.gguf\n" in text
    copy = shutil.copytree(finished("lora") / "final", tmp_path / "copy")
    settings = json.loads((copy / "adapter_config.json").read_text(encoding="utf-8"))
    (copy / "adapter_config.json").write_text(json.dumps({**settings, "use_rslora": True}))
    config = family_config("qwen3")
    with pytest.raises(ExpertError, match="cannot load use_rslora"):
        write_adapter(tmp_path / "x", copy, config, family_of(config), GgufMetadata("x"))


def test_weights_that_are_written_wrong_are_refused_and_nothing_is_left(tmp_path, monkeypatch):
    from expert.jobs.export.gguf_file import file

    zeros = lambda tensor, kind: np.zeros(tensor.shape, np.float32)  # noqa: E731
    monkeypatch.setattr(file, "rounded", zeros)
    with pytest.raises(ExpertError, match="the export differs from the trained model"):
        exported_to(finished("lora"), tmp_path / "out", gguf="f32", judged_rows=0)
    assert list(tmp_path.iterdir()) == []


# --- what is refused -----------------------------------------------------------------------------


@each(
    ("kind", "flags", "text"),
    [
        ("lora", {"gguf": "q3_k_m"}, "this type is not supported"),
        ("lora", {"gguf": "f16", "dtype": "bf16"}, "--dtype cannot be combined with it"),
        ("soft", {"gguf": "f16"}, "llama.cpp does not support soft prompts"),
        ("lora+soft", {"gguf": "f16"}, "llama.cpp does not support soft prompts"),
        ("dora", {"gguf_adapter": True}, "llama.cpp supports LoRA only, not dora"),
        ("full", {"gguf_adapter": True}, "all weights were trained, there is no adapter"),
        ("lora+soft", {"gguf_adapter": True}, "llama.cpp does not support soft prompts"),
        ("whole", {"gguf_adapter": True}, "embedding and head are trained whole, which it cannot"),
        ("characters", {"gguf": "f16"}, "llama.cpp does not support the character model"),
    ],
)
def test_what_llama_cpp_cannot_have_is_refused_before_anything_is_loaded(
    kind, flags, text, tmp_path, monkeypatch
):
    run_folder = finished_characters() if kind == "characters" else finished(kind)
    monkeypatch.setattr("expert.jobs.export.export.load_trained", None)
    with pytest.raises(ExpertError, match=text) as refused:
        exported_to(run_folder, tmp_path / "out", **flags)
    if flags.get("gguf") == "q3_k_m":
        assert all(name in str(refused.value) for name in FILE_TYPES)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused_with_all_reasons():
    with pytest.raises(ExpertError, match=r"is not supported  \(supported: "):
        family_of(family_config("gpt2"))
    odd = family_config("gemma2", query_pre_attn_scalar=5, tie_word_embeddings=False)
    with pytest.raises(ExpertError) as refused:
        family_of(odd)
    assert "query_pre_attn_scalar" in str(refused.value)
    assert "its head is not tied to its embedding" in str(refused.value)


def test_a_tokenizer_that_cuts_text_in_an_unknown_way_is_refused():
    from tokenizers import pre_tokenizers

    from expert.data.tokens.encoder import SpecialTokens, TextEncoder
    from expert.jobs.export.gguf_file.vocabulary import vocabulary

    tokenizer, _ = small_tokenizer("bytes")
    tokenizer = type(tokenizer).from_str(tokenizer.to_str())
    steps = [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    encoder = TextEncoder(
        lambda: tokenizer, SpecialTokens("", "", None), template_adds_bos=False, fingerprint=""
    )
    template = named_template("chatml", eos="<|im_end|>")
    with pytest.raises(ExpertError, match=r"llama.cpp does not support this pre-tokenizer"):
        vocabulary(encoder, template, rows=400, ends=[2], chat_template="")


# --- vLLM ----------------------------------------------------------------------------------------


def test_whole_models_have_the_command_of_vllm_unless_it_cannot_load_them():
    plan = read_plan(RunFolder(finished("lora")))
    merged, command = exported("lora", "merged"), "vllm serve PATH/TO/THIS/FOLDER --dtype float32"
    assert command in (merged.folder / "README.md").read_text(encoding="utf-8")
    assert "vllm" not in (exported("lora").folder / "README.md").read_text(encoding="utf-8")
    adapter = plan.adapter.model_copy(update={"soft_prompts": [{"name": "a"}]})
    assert "vllm" not in model_card(plan.model_copy(update={"adapter": adapter}), merged)

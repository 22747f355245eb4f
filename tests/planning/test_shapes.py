"""A config.json gives the published parameter count, or an error with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from expert.planning.models.shapes import UnknownShape, shape_from_config
from tests.each import each
from tests.planning.planning import shape_of

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("configs.json").read_text(encoding="utf-8")
)
"""As the models have them; text_config of gemma-3-4b leaves out what equals the class default."""
LLAMA_32_1B, GPT2 = CONFIGS["Llama-3.2-1B"], CONFIGS["gpt2"]
# The whole model's published count, less its SigLIP tower and the projector into the text model.
GEMMA3_4B_TEXT_PARAMETERS = 4_300_079_472 - 416_866_032 - 2_950_272

OLMOE = {**LLAMA_32_1B, "model_type": "olmoe", "num_experts": 8}
LATENT = {**LLAMA_32_1B, "model_type": "minicpm3", "kv_lora_rank": 256}
BART = {**LLAMA_32_1B, "model_type": "bart", "is_encoder_decoder": True}
NO_USABLE = "config.json has no usable"


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in LLAMA_32_1B.items() if key not in keys}


@each("name", [name for name in CONFIGS if name not in ("opt-125m", "gemma-3-4b")])
def test_a_config_gives_the_very_shape_the_known_model_has(name: str):
    assert shape_from_config(CONFIGS[name]) == shape_of(name)


@each(
    ("name", "parameters", "context"),
    [("gemma-3-4b", GEMMA3_4B_TEXT_PARAMETERS, 131_072), ("opt-125m", 125_239_296, 2048)],
)
def test_a_config_gives_the_published_parameter_count(name: str, parameters: int, context: int):
    shape = shape_from_config(CONFIGS[name])
    assert (shape.parameters, shape.context) == (parameters, context)


@each(
    ("config", "reason"),
    [
        (OLMOE, "a mixture of 8 experts is not modelled"),
        (LATENT, "multi-head latent attention (kv_lora_rank) is not modelled"),
        (BART, "an encoder-decoder model is not modelled"),
        # Missing numbers are named all at once.
        (without("vocab_size"), f"{NO_USABLE} vocab_size"),
        (
            without("num_attention_heads", "hidden_size"),
            f"{NO_USABLE} hidden_size, num_attention_heads",
        ),
        *(
            ({**LLAMA_32_1B, "num_hidden_layers": invalid}, f"{NO_USABLE} num_hidden_layers")
            for invalid in ("16", 0, -1, True, None, 16.0)
        ),
    ],
)
def test_what_we_cannot_model_is_refused_with_its_reason(config: dict[str, Any], reason: str):
    with pytest.raises(UnknownShape) as refusal:
        shape_from_config(config)
    assert str(refusal.value) == reason

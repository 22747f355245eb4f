"""Known models have their published parameter counts, and similar names never match."""

from __future__ import annotations

from expert.planning.models.known_models import KNOWN_MODELS, find_known_model
from tests.each import each


@each("model", KNOWN_MODELS, ids=lambda model: model.hub_id)
def test_a_shape_reproduces_the_published_parameter_count(model):
    assert find_known_model(model.hub_id) is model
    assert model.shape.parameters == model.parameters
    assert model.shape.heads % model.shape.kv_heads == 0
    assert model.shape.head_dim % 8 == 0
    assert model.shape.context >= 1024


@each(
    ("name", "hub_id"),
    [
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M"),
        ("F:/x/models/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("F:\\x\\models\\Qwen3-0.6B\\", "Qwen/Qwen3-0.6B"),
        ("/data/models/Qwen3-0.6B-Q8_0.gguf", "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B-FP8", "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B-Instruct"),
        ("Qwen/Qwen3-4B-Thinking-2507", "Qwen/Qwen3-4B-Instruct-2507"),
        ("unsloth/llama-3-8b-bnb-4bit", "meta-llama/Meta-Llama-3-8B"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "meta-llama/Llama-3.1-8B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("TinyLlama-1.1B", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
        ("phi-3-mini", "microsoft/Phi-3-mini-4k-instruct"),
        ("gpt2", "openai-community/gpt2"),
        ("unsloth/gemma-3-4b-it", "google/gemma-3-4b-pt"),
        # A name we do not know is never taken for a near one.
        *((name, None) for name in ("Qwen3-1.5B", "Qwen3-0.6", "Qwen2.5-72B", "Qwen3-0.6B-tuned")),
        *((name, None) for name in ("Qwen2.5-7B-Instruct-1M", "Llama-3-70B", "Llama-Guard-3-1B")),
        *(
            (name, None)
            for name in ("CodeLlama-7b-Python-hf", "gemma-3n-4b-it", "gpt2-xl", "qwen3")
        ),
        *((name, None) for name in ("Mixtral-8x22B-v0.1", "instruct", "model", "/", "")),
        # Two shapes fit these.
        *((name, None) for name in ("Mistral-7B", "mistral-7b-instruct", "Mistral-7B-v0.9")),
    ],
)
def test_hub_ids_bare_names_and_paths_find_the_model_and_others_none(name, hub_id):
    found = find_known_model(name)
    assert (found and found.hub_id) == hub_id
    # Variants that differ in context only count with the shortest.
    contexts = [find_known_model(n).shape.context for n in ("Qwen/Qwen2.5-7B", "Qwen2.5-7B-Chat")]
    assert contexts == [131072, 32768]

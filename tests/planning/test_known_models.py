"""Known models: each reproduces its published parameter count, and names never nearly match."""

from __future__ import annotations

import pytest

from expert.planning.models.known_models import KNOWN_MODELS, find_known_model
from tests.each import each

_HUB_IDS = {
    134_515_008: "HuggingFaceTB/SmolLM2-135M",
    361_821_120: "HuggingFaceTB/SmolLM2-360M",
    1_711_376_384: "HuggingFaceTB/SmolLM2-1.7B",
    3_075_098_624: "HuggingFaceTB/SmolLM3-3B",
    494_032_768: "Qwen/Qwen2.5-0.5B Qwen/Qwen2.5-Coder-0.5B",
    1_543_714_304: "Qwen/Qwen2.5-1.5B Qwen/Qwen2.5-1.5B-Instruct Qwen/Qwen2.5-Coder-1.5B",
    3_085_938_688: "Qwen/Qwen2.5-3B Qwen/Qwen2.5-Coder-3B",
    7_615_616_512: (
        "Qwen/Qwen2.5-7B Qwen/Qwen2.5-7B-Instruct Qwen/Qwen2.5-Coder-7B "
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
    ),
    14_770_033_664: (
        "Qwen/Qwen2.5-14B Qwen/Qwen2.5-14B-Instruct Qwen/Qwen2.5-Coder-14B "
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B"
    ),
    596_049_920: "Qwen/Qwen3-0.6B Qwen/Qwen3-0.6B-Base",
    1_720_574_976: "Qwen/Qwen3-1.7B Qwen/Qwen3-1.7B-Base",
    4_022_468_096: "Qwen/Qwen3-4B Qwen/Qwen3-4B-Base Qwen/Qwen3-4B-Instruct-2507",
    8_190_735_360: "Qwen/Qwen3-8B Qwen/Qwen3-8B-Base",
    14_768_307_200: "Qwen/Qwen3-14B Qwen/Qwen3-14B-Base",
    1_235_814_400: "meta-llama/Llama-3.2-1B",
    3_212_749_824: "meta-llama/Llama-3.2-3B",
    8_030_261_248: (
        "meta-llama/Llama-3.1-8B meta-llama/Meta-Llama-3-8B "
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
    ),
    6_738_415_616: "meta-llama/Llama-2-7b-hf",
    13_015_864_320: "meta-llama/Llama-2-13b-hf",
    6_738_546_688: "codellama/CodeLlama-7b-hf",
    13_016_028_160: "codellama/CodeLlama-13b-hf",
    1_100_048_384: "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    7_241_732_096: "mistralai/Mistral-7B-v0.1 mistralai/Mistral-7B-Instruct-v0.2",
    7_248_023_552: "mistralai/Mistral-7B-v0.3",
    12_247_782_400: "mistralai/Mistral-Nemo-Base-2407",
    8_019_808_256: "mistralai/Ministral-8B-Instruct-2410",
    2_506_172_416: "google/gemma-2b",
    8_537_680_896: "google/gemma-7b",
    2_614_341_888: "google/gemma-2-2b",
    9_241_705_984: "google/gemma-2-9b",
    268_098_176: "google/gemma-3-270m",
    999_885_952: "google/gemma-3-1b-pt",
    2_779_683_840: "microsoft/phi-2",
    3_821_079_552: (
        "microsoft/Phi-3-mini-4k-instruct microsoft/Phi-3-mini-128k-instruct "
        "microsoft/Phi-3.5-mini-instruct"
    ),
    14_659_507_200: "microsoft/phi-4",
    3_836_021_760: "microsoft/Phi-4-mini-instruct",
    1_777_088_000: "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    1_346_471_936: "deepseek-ai/deepseek-coder-1.3b-base",
    6_740_512_768: "deepseek-ai/deepseek-coder-6.7b-base",
    6_061_035_520: "01-ai/Yi-1.5-6B",
    8_829_407_232: "01-ai/Yi-1.5-9B",
    1_484_916_736: "allenai/OLMo-2-0425-1B",
    7_298_617_344: "allenai/OLMo-2-1124-7B",
    124_439_808: "openai-community/gpt2",
    354_823_168: "openai-community/gpt2-medium",
    162_322_944: "EleutherAI/pythia-160m",
    405_334_016: "EleutherAI/pythia-410m",
    1_011_781_632: "EleutherAI/pythia-1b",
    1_414_647_808: "EleutherAI/pythia-1.4b",
    2_775_208_960: "EleutherAI/pythia-2.8b",
    3_030_371_328: "bigcode/starcoder2-3b",
    7_173_923_840: "bigcode/starcoder2-7b",
}
"""By their published parameter count."""
PUBLISHED_PARAMETERS = {
    hub_id: count for count, hub_ids in _HUB_IDS.items() for hub_id in hub_ids.split()
}


def test_every_known_model_has_its_published_count_in_this_file():
    assert {model.hub_id for model in KNOWN_MODELS} == set(PUBLISHED_PARAMETERS)
    assert len(KNOWN_MODELS) == len(PUBLISHED_PARAMETERS)


@each(("hub_id", "parameters"), PUBLISHED_PARAMETERS.items())
def test_a_shape_reproduces_the_published_parameter_count(hub_id, parameters):
    model = find_known_model(hub_id)
    assert model.hub_id == hub_id
    assert model.shape.parameters == parameters


@each("model", KNOWN_MODELS, ids=lambda model: model.hub_id)
def test_heads_share_keys_evenly_and_fit_the_width(model):
    shape = model.shape
    assert shape.heads % shape.kv_heads == 0
    assert shape.head_dim % 8 == 0
    assert shape.context >= 1024


@each(
    ("name", "hub_id"),
    [
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M"),
        ("SmolLM2-360M-Instruct", "HuggingFaceTB/SmolLM2-360M"),
        ("F:/x/models/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("F:\\x\\models\\Qwen3-0.6B\\", "Qwen/Qwen3-0.6B"),
        ("/data/models/Qwen3-0.6B-Q8_0.gguf", "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B-FP8", "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B-Instruct"),
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct", "Qwen/Qwen2.5-Coder-1.5B"),
        ("unsloth/Qwen3-4B-Base-unsloth-bnb-4bit", "Qwen/Qwen3-4B-Base"),
        ("Qwen/Qwen3-4B-Thinking-2507", "Qwen/Qwen3-4B-Instruct-2507"),
        ("unsloth/llama-3-8b-bnb-4bit", "meta-llama/Meta-Llama-3-8B"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-hf"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistralai/Mistral-Nemo-Base-2407"),
        ("TinyLlama-1.1B", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
        ("google/gemma-3-1b-it", "google/gemma-3-1b-pt"),
        ("OLMo-2-1B-Instruct", "allenai/OLMo-2-0425-1B"),
        ("phi-3-mini", "microsoft/Phi-3-mini-4k-instruct"),
        ("gpt2", "openai-community/gpt2"),
        ("EleutherAI/pythia-160m-deduped", "EleutherAI/pythia-160m"),
    ],
)
def test_hub_ids_bare_names_and_paths_find_the_model(name, hub_id):
    assert find_known_model(name).hub_id == hub_id


@each(
    "name",
    [
        "Qwen3-1.5B",
        "Qwen3-0.6",
        "Qwen2.5-72B",
        "Qwen2.5-7B-Instruct-1M",
        "Qwen3-0.6B-finetuned",
        "Llama-3-70B",
        "Llama-Guard-3-1B",
        "CodeLlama-7b-Python-hf",
        "gemma-3-4b-it",
        "Mixtral-8x7B-v0.1",
        "gpt2-xl",
        "qwen3",
        "instruct",
        "model",
        "/",
        "",
    ],
)
def test_a_name_we_do_not_know_is_never_taken_for_a_near_one(name):
    assert find_known_model(name) is None


@pytest.mark.parametrize("name", ["Mistral-7B", "mistral-7b-instruct", "Mistral-7B-v0.9"])
def test_a_name_that_fits_two_shapes_is_refused(name):
    assert find_known_model(name) is None


def test_variants_that_differ_in_context_only_count_with_the_shortest():
    exact = find_known_model("Qwen/Qwen2.5-7B")
    vague = find_known_model("Qwen2.5-7B-Chat")
    assert exact.shape.context == 131072
    assert vague.shape.context == 32768

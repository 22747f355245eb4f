"""Shapes of usual models by name, so that planning works without a network or a download."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from expert.planning.models.shapes import ModelShape


@dataclass(frozen=True)
class KnownModel:
    """A model on the Hugging Face hub and the shape its config.json gives."""

    hub_id: str
    shape: ModelShape


def find_known_model(name: str) -> KnownModel | None:
    """The model `name` means: a hub id, a bare name, or a path by its last part; else None.

    Sizes never match by likeness. What tells variants of one shape apart is ignored step by step:
    file formats first, then -Instruct and the like, then dates and versions. Where variants that
    are left differ in context only, the shortest counts; where they differ in more, None.
    """
    key = re.split(r"[\\/]", name.strip().rstrip("\\/"))[-1].lower().removesuffix(".gguf")
    key = _NICKNAMES.get(key, key)
    for step, index in enumerate(_BY_KEY):
        found = index.get(_reduced(key, step))
        if found:
            return _the_one(found)
    return None


_FORMATS = r"gguf|awq|gptq|bnb|unsloth|mlx|onnx|qat|[48]bit|int[48]|fp8|fp16|bf16|q\d(_\w+)*"
_VARIANTS = r"instruct|base|chat|it|pt|hf|thinking|deduped|meta"
_EDITIONS = r"\d{4}|v\d+(\.\d+)*"
_IGNORED = ("", _FORMATS, f"{_FORMATS}|{_VARIANTS}", f"{_FORMATS}|{_VARIANTS}|{_EDITIONS}")
"""What each step of find_known_model ignores between the hyphens of a name."""

_NICKNAMES = {"phi-3-mini": "phi-3-mini-4k-instruct"}


def _reduced(key: str, step: int) -> str:
    ignored = re.compile(_IGNORED[step])
    return "-".join(part for part in key.split("-") if not ignored.fullmatch(part))


def _the_one(found: list[KnownModel]) -> KnownModel | None:
    if len({replace(model.shape, context=0) for model in found}) > 1:
        return None
    return min(found, key=lambda model: model.shape.context)


Row = tuple[str, int, int, int, int, int, int, int, int, bool]
_LLAMA: Callable[..., ModelShape] = ModelShape
_QWEN2 = partial(ModelShape, qkv_bias=True)
_QWEN3 = partial(ModelShape, qk_norm=True)
_OTHER = partial(ModelShape, llama_blocks=False)
_GEMMA2 = partial(_OTHER, norms_per_layer=4)
_GEMMA3 = partial(_OTHER, norms_per_layer=4, qk_norm=True)
_OLMO2 = partial(_OTHER, qk_norm=True, qk_norm_full_width=True)
_LAYER_NORM = partial(_OTHER, gated_mlp=False, linear_bias=True, norm_bias=True)
_PHI2 = partial(_LAYER_NORM, norms_per_layer=1, head_bias=True)
_GPT2 = partial(_LAYER_NORM, learned_positions=1024)


_COLUMNS = (
    "layers",
    "hidden",
    "ffn",
    "heads",
    "kv_heads",
    "head_dim",
    "vocab",
    "context",
    "tied_head",
)


def _models(make: Callable[..., ModelShape], *rows: Row) -> tuple[KnownModel, ...]:
    return tuple(
        KnownModel(hub_id, make(**dict(zip(_COLUMNS, sizes, strict=True))))
        for hub_id, *sizes in rows
    )


_DISTILL = "deepseek-ai/DeepSeek-R1-Distill"

# A hub id, then _COLUMNS.
_TABLE = (
    *_models(
        _LLAMA,
        ("HuggingFaceTB/SmolLM2-135M", 30, 576, 1536, 9, 3, 64, 49152, 8192, True),
        ("HuggingFaceTB/SmolLM2-360M", 32, 960, 2560, 15, 5, 64, 49152, 8192, True),
        ("HuggingFaceTB/SmolLM2-1.7B", 24, 2048, 8192, 32, 32, 64, 49152, 8192, True),
        ("meta-llama/Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64, 128256, 131072, True),
        ("meta-llama/Llama-3.2-3B", 28, 3072, 8192, 24, 8, 128, 128256, 131072, True),
        ("meta-llama/Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256, 131072, False),
        ("meta-llama/Meta-Llama-3-8B", 32, 4096, 14336, 32, 8, 128, 128256, 8192, False),
        ("meta-llama/Llama-2-7b-hf", 32, 4096, 11008, 32, 32, 128, 32000, 4096, False),
        ("meta-llama/Llama-2-13b-hf", 40, 5120, 13824, 40, 40, 128, 32000, 4096, False),
        ("codellama/CodeLlama-7b-hf", 32, 4096, 11008, 32, 32, 128, 32016, 16384, False),
        ("codellama/CodeLlama-13b-hf", 40, 5120, 13824, 40, 40, 128, 32016, 16384, False),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 22, 2048, 5632, 32, 4, 64, 32000, 2048, False),
        ("mistralai/Mistral-7B-v0.1", 32, 4096, 14336, 32, 8, 128, 32000, 32768, False),
        ("mistralai/Mistral-7B-Instruct-v0.2", 32, 4096, 14336, 32, 8, 128, 32000, 32768, False),
        ("mistralai/Mistral-7B-v0.3", 32, 4096, 14336, 32, 8, 128, 32768, 32768, False),
        ("mistralai/Mistral-Nemo-Base-2407", 40, 5120, 14336, 32, 8, 128, 131072, 131072, False),
        ("mistralai/Ministral-8B-Instruct-2410", 36, 4096, 12288, 32, 8, 128, 131072, 32768, False),
        (f"{_DISTILL}-Llama-8B", 32, 4096, 14336, 32, 8, 128, 128256, 131072, False),
        ("deepseek-ai/deepseek-coder-1.3b-base", 24, 2048, 5504, 16, 16, 128, 32256, 16384, False),
        ("deepseek-ai/deepseek-coder-6.7b-base", 32, 4096, 11008, 32, 32, 128, 32256, 16384, False),
        ("01-ai/Yi-1.5-6B", 32, 4096, 11008, 32, 4, 128, 64000, 4096, False),
        ("01-ai/Yi-1.5-9B", 48, 4096, 11008, 32, 4, 128, 64000, 4096, False),
    ),
    *_models(
        _OTHER,
        ("HuggingFaceTB/SmolLM3-3B", 36, 2048, 11008, 16, 4, 128, 128256, 65536, True),
        ("google/gemma-2b", 18, 2048, 16384, 8, 1, 256, 256000, 8192, True),
        ("google/gemma-7b", 28, 3072, 24576, 16, 16, 256, 256000, 8192, True),
        ("microsoft/Phi-3-mini-4k-instruct", 32, 3072, 8192, 32, 32, 96, 32064, 4096, False),
        ("microsoft/Phi-3-mini-128k-instruct", 32, 3072, 8192, 32, 32, 96, 32064, 131072, False),
        ("microsoft/Phi-3.5-mini-instruct", 32, 3072, 8192, 32, 32, 96, 32064, 131072, False),
        ("microsoft/phi-4", 40, 5120, 17920, 40, 10, 128, 100352, 16384, False),
        ("microsoft/Phi-4-mini-instruct", 32, 3072, 8192, 24, 8, 128, 200064, 131072, True),
    ),
    *_models(
        _QWEN2,
        ("Qwen/Qwen2.5-0.5B", 24, 896, 4864, 14, 2, 64, 151936, 32768, True),
        ("Qwen/Qwen2.5-1.5B", 28, 1536, 8960, 12, 2, 128, 151936, 131072, True),
        ("Qwen/Qwen2.5-3B", 36, 2048, 11008, 16, 2, 128, 151936, 32768, True),
        ("Qwen/Qwen2.5-7B", 28, 3584, 18944, 28, 4, 128, 152064, 131072, False),
        ("Qwen/Qwen2.5-14B", 48, 5120, 13824, 40, 8, 128, 152064, 131072, False),
        (f"{_DISTILL}-Qwen-1.5B", 28, 1536, 8960, 12, 2, 128, 151936, 131072, False),
        (f"{_DISTILL}-Qwen-7B", 28, 3584, 18944, 28, 4, 128, 152064, 131072, False),
        (f"{_DISTILL}-Qwen-14B", 48, 5120, 13824, 40, 8, 128, 152064, 131072, False),
    ),
    *_models(
        _QWEN3,
        ("Qwen/Qwen3-0.6B", 28, 1024, 3072, 16, 8, 128, 151936, 40960, True),
        ("Qwen/Qwen3-1.7B", 28, 2048, 6144, 16, 8, 128, 151936, 40960, True),
        ("Qwen/Qwen3-4B", 36, 2560, 9728, 32, 8, 128, 151936, 40960, True),
        ("Qwen/Qwen3-8B", 36, 4096, 12288, 32, 8, 128, 151936, 40960, False),
        ("Qwen/Qwen3-14B", 40, 5120, 17408, 40, 8, 128, 151936, 40960, False),
    ),
    *_models(
        _GEMMA2,
        ("google/gemma-2-2b", 26, 2304, 9216, 8, 4, 256, 256000, 8192, True),
        ("google/gemma-2-9b", 42, 3584, 14336, 16, 8, 256, 256000, 8192, True),
    ),
    *_models(
        _GEMMA3,
        ("google/gemma-3-270m", 18, 640, 2048, 4, 1, 256, 262144, 32768, True),
        ("google/gemma-3-1b-pt", 26, 1152, 6912, 4, 1, 256, 262144, 32768, True),
    ),
    *_models(
        _OLMO2,
        ("allenai/OLMo-2-0425-1B", 16, 2048, 8192, 16, 16, 128, 100352, 4096, False),
        ("allenai/OLMo-2-1124-7B", 32, 4096, 11008, 32, 32, 128, 100352, 4096, False),
    ),
    *_models(_PHI2, ("microsoft/phi-2", 32, 2560, 10240, 32, 32, 80, 51200, 2048, False)),
    *_models(
        _GPT2,
        ("openai-community/gpt2", 12, 768, 3072, 12, 12, 64, 50257, 1024, True),
        ("openai-community/gpt2-medium", 24, 1024, 4096, 16, 16, 64, 50257, 1024, True),
    ),
    *_models(
        _LAYER_NORM,
        ("EleutherAI/pythia-160m", 12, 768, 3072, 12, 12, 64, 50304, 2048, False),
        ("EleutherAI/pythia-410m", 24, 1024, 4096, 16, 16, 64, 50304, 2048, False),
        ("EleutherAI/pythia-1b", 16, 2048, 8192, 8, 8, 256, 50304, 2048, False),
        ("EleutherAI/pythia-1.4b", 24, 2048, 8192, 16, 16, 128, 50304, 2048, False),
        ("EleutherAI/pythia-2.8b", 32, 2560, 10240, 32, 32, 80, 50304, 2048, False),
        ("bigcode/starcoder2-3b", 30, 3072, 12288, 24, 2, 128, 49152, 16384, True),
        ("bigcode/starcoder2-7b", 32, 4608, 18432, 36, 4, 128, 49152, 16384, True),
    ),
)

_QWEN25_SIZES = ("0.5", "1.5", "3", "7", "14")
_QWEN3_SIZES = ("0.6", "1.7", "4", "8", "14")

# The shape of a row above with another context: hub id, that row, context.
_OTHER_CONTEXTS = (
    ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-1.5B", 32768),
    ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B", 32768),
    ("Qwen/Qwen2.5-14B-Instruct", "Qwen/Qwen2.5-14B", 32768),
    *((f"Qwen/Qwen2.5-Coder-{n}B", f"Qwen/Qwen2.5-{n}B", 32768) for n in _QWEN25_SIZES),
    *((f"Qwen/Qwen3-{n}B-Base", f"Qwen/Qwen3-{n}B", 32768) for n in _QWEN3_SIZES),
    ("Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B", 262144),
)

_SHAPES = {model.hub_id: model.shape for model in _TABLE}
KNOWN_MODELS: tuple[KnownModel, ...] = (
    *_TABLE,
    *(
        KnownModel(hub_id, replace(_SHAPES[like], context=context))
        for hub_id, like, context in _OTHER_CONTEXTS
    ),
)


def _by_key(step: int) -> dict[str, list[KnownModel]]:
    index: dict[str, list[KnownModel]] = {}
    for model in KNOWN_MODELS:
        key = _reduced(model.hub_id.split("/")[-1].lower(), step)
        index.setdefault(key, []).append(model)
    return index


_BY_KEY = tuple(_by_key(step) for step in range(len(_IGNORED)))

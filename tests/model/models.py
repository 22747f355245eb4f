"""Tiny random model folders, plans for them, and batches made by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from expert.model.errors import ModelError
from expert.model.load import LoadedModel, load_model
from expert.planning.run_plan import AdapterPlan, KernelPlan, ModelPlan
from tests.data.tokenizers import model_folder

VOCABULARY = 400
# Rows of whole NF4 blocks: on a CPU bitsandbytes reads no others back rightly.
WIDTH = 64
NO_LABEL = -100
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def family_config(family: str, **changes: Any) -> Any:
    """The config of a tiny model; `family` is qwen3 or one of those below."""
    import transformers

    if family == "gpt2":
        sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 256}
        ends = {"bos_token_id": 2, "eos_token_id": 2, "vocab_size": VOCABULARY}
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return transformers.GPT2Config(**{**sizes, **ends, **no_dropout, **changes})
    if family == "llama":
        return transformers.LlamaConfig(**{**_SIZES, "tie_word_embeddings": False, **changes})
    if family == "gemma2":
        capped = {"head_dim": 16, "attn_logit_softcapping": 2.0, "sliding_window": 8}
        return transformers.Gemma2Config(**{**_SIZES, **capped, **changes})
    if family == "qwen2":  # with a bias in q, k and v
        return transformers.Qwen2Config(**{**_SIZES, **changes})
    if family == "mistral":
        return transformers.MistralConfig(**{**_SIZES, "head_dim": 16, **changes})
    if family == "gemma":
        return transformers.GemmaConfig(**{**_SIZES, "head_dim": 16, **changes})
    if family == "gemma3_text":
        kinds = ["sliding_attention", "full_attention"]
        own = {"head_dim": 16, "sliding_window": 8, "layer_types": kinds}
        return transformers.Gemma3TextConfig(**{**_SIZES, **own, **changes})
    if family == "smollm3":  # the second block does not know positions
        own = {"no_rope_layers": [1, 0], "use_sliding_window": False}
        return transformers.SmolLM3Config(**{**_SIZES, **own, **changes})
    if family in ("phi3", "ministral3"):
        kind = {"phi3": "Phi3Config", "ministral3": "Ministral3Config"}[family]
        return getattr(transformers, kind)(**{**_SIZES, "head_dim": 16, **changes})
    if family == "glm4":
        own = {"head_dim": 16, "attention_bias": True, "partial_rotary_factor": 0.5}
        return transformers.Glm4Config(**{**_SIZES, **own, **changes})
    if family in ("olmo2", "olmo3"):
        kind = {"olmo2": "Olmo2Config", "olmo3": "Olmo3Config"}[family]
        return getattr(transformers, kind)(**{**_SIZES, **changes})
    if family in ("qwen3_5_text", "qwen3_5_moe_text"):
        kinds = ["linear_attention", "full_attention"]
        own = {"head_dim": 16, "layer_types": kinds, "linear_num_key_heads": 2}
        own |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
        own["rope_parameters"] = {**rope, "mrope_section": [1, 1, 0]}
        if family == "qwen3_5_text":
            return transformers.Qwen3_5TextConfig(**{**_SIZES, **own, **changes})
        own |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        own |= {"shared_expert_intermediate_size": 48}
        return transformers.Qwen3_5MoeTextConfig(**{**_SIZES, **own, **changes})
    if family == "gemma4_text":  # the last two layers attend to keys of the two before
        own = {"num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32, "sliding_window": 8}
        own |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
        own |= {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "pad_token_id": 0}
        own |= {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16}
        return transformers.Gemma4TextConfig(**{**_SIZES, **own, **changes})
    if family in ("qwen3_moe", "mixtral"):
        own = {"head_dim": 16, "num_experts_per_tok": 2}
        if family == "mixtral":
            return transformers.MixtralConfig(
                **{**_SIZES, **own, "num_local_experts": 8, **changes}
            )
        own |= {"num_experts": 8, "moe_intermediate_size": 32}
        return transformers.Qwen3MoeConfig(**{**_SIZES, **own, **changes})
    if family == "olmoe":
        own = {"num_experts": 8, "num_experts_per_tok": 2}
        return transformers.OlmoeConfig(**{**_SIZES, **own, **changes})
    if family == "gpt_oss":  # its first block has a window
        own = {"head_dim": 16, "num_experts_per_tok": 2, "num_local_experts": 8}
        own |= {"sliding_window": 8, "intermediate_size": 96}
        return transformers.GptOssConfig(**{**_SIZES, **own, **changes})
    if family == "lfm2":
        own = {"layer_types": ["conv", "full_attention"]}
        return transformers.Lfm2Config(**{**_SIZES, **own, **changes})
    if family in ("granite", "cohere", "phi"):
        return getattr(transformers, f"{family.title()}Config")(**{**_SIZES, **changes})
    return transformers.Qwen3Config(
        **{**_SIZES, "head_dim": 16, "tie_word_embeddings": True, **changes}
    )


def tiny_model(folder: Path, family: str = "qwen3", *, seed: int = 0, **changes: Any) -> Path:
    """A folder with a random model and a tokenizer."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(family_config(family, **changes))
        # Larger than a fresh model's, so that attention and documents matter to the loss.
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name == "lm_head.bias" or name.endswith("sinks"):
                torch.nn.init.normal_(parameter, std=0.12)
    model.save_pretrained(folder)
    return model_folder(folder)


def model_of_images(folder: Path, family: str = "gemma3_text", *, tied: bool = True) -> Path:
    """A folder with a random model that also reads images, with a language model of this family."""
    import transformers

    eyes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "image_size": 28,
    }
    eyes |= {"num_attention_heads": 2, "patch_size": 14}
    kinds = {"gemma3_text": "Gemma3", "gemma4_text": "Gemma4", "qwen3_5_text": "Qwen3_5"}
    kinds["qwen3_5_moe_text"] = "Qwen3_5Moe"
    kind = kinds.get(family, "Mistral3")
    if kind == "Mistral3":
        eyes["model_type"] = "pixtral"
    elif kind == "Gemma4":
        eyes |= {"num_key_value_heads": 2, "head_dim": 16}
    elif kind.startswith("Qwen3_5"):
        eyes = {"hidden_size": 32, "intermediate_size": 64, "depth": 1, "num_heads": 2}
        eyes |= {"out_hidden_size": WIDTH, "num_position_embeddings": 16}
    config = getattr(transformers, f"{kind}Config")(
        text_config=family_config(family, tie_word_embeddings=tied).to_dict(),
        tie_word_embeddings=tied,
        vision_config=eyes,
        **({"mm_tokens_per_image": 4} if kind == "Gemma3" else {}),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.12)
    model.save_pretrained(folder)
    return model_folder(folder)


def model_plan(folder: Path | str, **changes: Any) -> ModelPlan:
    own: dict[str, Any] = {
        "name": str(folder),
        "place": "folder",
        "location": str(folder),
        "revision": None,
        "parameters": None,
        "architecture": None,
        "quantization": "none",
        "prompt_template": None,
    }
    return ModelPlan(**{**own, **changes})


def adapter_plan(kind: str = "lora", **changes: Any) -> AdapterPlan:
    has_rank = kind in ("lora", "dora", "lokr", "adalora")
    own: dict[str, Any] = {
        "type": kind,
        "rank": 4 if has_rank else None,
        "alpha": 8.0 if has_rank else None,
        "dropout": 0.0,
        "target_modules": None if kind in ("full", "none") else "all-linear",
        "feedforward_modules": ["down_proj"] if kind == "ia3" else [],
        "soft_prompts": [],
        "trainable_parameters": None,
    }
    return AdapterPlan(**{**own, **changes})


def kernel_plan(**changes: Any) -> KernelPlan:
    own: dict[str, Any] = {
        "device": "cpu",
        "precision": "fp32",
        "loss_scaling": False,
        "tf32": False,
        "attention": "sdpa",
        "fused_loss": True,
        "compile": False,
        "compile_mode": "default",
        "compile_backend": "inductor",
        "checkpointing": "none",
        "recomputed_blocks": None,
        "cudnn_benchmark": False,
    }
    return KernelPlan(**{**own, **changes})


def load(
    folder: Path,
    kind: str = "lora",
    quantization: str = "none",
    *,
    seed: int = 0,
    total_steps: int | None = 20,
    adapter_dtype: torch.dtype | None = None,
    allow_remote_code: bool = False,
    **changes: Any,
) -> LoadedModel:
    """A model on the CPU; `changes` of the plan of the kernels, the base or the adapter."""
    kernels = {key: changes.pop(key) for key in KernelPlan.model_fields if key in changes}
    model = {key: changes.pop(key) for key in ModelPlan.model_fields if key in changes}
    return load_model(
        model_plan(folder, quantization=quantization, **model),
        adapter_plan(kind, **changes),
        kernel_plan(**kernels),
        vocabulary=None,
        device="cpu",
        seed=seed,
        total_steps=total_steps,
        adapter_dtype=adapter_dtype,
        allow_remote_code=allow_remote_code,
    )


def load_characters(vocabulary: int | str, *, seed: int = 0, **architecture: Any) -> LoadedModel:
    """A character model at its first weights."""
    return load_model(
        model_plan("char-gpt", place="built-in", architecture=architecture),
        adapter_plan("full"),
        kernel_plan(),
        vocabulary=vocabulary,
        device="cpu",
        seed=seed,
    )


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ModelError) as caught:
        call()
    return str(caught.value)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a model reads, as the data layer would hand it over."""

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    boundaries: Tensor
    soft_mask: Tensor | None
    target_places: Tensor
    targets: int
    whole_rows: bool

    @property
    def longest(self) -> int:
        return int(self.tokens.shape[1])


def make_batch(
    rows: Sequence[Sequence[Sequence[int]]], *, length: int | None = None, soft_tokens: int = 0
) -> Batch:
    """Rows of documents, all of whose tokens are trained on; each starts with the soft prompts."""
    laid = [[[0] * soft_tokens + list(document) for document in row] for row in rows]
    length = length or max(sum(map(len, row)) for row in laid)
    shape = (len(rows), length)
    tokens, positions = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape, dtype=torch.int32)
    labels = torch.full(shape, NO_LABEL, dtype=torch.int32)
    soft = torch.zeros(shape, dtype=torch.bool)
    starts = []
    for index, row in enumerate(laid):
        place = 0
        for document in row:
            end = place + len(document)
            starts.append(index * length + place)
            tokens[index, place:end] = torch.tensor(document)
            positions[index, place:end] = torch.arange(len(document))
            first = place + max(soft_tokens - 1, 0)
            labels[index, first : end - 1] = tokens[index, first + 1 : end]
            soft[index, place : place + soft_tokens] = True
            place = end
        if place < length:
            starts.append(index * length + place)
            positions[index, place:] = torch.arange(length - place)
    places = (labels.flatten() != NO_LABEL).nonzero().flatten()
    total = len(rows) * length
    target_places = torch.full((total,), total - 1, dtype=torch.int32)
    target_places[: len(places)] = places
    return Batch(
        tokens=tokens,
        positions=positions,
        labels=labels,
        boundaries=torch.tensor([*starts, *[total] * 3], dtype=torch.int32),
        soft_mask=soft if soft_tokens else None,
        target_places=target_places,
        targets=len(places),
        whole_rows=all(len(row) == 1 for row in rows),
    )


def documents(*lengths: int, vocabulary: int = VOCABULARY, seed: int = 0) -> list[list[int]]:
    """Random documents of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def rewrite_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, **changes}), encoding="utf-8")


def trainable_tensors(loaded: LoadedModel) -> dict[str, Tensor]:
    """What a checkpoint stores of a model: all trainable tensors, and the state of AdaLoRA."""
    tensors = {name: parameter.detach() for name, parameter in loaded.trainable}
    if loaded.ranks is not None:
        tensors |= {f"adalora.{name}": value for name, value in loaded.ranks.tensors().items()}
    return tensors


def plain_base(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def stir(parameters: Iterable[Tensor]) -> None:
    """Give adapters values that change the model: fresh ones do nothing."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter.dtype), alpha=0.1)

"""Soft prompts: trainable virtual tokens in front of every document."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from expert.core.files import write_text_atomically
from expert.manifest.schema.manifest import SoftPrompt
from expert.model.errors import ModelError


class SoftPrompts(nn.Module):
    """All soft prompts of a run, concatenated in the order of the manifest."""

    def __init__(self, names: Sequence[str], prompts: Sequence[Tensor]) -> None:
        super().__init__()
        self.names = tuple(names)
        self.prompts = nn.ParameterList(nn.Parameter(prompt) for prompt in prompts)

    @property
    def tokens(self) -> int:
        return sum(prompt.shape[0] for prompt in self.prompts)

    def rows(self) -> Tensor:
        """[tokens, width] of all prompts, concatenated."""
        return torch.cat(list(self.prompts))

    def embed(
        self, embedding: nn.Module, tokens: Tensor, positions: Tensor, soft_mask: Tensor
    ) -> Tensor:
        """[rows, length, width]: the prompt where soft_mask is set, the embedding elsewhere."""
        words: Tensor = embedding(tokens)
        # Positions after the prompt are larger; their row is not used.
        places = positions.clamp(max=self.tokens - 1)
        soft = F.embedding(places, self.rows()).to(words.dtype)
        return torch.where(soft_mask[..., None], soft, words)


def make_soft_prompts(
    wanted: Sequence[Mapping[str, Any]],
    embedding: nn.Module,
    *,
    seed: int,
    dtype: torch.dtype,
    encode: Callable[[str], list[int]] | None,
) -> SoftPrompts | None:
    """The plan's prompts with initial values that depend only on seed, plan and embedding; None if
    there are none."""
    if not wanted:
        return None
    generator = torch.Generator().manual_seed(seed)
    prompts = [SoftPrompt.model_validate(dict(prompt)) for prompt in wanted]
    names = [prompt.name for prompt in prompts]
    if len(set(names)) < len(names):
        what = f"two prompts have the same name: {', '.join(names)}"
        raise ModelError("soft_prompts", what, "give every prompt a different name")
    for name in names:
        if name != Path(name).name or name in (".", ".."):
            what = f"{name!r} cannot be the name of a folder"
            raise ModelError("soft_prompts", what, "use letters, digits and dashes")
    values = [_first_values(prompt, embedding, generator, encode).to(dtype) for prompt in prompts]
    return SoftPrompts(names, values)


def _first_values(
    prompt: SoftPrompt,
    embedding: nn.Module,
    generator: torch.Generator,
    encode: Callable[[str], list[int]] | None,
) -> Tensor:
    """Float32 [tokens, width] on the embedding's device, scaled like the embedding's output: some
    models (Gemma) scale the stored rows."""
    weight: Tensor = embedding.weight  # type: ignore[assignment]
    count, (vocabulary, width) = prompt.tokens, weight.shape
    if prompt.init_method == "random":
        noise = torch.randn(count, width, generator=generator)
        return noise.to(weight.device) * _spread(weight) * _scale(embedding)
    if prompt.init_method == "vocab_sample":
        chosen = torch.randint(vocabulary, (count,), generator=generator)
    else:
        ids = encode(prompt.init_text) if encode is not None else []
        if not ids:
            what = f"{prompt.name}: init_method text needs an init_text and a tokenizer"
            raise ModelError("soft_prompts", what, "add init_text, or use init_method: random")
        chosen = torch.tensor((ids * math.ceil(count / len(ids)))[:count])
    return _embedded(embedding, chosen)


@torch.no_grad()
def _embedded(embedding: nn.Module, ids: Tensor) -> Tensor:
    weight: Tensor = embedding.weight  # type: ignore[assignment]
    rows: Tensor = embedding(ids.to(weight.device))
    return rows.detach().float()


def _scale(embedding: nn.Module) -> Tensor:
    """By how much the embedding scales its stored rows, measured on the first 64."""
    weight: Tensor = embedding.weight  # type: ignore[assignment]
    few = torch.arange(min(64, weight.shape[0]))
    stored = torch.linalg.vector_norm(weight[: len(few)].detach().float())
    returned = torch.linalg.vector_norm(_embedded(embedding, few))
    # If the only row is padding (zeros), the scale is unknown.
    return torch.where(stored > 0, returned / stored, torch.ones_like(stored))


def _spread(weight: Tensor) -> Tensor:
    """The standard deviation, without a float32 copy of a large embedding."""
    mean = weight.mean(dtype=torch.float32)
    norm: Tensor = torch.linalg.vector_norm(weight, dtype=torch.float32)
    return (norm.square() / weight.numel() - mean.square()).sqrt().detach()


def save_soft_prompt(
    prompt_TD: Tensor, folder: Path, *, base: str, config: Any, revision: str | None = None
) -> None:
    """Write one prompt as a PEFT prompt-tuning adapter; `config`: of the base model."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = prompt_TD.detach().float().cpu().contiguous()
    file = folder / "adapter_model.safetensors"
    save_file({"prompt_embeddings": rows}, file, metadata={"format": "pt"})
    settings = {
        "peft_type": "PROMPT_TUNING",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "prompt_tuning_init": "RANDOM",
        "num_virtual_tokens": rows.shape[0],
        "token_dim": rows.shape[1],
        "num_transformer_submodules": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_layers": config.num_hidden_layers,
    }
    write_text_atomically(folder / "adapter_config.json", json.dumps(settings, indent=2) + "\n")

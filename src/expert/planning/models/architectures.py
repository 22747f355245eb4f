"""How the blocks of each model type compute: the one description that plans, fused blocks and GGUF
files read. Another dense architecture is another row, and a test that compares it with
transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Gguf:
    """How llama.cpp treats a model type."""

    arch: str
    """Name in gguf.MODEL_ARCH."""
    interleaved: bool = False
    """RoPE rotates neighbouring rows, so rows of q and k are stored in that order."""
    windows: bool = False
    """llama.cpp supports its sliding windows."""
    tied: bool = False
    """llama.cpp always uses the embedding as the head."""
    largest: int = 0
    """Layers of the model whose attention llama.cpp scales by hidden_size / heads."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The blocks of a model type: by default those of Llama."""

    norm: Literal["rms", "rms 1+w", "layer"] = "rms"
    """RMSNorm; RMSNorm that multiplies by 1 + weight; LayerNorm with a bias."""
    norms: Literal["before", "after", "around", "shared"] = "before"
    """Of attention and MLP: of what they read, of what they add to the residual, of both; or both
    read the same normed values."""
    mlp: Literal["silu", "gelu", "plain"] = "silu"
    """gate/up/down with this activation of the gate; plain: two matrices."""
    merged: Literal["", "mlp", "all"] = ""
    """gate and up are one layer; or q, k and v, too."""
    head_norms: Literal["", "head", "width"] = ""
    """RMSNorm of queries and keys: with a head's weights for all heads, or weights for each."""
    bias: Literal["", "qkv", "all"] = ""
    head_bias: bool = False
    tied: bool = False
    """transformers' default for tie_word_embeddings."""
    learned_positions: bool = False
    window_everywhere: bool = False
    """Its sliding window is that of all layers, whatever layer_types says."""
    rotation: Literal["halves", "halves once", "pairs"] = "halves"
    """Which columns of a head RoPE rotates together; once: cosines and sines come for one half."""
    caps_scores: bool = False
    """Attention scores are capped, which few kernels do."""
    sinks: bool = False
    """Every head has a score more, of no token, which few kernels do either."""
    ffn_is_four_times_hidden: bool = False
    """Where config.json does not say."""
    recurrent: str = ""
    """In layer_types, the kind of layer that carries a state instead of attending."""
    shares_keys: bool = False
    """The last layers attend to keys of earlier ones, and every layer has embeddings of its own."""
    experts: bool = False
    """Every layer has experts instead of an MLP, of which a router chooses some for each token."""
    output_gate: bool = False
    """Queries come with a gate for what attention returns, as wide as they are."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Numbers that config.json leaves out, as they are its class's defaults."""
    gguf: Gguf | None = None

    @property
    def norms_per_layer(self) -> int:
        return {"around": 4, "shared": 1}.get(self.norms, 2)

    @property
    def slow_because(self) -> str:
        """Why fused blocks do not compute it; "": they do."""
        reasons = {
            "LayerNorm": self.norm == "layer",
            "attention and MLP side by side": self.norms == "shared",
            "an MLP without a gate": self.mlp == "plain",
            "layers that carry a state": bool(self.recurrent),
            "keys shared by layers": self.shares_keys,
        }
        return ", ".join(text for text, applies in reasons.items() if applies)


_gemma = partial(Architecture, norm="rms 1+w", mlp="gelu", tied=True)
_gpt = partial(Architecture, norm="layer", mlp="plain", bias="all")
_QWEN_3_5 = partial(
    Architecture,
    norm="rms 1+w",
    head_norms="head",
    recurrent="linear_attention",
    output_gate=True,
)
_GEMMA_3 = _gemma(
    norms="around",
    head_norms="head",
    # Its nested text_config omits every number that equals its class default.
    defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
    gguf=Gguf(arch="GEMMA3", windows=True, largest=62),
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(gguf=Gguf(arch="LLAMA", interleaved=True)),
    "mistral": Architecture(window_everywhere=True, gguf=Gguf(arch="LLAMA", interleaved=True)),
    "ministral3": Architecture(window_everywhere=True),
    "qwen2": Architecture(bias="qkv", gguf=Gguf(arch="QWEN2")),
    "qwen3": Architecture(head_norms="head", gguf=Gguf(arch="QWEN3")),
    "smollm3": Architecture(),
    "phi3": Architecture(merged="all", window_everywhere=True, gguf=Gguf(arch="PHI3")),
    "gemma": _gemma(gguf=Gguf(arch="GEMMA", tied=True)),
    "gemma2": _gemma(
        norms="around",
        caps_scores=True,
        gguf=Gguf(arch="GEMMA2", windows=True, tied=True, largest=46),
    ),
    "gemma3_text": _GEMMA_3,
    "gemma4_text": Architecture(
        norms="around", mlp="gelu", tied=True, head_norms="head", shares_keys=True
    ),
    "granite": Architecture(),
    "glm4": Architecture(norms="around", rotation="pairs", merged="mlp"),
    "olmo2": Architecture(norms="after", head_norms="width"),
    "olmo3": Architecture(norms="after", head_norms="width"),
    "qwen3_5_text": _QWEN_3_5(),
    "qwen3_5_moe_text": _QWEN_3_5(experts=True),
    "lfm2": Architecture(head_norms="head", tied=True, recurrent="conv"),
    "qwen3_moe": Architecture(head_norms="head", experts=True),
    "mixtral": Architecture(experts=True),
    "gpt_oss": Architecture(experts=True, bias="all", sinks=True, rotation="halves once"),
    "stablelm": Architecture(norm="layer"),
    "starcoder2": _gpt(tied=True),
    "phi": _gpt(norms="shared", head_bias=True),
    "gptj": _gpt(norms="shared", head_bias=True, ffn_is_four_times_hidden=True),
    "gpt_neox": _gpt(),
    "gpt_neo": _gpt(ffn_is_four_times_hidden=True),
    "gpt2": _gpt(tied=True, learned_positions=True, ffn_is_four_times_hidden=True),
    "gpt_bigcode": _gpt(tied=True, learned_positions=True, ffn_is_four_times_hidden=True),
    "opt": _gpt(tied=True, learned_positions=True),
}
"""By model_type. Of others the sizes are taken for Llama's, and nothing else."""

TEXT_PARTS = (
    *("gemma3_text", "gemma4_text", "mistral", "ministral3"),
    *("qwen3_5_text", "qwen3_5_moe_text"),
)
"""Language models that are loaded alone out of a model that also reads images."""

FUSED_TYPES = tuple(kind for kind, each in ARCHITECTURES.items() if not each.slow_because)
"""Model types whose blocks model/fused/block.py computes."""

MODEL_COLUMNS = ("model_type", "on a GPU with bf16", "why not fused", "GGUF")


def model_rows() -> list[tuple[str, str, str, str]]:
    """What is known of every model type, and of the others."""
    known = [
        (
            kind,
            "transformers' blocks" if each.slow_because else "fused blocks",
            each.slow_because,
            "yes" if each.gguf else "–",
        )
        for kind, each in ARCHITECTURES.items()
    ]
    return [
        *sorted(known, key=lambda row: bool(row[2])),
        ("others of transformers", "transformers' blocks", "not looked at", "–"),
        ("other mixtures of experts", "transformers' blocks", "their memory is not known", "–"),
        (
            "models of images",
            "as alone",
            f"the language model is taken out of them: {', '.join(TEXT_PARTS)}",
            "–",
        ),
        ("others, and of sound", "refused", "only text is trained", "–"),
    ]

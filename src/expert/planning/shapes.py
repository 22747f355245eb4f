"""The numbers of a decoder-only language model that memory and time follow from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes read off a config.json; widths are in elements, not bytes."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    tied_head: bool = True
    gated_mlp: bool = True
    """Llama-like gate/up/down; False: two matrices (GPT-2, Phi-2)."""
    qkv_bias: bool = False
    linear_bias: bool = False
    """Every linear layer has a bias (GPT-2, Phi-2, StarCoder2)."""
    qk_norm: bool = False
    """RMSNorm on queries and keys (Qwen3, Gemma3): their inputs are kept for the backward too."""
    norms_per_layer: int = 2
    norm_bias: bool = False
    """LayerNorm (weight and bias) instead of RMSNorm (weight)."""
    learned_positions: int = 0
    """Rows of a learned position table (GPT-2); 0 with rotary positions."""

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def linear_sizes(self) -> dict[str, tuple[int, int]]:
        """(in, out) of every linear layer of one block, by the name Llama-like models give it."""
        sizes = {
            "q_proj": (self.hidden, self.q_width),
            "k_proj": (self.hidden, self.kv_width),
            "v_proj": (self.hidden, self.kv_width),
            "o_proj": (self.q_width, self.hidden),
            "up_proj": (self.hidden, self.ffn),
            "down_proj": (self.ffn, self.hidden),
        }
        if self.gated_mlp:
            sizes["gate_proj"] = (self.hidden, self.ffn)
        return sizes

    @property
    def block_linear_parameters(self) -> int:
        """Weights of one block's matrices: what quantisation can shrink."""
        return sum(rows * columns for rows, columns in self.linear_sizes().values())

    @property
    def block_parameters(self) -> int:
        norm = self.hidden * (2 if self.norm_bias else 1)
        total = self.block_linear_parameters + self.norms_per_layer * norm
        if self.qk_norm:
            total += 2 * self.head_dim
        if self.linear_bias:
            total += sum(columns for _, columns in self.linear_sizes().values())
        elif self.qkv_bias:
            total += self.q_width + 2 * self.kv_width
        return total

    @property
    def embedding_parameters(self) -> int:
        """Token table, position table, and the head where it is a matrix of its own."""
        tables = 1 if self.tied_head else 2
        return self.vocab * self.hidden * tables + self.learned_positions * self.hidden

    @property
    def parameters(self) -> int:
        final_norm = self.hidden * (2 if self.norm_bias else 1)
        return self.layers * self.block_parameters + self.embedding_parameters + final_norm


class UnknownShape(ValueError):
    """A config.json whose memory we cannot model; the text says why."""


# config.json files spell the same number in several ways; the first name present wins.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "n_ctx"),
}
_TWO_MATRIX_MLP = {"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "phi", "starcoder2", "gpt_bigcode"}
_QK_NORM = {"qwen3", "gemma3", "gemma3_text"}
_BIAS_ON_QKV = {"qwen2"}
_LAYER_NORM = {"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "phi", "starcoder2", "stablelm"}
_FOUR_NORMS = {"gemma2", "gemma3", "gemma3_text"}


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape a transformers config.json describes; UnknownShape where it is none we model."""
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        config = {**config, **inner}
    kind = str(config.get("model_type", ""))
    experts = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    if experts:
        raise UnknownShape(f"a mixture of {experts} experts is not modelled")
    numbers = {name: _number(config, keys) for name, keys in _NAMES.items()}
    missing = [_NAMES[name][0] for name, value in numbers.items() if value is None and name != "context"]
    if missing:
        raise UnknownShape(f"config.json has no usable {', '.join(missing)}")
    hidden, heads = numbers["hidden"] or 0, numbers["heads"] or 0
    gpt2_like = kind in {"gpt2", "gpt_bigcode"}
    ffn = _number(config, ("intermediate_size", "ffn_dim", "n_inner")) or 4 * hidden
    kv_heads = _number(config, ("num_key_value_heads",)) or (1 if config.get("multi_query") else heads)
    positions = (numbers["context"] or 0) if gpt2_like or kind == "opt" else 0
    return ModelShape(
        layers=numbers["layers"] or 0,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_number(config, ("head_dim",)) or hidden // heads,
        vocab=numbers["vocab"] or 0,
        context=numbers["context"] or 0,
        tied_head=bool(config.get("tie_word_embeddings", _tied_by_default(kind))),
        gated_mlp=kind not in _TWO_MATRIX_MLP,
        qkv_bias=kind in _BIAS_ON_QKV or bool(config.get("attention_bias") or config.get("qkv_bias")),
        linear_bias=kind in _TWO_MATRIX_MLP and config.get("use_bias", True) is not False,
        qk_norm=kind in _QK_NORM,
        norms_per_layer=4 if kind in _FOUR_NORMS else (1 if kind in {"phi", "gptj"} else 2),
        norm_bias=kind in _LAYER_NORM,
        learned_positions=positions,
    )


def _tied_by_default(kind: str) -> bool:
    """What transformers assumes where config.json is silent: tied for Gemma and GPT-2, else not."""
    return kind.startswith("gemma") or kind in {"gpt2", "gpt_bigcode", "opt", "starcoder2"}


def _number(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None

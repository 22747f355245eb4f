"""The sizes of a decoder-only language model that determine memory and time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from expert.planning.models.architectures import ARCHITECTURES, FUSED_TYPES, Architecture

OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes from a config.json; widths are in elements, not bytes."""

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
    """RMSNorm on queries and keys (Qwen3, Gemma3), whose inputs are also kept for the backward."""
    qk_norm_full_width: bool = False
    """That norm has a weight per element of all heads (OLMo-2), not one head's shared by all."""
    norms_per_layer: int = 2
    norm_bias: bool = False
    """LayerNorm (weight and bias) instead of RMSNorm (weight)."""
    learned_positions: int = 0
    """Rows of a learned position table (GPT-2); 0 with rotary positions."""
    head_bias: bool = False
    """The output head has a bias (Phi-2)."""
    after_norms: bool = False
    """What attention and MLP add to the residual is normed first, and kept for the backward."""
    own_scores: str = ""
    """What the model does to attention scores that few kernels do."""
    merged: str = ""
    """gate and up are one layer ("mlp"), or q, k and v, too ("all")."""
    fused: bool = True
    """Fused blocks compute it."""
    output_gate: bool = False
    """Queries come with a gate as wide as they are (Qwen3.5)."""
    recurrent: str = ""
    """The kind of layer that carries a state instead of attending; "": there is none."""
    recurrent_layers: int = 0
    widest_head: int = 0
    """Where heads of some layers are wider; else 0."""
    other_parameters: int = 0
    """Beyond equal blocks: embeddings of every layer, less the keys that layers share (Gemma 4)."""
    other_bytes: int = 0
    """What such embeddings keep for the backward, per token."""
    experts: int = 0
    """In every layer instead of an MLP."""
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Of an expert that every token has, with a gate of its own; 0: there is none."""
    linear_key_heads: int = 0
    """In layers of linear attention; and the widths of such heads."""
    linear_value_heads: int = 0
    linear_key_width: int = 0
    linear_value_width: int = 0

    @cached_property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @cached_property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @cached_property
    def linear_sizes(self) -> Mapping[str, tuple[int, int]]:
        """(in, out) of every linear layer of one block, by its Llama-like name."""
        sizes = {
            "q_proj": (self.hidden, self.q_width * (2 if self.output_gate else 1)),
            "k_proj": (self.hidden, self.kv_width),
            "v_proj": (self.hidden, self.kv_width),
            "o_proj": (self.q_width, self.hidden),
            "up_proj": (self.hidden, self.ffn),
            "down_proj": (self.ffn, self.hidden),
        }
        if self.experts:
            del sizes["up_proj"], sizes["down_proj"]
            if self.shared_ffn:
                inputs = dict.fromkeys(("gate_proj", "up_proj"), (self.hidden, self.shared_ffn))
                sizes |= inputs | {"down_proj": (self.shared_ffn, self.hidden)}
                sizes["shared_expert_gate"] = (self.hidden, 1)
        elif self.gated_mlp:
            sizes["gate_proj"] = (self.hidden, self.ffn)
        together: dict[str, tuple[str, ...]] = {}
        if self.merged:
            together["gate_up_proj"] = ("gate_proj", "up_proj")
        if self.merged == "all":
            together["qkv_proj"] = ("q_proj", "k_proj", "v_proj")
        for name, parts in together.items():
            sizes[name] = self.hidden, sum(sizes.pop(part)[1] for part in parts)
        return sizes

    @cached_property
    def block_linear_parameters(self) -> int:
        """Weights of one block's matrices, which can be quantised."""
        return sum(rows * columns for rows, columns in self.linear_sizes.values())

    @cached_property
    def linear_parameters(self) -> int:
        """Those of all blocks."""
        sizes = self.linear_sizes
        attention = sum(math.prod(sizes[name]) for name in OF_ATTENTION if name in sizes)
        other = sum(math.prod(size) for size in self.recurrent_sizes.values())
        every = self.layers * self.block_linear_parameters
        return every + self.recurrent_layers * (other - attention)

    @property
    def untried(self) -> str:
        """What compiled blocks and CUDA graphs were not tried with; "": nothing."""
        if self.recurrent:
            return "layers that carry a state"
        return "experts" if self.experts else "keys shared by layers" * bool(self.widest_head)

    @property
    def active_parameters(self) -> int:
        """Those that compute a token."""
        idle = (self.experts - self.experts_per_token) * 3 * self.hidden * self.expert_ffn
        return self.parameters - self.layers * idle

    @cached_property
    def recurrent_sizes(self) -> Mapping[str, tuple[int, int]]:
        """(in, out) of the linear layers that a layer with a state has instead of attention's."""
        hidden = self.hidden
        if self.recurrent == "conv":
            return {"in_proj": (hidden, 3 * hidden), "out_proj": (hidden, hidden)}
        heads = self.linear_value_heads
        if not heads:
            return {}
        keys = self.linear_key_heads * self.linear_key_width
        values = heads * self.linear_value_width
        return {
            "in_proj_qkv": (hidden, 2 * keys + values),
            "in_proj_z": (hidden, values),
            "in_proj_b": (hidden, heads),
            "in_proj_a": (hidden, heads),
            "out_proj": (values, hidden),
        }

    @cached_property
    def recurrent_bytes(self) -> int:
        """What such a layer keeps for its backward per token beside its input, norms and MLP, in
        transformers' own code: linear attention in float32 and in chunks of 64."""
        if self.recurrent == "conv":
            return 8 * self.hidden
        mixed = self.recurrent_sizes.get("in_proj_qkv", (0, 0))[1]
        of_head = 5 * 64 * 4 + 36 * self.linear_key_width + 28 * self.linear_value_width
        return self.linear_value_heads * of_head + 2 * mixed

    @cached_property
    def block_parameters(self) -> int:
        norm = self.hidden * (2 if self.norm_bias else 1)
        total = self.block_linear_parameters + self.norms_per_layer * norm
        if self.qk_norm:
            wide = self.qk_norm_full_width
            total += self.q_width + self.kv_width if wide else 2 * self.head_dim
        if self.linear_bias:
            total += sum(columns for _, columns in self.linear_sizes.values())
        elif self.qkv_bias:
            total += self.q_width + 2 * self.kv_width
        return total

    @cached_property
    def rest_parameters(self) -> int:
        """Weights outside the blocks: token and position table, head if not tied, last norm."""
        rows = self.vocab * (1 if self.tied_head else 2) + self.learned_positions
        head_bias = self.vocab if self.head_bias else 0
        return (rows + (2 if self.norm_bias else 1)) * self.hidden + head_bias

    @cached_property
    def parameters(self) -> int:
        small = self.layers * (self.block_parameters - self.block_linear_parameters)
        if self.recurrent:
            # The convolution of three or four tokens, decays and norm, instead of norms of heads.
            heads = self.linear_value_heads
            mixed = self.recurrent_sizes.get("in_proj_qkv", (0, 0))[1]
            own = 4 * mixed + 2 * heads + self.linear_value_width if heads else 3 * self.hidden
            small += self.recurrent_layers * (own - 2 * self.head_dim * self.qk_norm)
        return self.linear_parameters + small + self.rest_parameters + self.other_parameters


# Far beyond any layer count, width or vocabulary; a larger number is a mistake.
_ABSURD = 10**8


UNKNOWN_EXPERTS = "experts is not modelled"


class UnknownShape(ValueError):
    """A config.json whose memory cannot be estimated; the text says why."""


# config.json files have several names for the same number; the first one present wins.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
}
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "n_ctx")
_FFN_NAMES = ("block_ff_dim", "intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size")
_EXPERT_NAMES = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape in a transformers config.json; UnknownShape if it is not supported."""
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        config = {**config, **inner}
    kind = str(config.get("model_type", ""))
    known = ARCHITECTURES.get(kind, Architecture())
    config = {**known.defaults, **config}
    experts = next((config[key] for key in _EXPERT_NAMES if config.get(key)), None)
    skips = config.get("decoder_sparse_step", 1) != 1  # only some layers have experts
    if experts and (not known.experts or config.get("mlp_only_layers") or skips):
        raise UnknownShape(f"a mixture of {experts} {UNKNOWN_EXPERTS}")
    if config.get("kv_lora_rank"):
        raise UnknownShape("multi-head latent attention (kv_lora_rank) is not modelled")
    if config.get("is_encoder_decoder"):
        raise UnknownShape("an encoder-decoder model is not modelled")
    sizes = _sizes(config, kind)
    heads = sizes["heads"]
    context = _number(config, _CONTEXT_NAMES) or 0
    tied = known.tied or kind.startswith("gemma")
    bias_on_qkv = any(config.get(key) for key in ("attention_bias", "qkv_bias", "use_qkv_bias"))
    kv_heads = _number(config, ("num_key_value_heads",))
    shape = ModelShape(
        layers=sizes["layers"],
        hidden=sizes["hidden"],
        ffn=sizes["ffn"],
        heads=heads,
        kv_heads=kv_heads or (1 if config.get("multi_query") else heads),
        head_dim=_number(config, ("head_dim",)) or sizes["hidden"] // heads,
        vocab=sizes["vocab"],
        context=context,
        tied_head=bool(config.get("tie_word_embeddings", config.get("tie_embedding", tied))),
        gated_mlp=known.mlp != "plain",
        qkv_bias=known.bias == "qkv" or bias_on_qkv,
        linear_bias=known.bias == "all" and config.get("use_bias", True) is not False,
        qk_norm=bool(known.head_norms),
        qk_norm_full_width=known.head_norms == "width",
        norms_per_layer=known.norms_per_layer,
        norm_bias=known.norm == "layer",
        # OPT's position table starts two rows in.
        learned_positions=(context + 2 * (kind == "opt")) * known.learned_positions,
        head_bias=known.head_bias,
        after_norms=known.norms in ("around", "after"),
        own_scores=_own_scores(config, known),
        merged=known.merged,
        fused=kind in FUSED_TYPES,
        output_gate=known.output_gate,
        **_recurrence(config, known, sizes),
    )
    if known.experts:
        return replace(shape, **_of_experts(config, shape))
    return replace(shape, **_of_shared_keys(config, shape)) if known.shares_keys else shape


def _own_scores(config: Mapping[str, Any], known: Architecture) -> str:
    if known.sinks:
        return "adds one of no token to the attention scores"
    capped = known.caps_scores and config.get("attn_logit_softcapping", True) is not None
    return "caps attention scores" if capped else ""


def _of_experts(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    experts, chosen = _number(config, _EXPERT_NAMES), _number(config, ("num_experts_per_tok",))
    ffn = _number(config, ("moe_intermediate_size", "intermediate_size"))
    if not (experts and chosen and ffn):
        raise UnknownShape("config.json has no usable num_experts_per_tok")
    each = experts * (3 * shape.hidden * ffn + shape.hidden)
    shared = _number(config, ("shared_expert_intermediate_size",)) or 0
    if ARCHITECTURES[str(config.get("model_type"))].sinks:  # with biases, the router too
        each += experts * (2 * ffn + shape.hidden + 1) + shape.heads
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "expert_ffn": ffn,
        "shared_ffn": shared,
        "ffn": chosen * ffn + shared,
        "other_parameters": shape.layers * each,
    }


def _of_shared_keys(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """How the blocks of Gemma 4 differ from each other, and the embeddings of each."""

    def number(key: str, usual: int = 0) -> int:
        return _number(config, (key,)) or usual

    hidden, heads, layers = shape.hidden, shape.heads, shape.layers
    wide = number("global_head_dim", 512)
    own_key = "hidden_size_per_layer_input"
    own_width = number(own_key, 0 if own_key in config else 256)
    written = config.get("per_layer_config")  # as transformers saves it: {"05": {"head_dim": 512}}
    of_layers = (
        {int(key): each for key, each in written.items() if str(key).isdigit()}
        if isinstance(written, Mapping)
        else {}
    )
    kinds = config.get("layer_types") or [
        "full_attention" if i % 6 == 5 else "" for i in range(layers)
    ]
    first_shared, equal = layers - number("num_kv_shared_layers"), config.get("attention_k_eq_v")
    total = widest = 0
    for place, kind in enumerate(kinds[:layers]):
        width, keys = shape.head_dim, shape.kv_heads
        if kind == "full_attention":
            own = of_layers.get(place) or {}
            width = own.get("head_dim", wide)
            keys = own.get("num_key_value_heads") or keys
            if equal and not own:
                keys = number("num_global_key_value_heads", keys)
        widest = max(widest, width)
        shared, alike = place >= first_shared, bool(equal) and kind == "full_attention"
        total += 2 * hidden * heads * width + width  # queries, output, norm of queries
        total += 0 if shared else (1 if alike else 2) * hidden * keys * width + width
        ffn = shape.ffn * (2 if shared and config.get("use_double_wide_mlp") else 1)
        total += 3 * hidden * ffn + 4 * hidden
        total += 2 * hidden * own_width + hidden if own_width else 0
    if own_width:
        rows = number("vocab_size_per_layer_input", shape.vocab) + hidden
        total += rows * layers * own_width + own_width
    return {
        "widest_head": widest,
        "other_parameters": total - layers * shape.block_parameters,
        "other_bytes": layers * (12 * own_width + 8 * hidden) if own_width else 0,
    }


def _recurrence(
    config: Mapping[str, Any], known: Architecture, sizes: Mapping[str, int]
) -> dict[str, Any]:
    """The layers that carry a state."""
    if not known.recurrent:
        return {}
    layers, kinds = sizes["layers"], config.get("layer_types")
    attends = config.get("full_attn_idxs")
    if isinstance(attends, list):
        kinds = [known.recurrent if i not in attends else "" for i in range(layers)]
    elif not isinstance(kinds, list):
        every = _number(config, ("full_attention_interval",)) or 4
        kinds = [known.recurrent if (i + 1) % every else "" for i in range(layers)]
    found: dict[str, Any] = {"recurrent": known.recurrent}
    found["recurrent_layers"] = sum(kind == known.recurrent for kind in kinds[:layers])
    if known.recurrent == "linear_attention":
        for which, usual in (("key", 16), ("value", 32)):
            heads, width = f"linear_num_{which}_heads", f"linear_{which}_head_dim"
            found[f"linear_{which}_heads"] = _number(config, (heads,)) or usual
            found[f"linear_{which}_width"] = _number(config, (width,)) or 128
    return found


def _sizes(config: Mapping[str, Any], kind: str) -> dict[str, int]:
    """The required sizes; UnknownShape names all that are missing."""
    sizes = {name: _number(config, keys) for name, keys in _NAMES.items()}
    sizes["ffn"] = _number(config, _FFN_NAMES)
    known = ARCHITECTURES.get(kind, Architecture())
    if sizes["ffn"] is None and sizes["hidden"] and known.ffn_is_four_times_hidden:
        sizes["ffn"] = 4 * sizes["hidden"]
    elif sizes["ffn"] and kind == "lfm2" and config.get("block_auto_adjust_ff_dim", True):
        wide = int(int(2 * sizes["ffn"] / 3) * (config.get("block_ffn_dim_multiplier") or 1))
        step = _number(config, ("block_multiple_of",)) or 256
        sizes["ffn"] = -(-wide // step) * step
    spelled = {name: keys[0] for name, keys in _NAMES.items()} | {"ffn": _FFN_NAMES[0]}
    missing = [spelled[name] for name, value in sizes.items() if value is None]
    if missing:
        raise UnknownShape(f"config.json has no usable {', '.join(missing)}")
    return {name: value for name, value in sizes.items() if value is not None}


def _number(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _ABSURD:
            return value
    return None

"""Model families of llama.cpp: hyperparameters, and tensors under its names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from expert.jobs.export.checks import CannotExport

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Family:
    """How llama.cpp treats a model_type of transformers."""

    arch: str
    """Name in gguf.MODEL_ARCH."""
    interleaved: bool = False
    """RoPE rotates neighbouring rows, so rows of q and k are stored in that order."""
    norm_plus_one: bool = False
    """Norm weights are stored plus one, which transformers adds when it computes."""
    activation: str = "silu"
    windows: bool = False
    """llama.cpp supports its sliding windows."""
    tied: bool = False
    """llama.cpp always uses the embedding as the head."""


FAMILIES = {
    "llama": Family("LLAMA", interleaved=True),
    "mistral": Family("LLAMA", interleaved=True),
    "qwen2": Family("QWEN2"),
    "qwen3": Family("QWEN3"),
    "gemma": Family("GEMMA", norm_plus_one=True, activation="gelu_pytorch_tanh", tied=True),
    "gemma2": Family(
        "GEMMA2", norm_plus_one=True, activation="gelu_pytorch_tanh", windows=True, tied=True
    ),
    "gemma3_text": Family(
        "GEMMA3", norm_plus_one=True, activation="gelu_pytorch_tanh", windows=True
    ),
    "phi3": Family("PHI3"),
}
_ROPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def family_of(config: Any) -> Family:
    """The family of a model; CannotExport, with all reasons, if llama.cpp or this writer does not
    support it."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise CannotExport(
            f"--gguf: model_type {config.model_type!r} is not supported  (supported: "
            f"{', '.join(FAMILIES)}; or export --merged and convert it with llama.cpp)"
        )
    wrong = list(_unsupported_features(config, family))
    if wrong:
        raise CannotExport(
            f"--gguf: llama.cpp would compute this model differently: {'; '.join(wrong)}  (export "
            "it with --merged)"
        )
    return family


def _unsupported_features(config: Any, family: Family) -> Iterator[str]:
    own = getattr(config, "hidden_activation", None) or config.hidden_act
    gelu = ("gelu", "gelu_new", "gelu_pytorch_tanh") if family.norm_plus_one else ()
    if own != family.activation and own not in gelu:
        yield f"its activation is {own}, not {family.activation}"
    rope = _rope(config)
    kind = rope.get("rope_type", "default")
    if kind not in _ROPES:
        yield f"rope_type {kind} is not supported"
    if family.arch != "PHI3" and rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield "RoPE rotates only a part of each head"
    if (
        family.arch == "PHI3"
        and _head_dim(config) * config.num_attention_heads != config.hidden_size
    ):
        yield "heads times head_dim is not hidden_size"
    scalar = getattr(config, "query_pre_attn_scalar", None)
    if scalar is not None and not math.isclose(scalar, _expected_scalar(config)):
        yield f"query_pre_attn_scalar is {scalar}, not {_expected_scalar(config):g}"
    if family.tied and not config.tie_word_embeddings:
        yield "its head is not tied to its embedding"
    if getattr(config, "use_bidirectional_attention", False):
        yield "its attention is bidirectional"


def _expected_scalar(config: Any) -> float:
    """llama.cpp recognises the largest Gemma by its number of layers, and uses hidden_size / heads
    for it."""
    largest = {"gemma2": 46, "gemma3_text": 62}.get(config.model_type)
    if config.num_hidden_layers == largest:
        return float(config.hidden_size // config.num_attention_heads)
    return float(_head_dim(config))


def _head_dim(config: Any) -> int:
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


def _rope(config: Any, layers: str = "full_attention") -> Mapping[str, Any]:
    """RoPE parameters; models with sliding windows have them per kind of layer."""
    parameters: Mapping[str, Any] = config.rope_parameters
    of_layers: Mapping[str, Any] = parameters.get(layers, parameters)
    return of_layers


def window_of(config: Any) -> int | None:
    """The sliding window of some layers; None for full attention."""
    kinds = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    if config.model_type in ("mistral", "phi3"):  # in all layers, whatever layer_types says
        return window
    return window if "sliding_attention" in kinds else None


def add_settings(writer: Any, config: Any, family: Family) -> None:
    """Write the hyperparameters under llama.cpp's keys."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads or config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, key, None):
            getattr(writer, f"add_{key}")(float(getattr(config, key)))
    window = window_of(config)
    if family.windows and window:
        writer.add_sliding_window(window)
        pattern = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_sliding_window_pattern(pattern)
    _add_rope(writer, config, family)


def _add_rope(writer: Any, config: Any, family: Family) -> None:
    import gguf

    rope = _rope(config)
    writer.add_rope_dimension_count(int(_head_dim(config) * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if family.arch == "GEMMA3":
        local = _rope(config, "sliding_attention")
        writer.add_rope_freq_base_swa(float(local["rope_theta"]))
    kind = rope.get("rope_type", "default")
    before = rope.get("original_max_position_embeddings")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(int(before or config.max_position_embeddings))
        if rope.get("beta_fast") is not None:
            writer.add_rope_scaling_yarn_beta_fast(float(rope["beta_fast"]))
        if rope.get("beta_slow") is not None:
            writer.add_rope_scaling_yarn_beta_slow(float(rope["beta_slow"]))
    if kind == "longrope":
        original = before or config.original_max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(int(original))
        writer.add_rope_scaling_attn_factors(_long_attention(config, rope, original))


def _long_attention(config: Any, rope: Mapping[str, Any], original: int) -> float:
    own = rope.get("attention_factor")
    if own is not None:
        return float(own)
    factor = rope.get("factor") or config.max_position_embeddings / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


class StoredTensor(NamedTuple):
    """A tensor of the file and its source in the model."""

    name: str
    source: str
    """Its name in the model; "" for tensors computed from the config."""
    shape: tuple[int, ...]
    to_file: Callable[[Tensor], Tensor]
    to_model: Callable[[Tensor], Tensor]
    computed: Tensor | None = None


def stored_tensors(model: Any, family: Family) -> list[StoredTensor]:
    """Every tensor of the file, in order."""
    config = model.config
    stored = list(_rope_factor_tensors(config))
    for source, tensor in model.state_dict().items():
        if source == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = file_name(source, family, config)
        if name is None:
            raise CannotExport(
                f"--gguf: llama.cpp has no name for the tensor {source}  (export it with --merged)"
            )
        to_file, to_model = tensor_converters(name, family, config)
        stored.append(StoredTensor(name, source, tuple(tensor.shape), to_file, to_model))
    return stored


def file_name(source: str, family: Family, config: Any) -> str | None:
    """llama.cpp's name for a tensor of transformers; None if it has none."""
    names = _names(family.arch, config.num_hidden_layers)
    name: str | None = names.get_name(source, try_suffixes=(".weight", ".bias"))
    return name


@lru_cache(maxsize=2)
def _names(arch: str, layers: int) -> Any:
    import gguf

    return gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], layers)


def tensor_converters(
    name: str, family: Family, config: Any
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Functions that convert a tensor for the file, and back."""
    part = name.split(".")[-2]
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    if family.interleaved and part in heads:
        count = heads[part] or config.num_attention_heads
        return lambda t: _pairs(t, count), lambda t: _halves(t, count)
    if family.norm_plus_one and part.endswith("norm"):
        return lambda t: t + 1, lambda t: t - 1
    return _same, _same


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _pairs(tensor: Tensor, heads: int) -> Tensor:
    """Order the rows of each head so that RoPE rotates neighbours."""
    rows = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, -1)
    return rows.transpose(1, 2).reshape(tensor.shape)


def _halves(tensor: Tensor, heads: int) -> Tensor:
    rows = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, -1)
    return rows.transpose(1, 2).reshape(tensor.shape)


def _rope_factor_tensors(config: Any) -> Iterator[StoredTensor]:
    """RoPE factors, which slow down the rotation of each pair of a head."""
    import torch

    rope = _rope(config)
    factors: dict[str, Any] = {}
    if rope.get("rope_type") == "llama3":
        factors["rope_freqs.weight"] = _llama3_factors(rope, _head_dim(config))
    if rope.get("rope_type") == "longrope":
        factors["rope_factors_long.weight"] = rope["long_factor"]
        factors["rope_factors_short.weight"] = rope["short_factor"]
    for name, values in factors.items():
        computed = torch.tensor(values, dtype=torch.float32)
        yield StoredTensor(name, "", tuple(computed.shape), _same, _same, computed)


def _llama3_factors(rope: Mapping[str, Any], head: int) -> list[float]:
    """1 for fast pairs, the factor for slow ones, interpolated in between."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    before = rope["original_max_position_embeddings"]
    factors = []
    for pair in range(0, head, 2):
        turns = before * rope["rope_theta"] ** (-pair / head) / (2 * math.pi)
        part = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - part) / factor + part))
    return factors

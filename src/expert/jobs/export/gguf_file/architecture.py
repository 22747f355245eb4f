"""Model families of llama.cpp: hyperparameters, and tensors under its names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from expert.core.errors import ExpertError
from expert.planning.models.architectures import ARCHITECTURES, Architecture, Gguf

if TYPE_CHECKING:
    from torch import Tensor
_SILU, _GELU = ("silu",), ("gelu", "gelu_new", "gelu_pytorch_tanh")
_ROPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def family_of(config: Any) -> Gguf:
    """The family of a model; ExpertError, with all reasons, if llama.cpp or this writer does not
    support it."""
    known = ARCHITECTURES.get(config.model_type, Architecture())
    family = known.gguf
    if family is None:
        supported = ", ".join(kind for kind, each in ARCHITECTURES.items() if each.gguf)
        fix = f"supported: {supported}; or export --merged and convert it with llama.cpp"
        raise ExpertError(f"--gguf: model_type {config.model_type!r} is not supported  ({fix})")
    rope, head, heads = _rope(config), _head_dim(config), config.num_attention_heads
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    kind, is_phi = rope.get("rope_type", "default"), family.arch == "PHI3"
    scale = config.hidden_size // heads if config.num_hidden_layers == family.largest else head
    scalar = getattr(config, "query_pre_attn_scalar", None)
    problems = {
        f"its activation is {activation}": (
            activation not in (_GELU if known.mlp == "gelu" else _SILU)
        ),
        f"rope_type {kind} is not supported": kind not in _ROPES,
        "RoPE rotates only a part of each head": (
            not is_phi and rope.get("partial_rotary_factor", 1.0) != 1.0
        ),
        "heads times head_dim is not hidden_size": is_phi and head * heads != config.hidden_size,
        f"query_pre_attn_scalar is {scalar}, not {scale}": (
            scalar is not None and not math.isclose(scalar, scale)
        ),
        "its head is not tied to its embedding": family.tied and not config.tie_word_embeddings,
        "its attention is bidirectional": getattr(config, "use_bidirectional_attention", False),
    }
    if wrong := [text for text, applies in problems.items() if applies]:
        what = f"llama.cpp would compute this model differently: {'; '.join(wrong)}"
        raise ExpertError(f"--gguf: {what}  (export it with --merged)")
    return family


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
    everywhere = ARCHITECTURES[config.model_type].window_everywhere
    if everywhere or "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        return getattr(config, "sliding_window", None)
    return None


def add_settings(writer: Any, config: Any, family: Gguf) -> None:
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


def _add_rope(writer: Any, config: Any, family: Gguf) -> None:
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
        for key in ("beta_fast", "beta_slow"):
            if rope.get(key) is not None:
                getattr(writer, f"add_rope_scaling_yarn_{key}")(float(rope[key]))
    if kind == "longrope":
        original = before or config.original_max_position_embeddings
        attention = rope.get("attention_factor")
        if attention is None:
            factor = rope.get("factor") or config.max_position_embeddings / original
            attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        writer.add_rope_scaling_orig_ctx_len(int(original))
        writer.add_rope_scaling_attn_factors(float(attention))


class StoredTensor(NamedTuple):
    """A tensor of the file and its source in the model."""

    name: str
    source: str
    """Its name in the model; "" for tensors computed from the config."""
    shape: tuple[int, ...]
    to_file: Callable[[Tensor], Tensor]
    to_model: Callable[[Tensor], Tensor]
    computed: Tensor | None = None


def stored_tensors(model: Any, family: Gguf) -> list[StoredTensor]:
    """Every tensor of the file, in order."""
    config = model.config
    stored = list(_rope_factor_tensors(config))
    for source, tensor in model.state_dict().items():
        if source == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = file_name(source, family, config)
        if name is None:
            what = f"llama.cpp has no name for the tensor {source}"
            raise ExpertError(f"--gguf: {what}  (export it with --merged)")
        to_file, to_model = tensor_converters(name, family, config)
        stored.append(StoredTensor(name, source, tuple(tensor.shape), to_file, to_model))
    return stored


def file_name(source: str, family: Gguf, config: Any) -> str | None:
    """llama.cpp's name for a tensor of transformers; None if it has none."""
    names = _names(family.arch, config.num_hidden_layers)
    name: str | None = names.get_name(source, try_suffixes=(".weight", ".bias"))
    return name


@lru_cache(maxsize=2)
def _names(arch: str, layers: int) -> Any:
    import gguf

    return gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], layers)


def tensor_converters(
    name: str, family: Gguf, config: Any
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Functions that convert a tensor for the file, and back."""
    part = name.split(".")[-2]
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    if family.interleaved and part in heads:
        count = heads[part] or config.num_attention_heads
        return lambda t: _pairs(t, count), lambda t: _halves(t, count)
    if ARCHITECTURES[config.model_type].norm == "rms 1+w" and part.endswith("norm"):
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

    rope, head = _rope(config), _head_dim(config)
    factors: dict[str, Any] = {}
    if rope.get("rope_type") == "llama3":
        # 1 for fast pairs, the factor for slow ones, interpolated in between.
        factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
        before, slowed = rope["original_max_position_embeddings"], []
        for pair in range(0, head, 2):
            turns = before * rope["rope_theta"] ** (-pair / head) / (2 * math.pi)
            part = min(max((turns - low) / (high - low), 0.0), 1.0)
            slowed.append(1 / ((1 - part) / factor + part))
        factors["rope_freqs.weight"] = slowed
    if rope.get("rope_type") == "longrope":
        factors["rope_factors_long.weight"] = rope["long_factor"]
        factors["rope_factors_short.weight"] = rope["short_factor"]
    for name, values in factors.items():
        computed = torch.tensor(values, dtype=torch.float32)
        yield StoredTensor(name, "", tuple(computed.shape), _same, _same, computed)

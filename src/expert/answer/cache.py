"""Keys and values at fixed memory addresses, and attention for single-token decoding steps.

Every decoding step then does the same to the same memory, so that it can be captured as a CUDA
graph.
"""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from expert.planning.models.architectures import ARCHITECTURES

DECODING_ATTENTION = "expert_answering"
"""The name under which transformers knows this attention."""
CACHE_ALIGNMENT = 16
"""Cache lengths are a multiple of this: kernels need aligned mask rows."""


def attention_for(config: Any) -> str:
    """The name of the attention that a model answers with: eager for what SDPA does not do to
    scores."""
    if _has_own_scores(config):
        return "eager"
    AttentionInterface.register(DECODING_ATTENTION, _decoding_attention)
    AttentionMaskInterface.register(DECODING_ATTENTION, sdpa_mask)
    return DECODING_ATTENTION


def _has_own_scores(config: Any) -> bool:
    """Whether scores are capped (Gemma 2), or have one of no token beside them (gpt-oss)."""
    config = config.get_text_config()
    known = ARCHITECTURES.get(config.model_type)
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return capped or (known is not None and known.sinks)


def _decoding_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """SDPA; for a single token without copying keys that several heads share."""
    rows, heads, length, width = query.shape
    groups = key.shape[1]
    if length > 1 or others.get("position_bias") is not None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return output
    # Treat the heads that share keys as several tokens of one head.
    grouped = query.reshape(rows, groups, heads // groups, width)
    attended = F.scaled_dot_product_attention(grouped, key, value, attention_mask, scale=scaling)
    return attended.reshape(rows, 1, heads, value.shape[-1]), None


def supports_fixed_cache(model: Any) -> bool:
    """Whether every layer of a model keeps all keys and values, and it takes position_ids."""
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if not takes_positions or _has_own_scores(model.config):
        return False
    layers = DynamicCache(config=model.config).layers
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


_LAYER: Any = importlib.import_module("transformers.cache_utils").CacheLayerMixin  # is untyped


class FixedLayer(_LAYER):  # type: ignore[misc]
    """The keys and values of one layer, written at positions that are read from the device."""

    keys: Tensor
    values: Tensor

    places: Tensor
    """The position in each row that is written next."""
    index: Tensor
    """The same for every row and head, counted through the layer."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True

    @classmethod
    def like(cls, layer: Any, rows: int, size: int) -> FixedLayer:
        """An empty layer, of zeros: unused positions are masked but must not be NaN."""
        keys, values = (
            like.new_zeros((rows, like.shape[1], size, like.shape[3]))
            for like in (layer.keys, layer.values)
        )
        return cls(keys, values)

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        # One small kernel each; indexing by rows and positions took a single row 20 % more time.
        for own, new in ((self.keys, keys), (self.values, values)):
            width = own.shape[-1]
            # Values computed in bfloat16 may stand beside float32 keys, as under autocast.
            new = new.reshape(-1, width).to(own.dtype)
            own.view(-1, width).index_copy_(0, self.index, new)
        return self.keys, self.values

    def first(self, rows: int) -> FixedLayer:
        """The first rows, in the same memory."""
        return FixedLayer(self.keys[:rows], self.values[:rows])

    def lazy_initialization(self, keys: Tensor, values: Tensor) -> None:
        """Nothing to initialise."""

    def get_seq_length(self) -> Any:
        return self.places[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class PromptLayer(FixedLayer):
    """Stores the keys and values of one pass over prompts."""

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys.copy_(keys)
        self.values.copy_(values)
        return keys, values

    def get_seq_length(self) -> int:
        return 0


class PromptMemory:
    """Memory for the keys and values of prompts; all their shapes share it, since one is read at a
    time."""

    def __init__(self, past: Any, tokens: int) -> None:
        """For as many tokens of a model with this cache, padding included."""
        self._layers = [
            tuple(like.new_empty((tokens, like.shape[1], like.shape[3])) for like in pair)
            for pair in ((layer.keys, layer.values) for layer in past.layers)
        ]

    def for_transformers(self, rows: int, width: int) -> Any:
        """A cache that stores the keys and values of one pass over prompts of this shape."""

        def shaped(memory: Tensor) -> Tensor:
            part = memory[: rows * width]
            return part.view(rows, memory.shape[1], width, memory.shape[2])

        layers: list[Any] = [
            PromptLayer(shaped(keys), shaped(values)) for keys, values in self._layers
        ]
        return Cache(layers=layers)


def last_positions(past: Any, rows: int, width: int) -> Any:
    """The keys and values of the first rows at the last positions, as prompts are left-padded."""
    layers = [
        SimpleNamespace(keys=layer.keys[:rows, :, -width:], values=layer.values[:rows, :, -width:])
        for layer in past.layers
    ]
    return SimpleNamespace(layers=layers)

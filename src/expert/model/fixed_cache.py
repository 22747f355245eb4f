"""A KV cache at a fixed memory address, and attention for single-token decoding steps.

Every decoding step then does the same to the same memory, so that it can be captured as a CUDA
graph. Rows with prompts of different lengths are right-aligned; the padding on the left is masked.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DECODING_ATTENTION = "expert_answering"
"""The name under which transformers knows this attention."""
CACHE_ALIGNMENT = 16
"""Cache lengths are a multiple of this: kernels need aligned mask rows."""


def register_decoding_attention() -> None:
    """Register this attention with transformers, with SDPA's masks."""
    interface = importlib.import_module("transformers").AttentionInterface
    masks = importlib.import_module("transformers.masking_utils")
    interface.register(DECODING_ATTENTION, _decoding_attention)
    masks.AttentionMaskInterface.register(DECODING_ATTENTION, masks.sdpa_mask)


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
    if others.get("softcap") is not None:
        return _capped(query, key, value, attention_mask, scaling, others["softcap"]), None
    if length > 1 or others.get("position_bias") is not None:
        plain = importlib.import_module("transformers.integrations.sdpa_attention")
        output: tuple[Tensor, None] = plain.sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return output
    # Treat the heads that share keys as several tokens of one head.
    grouped = query.reshape(rows, groups, heads // groups, width)
    attended = F.scaled_dot_product_attention(grouped, key, value, attention_mask, scale=scaling)
    return attended.reshape(rows, 1, heads, value.shape[-1]), None


def _capped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    cap: float,
) -> Tensor:
    """Attention with soft-capped scores, which SDPA does not support."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scores = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    scores = cap * torch.tanh(scores / cap)
    if mask is None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        mask = seen.tril(scores.shape[-1] - scores.shape[-2])
    if mask.dtype == torch.bool:
        # Not infinite: padding positions see nothing, and must not become NaN.
        least = max(torch.finfo(dtype).min for dtype in (scores.dtype, torch.float32))
        scores = scores.masked_fill(~mask, least)
    else:
        scores = scores + mask
    shares = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return (shares @ value).transpose(1, 2).contiguous()


def supports_fixed_cache(model: Any) -> bool:
    """Whether every layer of a model keeps all keys and values, and it takes position_ids."""
    cache = importlib.import_module("transformers.cache_utils")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    layers = cache.DynamicCache(config=model.config).layers
    return bool(layers) and all(type(layer) is cache.DynamicLayer for layer in layers)


class FixedCache:
    """The KV cache of all layers for a batch of rows, all filled up to the same position."""

    def __init__(self, rows: int, width: int, room: int) -> None:
        """For `rows` rows of at most `width` tokens, with `room` for more."""
        self.rows, self.filled = rows, width
        self.size = aligned_length(width + room)
        self.place: Any = None
        """Position of the next token, on the device, so that a CUDA graph can read it."""
        self.layers: list[Any] = []

    @property
    def is_full(self) -> bool:
        return self.filled == self.size

    def put(self, past: Any, rows: Tensor) -> None:
        """Copy the cache of some rows, which have the indices `rows` here."""
        if not self.layers:
            keys = past.layers[0].keys
            self.place = torch.full((1,), self.filled, device=keys.device)
            self.layers = [self._empty(layer.keys, layer.values) for layer in past.layers]
        for own, layer in zip(self.layers, past.layers, strict=True):
            places = slice(self.filled - layer.keys.shape[2], self.filled)
            own.keys[rows, :, places] = layer.keys
            own.values[rows, :, places] = layer.values

    def for_transformers(self, rows: int) -> Any:
        """The cache of the first `rows` rows, in the same memory."""
        layers = [layer.first(rows) for layer in self.layers]
        return importlib.import_module("transformers.cache_utils").Cache(layers=layers)

    def advance(self) -> None:
        """Count a token that was added to every row."""
        self.filled += 1

    def keep(self, index: Tensor) -> None:
        """Move these rows to the front, in place."""
        for layer in self.layers:
            for tensor in (layer.keys, layer.values):
                tensor[: len(index)] = tensor[index]

    def move(self, by: int) -> None:
        """Move all filled positions to the right, or to the left if negative, in place."""
        old, first = self.filled, max(0, -by)
        for layer in self.layers:
            for tensor in (layer.keys, layer.values):
                tensor[:, :, first + by : old + by] = tensor[:, :, first:old].clone()
        self.filled += by
        self.place.add_(by)

    def reallocate(self, rows: int, before: int, after: int) -> None:
        """Memory for `rows` rows, with positions added before and after; removed if negative. Layer
        by layer: a second copy of all layers may not fit."""
        pad = (0, 0, before, after, 0, 0, 0, max(0, rows - self.rows))
        for layer in self.layers:
            layer.keys = F.pad(layer.keys[:rows], pad)
            layer.values = F.pad(layer.values[:rows], pad)
        self.rows = rows
        self.filled += before
        self.size += before + after
        self.place.add_(before)

    def _empty(self, keys: Tensor, values: Tensor) -> Any:
        """An empty layer, of zeros: unused positions are masked but must not be NaN."""

        def room(like: Tensor) -> Tensor:
            shape = (self.rows, like.shape[1], self.size, like.shape[3])
            return torch.zeros(shape, dtype=like.dtype, device=like.device)

        return _layer_class()(room(keys), room(values), self.place)


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

        layers = [_prompt_layer_class()(*map(shaped, layer)) for layer in self._layers]
        return importlib.import_module("transformers.cache_utils").Cache(layers=layers)


def last_positions(past: Any, rows: int, width: int) -> Any:
    """The keys and values of the first rows at the last positions, as prompts are left-padded."""
    return SimpleNamespace(
        layers=[
            SimpleNamespace(
                keys=layer.keys[:rows, :, -width:], values=layer.values[:rows, :, -width:]
            )
            for layer in past.layers
        ]
    )


def aligned_length(places: int) -> int:
    """Round up to a multiple of CACHE_ALIGNMENT."""
    return -(-places // CACHE_ALIGNMENT) * CACHE_ALIGNMENT


@functools.cache
def _layer_class() -> Any:
    """The layer class of the cache; created here because transformers is imported lazily."""
    mixin: Any = importlib.import_module("transformers.cache_utils").CacheLayerMixin

    class FixedLayer(mixin):  # type: ignore[misc]
        def __init__(self, keys: Tensor, values: Tensor, place: Any) -> None:
            super().__init__()
            self.keys, self.values, self._place = keys, values, place
            self.is_initialized = True

        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            self.keys.index_copy_(2, self._place, keys)
            self.values.index_copy_(2, self._place, values)
            return self.keys, self.values

        def first(self, rows: int) -> FixedLayer:
            return FixedLayer(self.keys[:rows], self.values[:rows], self._place)

        def lazy_initialization(self, keys: Tensor, values: Tensor) -> None:
            """Nothing to initialise."""

        def get_seq_length(self) -> Any:
            return self._place[0]

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.keys.shape[2], 0

        def get_max_length(self) -> int:
            return int(self.keys.shape[2])

    return FixedLayer


@functools.cache
def _prompt_layer_class() -> Any:
    """The layer class of `PromptMemory`."""

    class PromptLayer(_layer_class()):  # type: ignore[misc]
        def __init__(self, keys: Tensor, values: Tensor) -> None:
            super().__init__(keys, values, place=None)

        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            self.keys.copy_(keys)
            self.values.copy_(values)
            return keys, values

        def get_seq_length(self) -> int:
            return 0

    return PromptLayer

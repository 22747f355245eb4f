"""Keys and values of many rows in memory that stays where it is, and attention for one more token.

A step that adds one token to every row does the same to the same memory each time, so that it can
be recorded and replayed. Rows whose prompts have different lengths end at the same place: theirs
stand to the right, and what is left of a row's beginning is masked.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ANSWERING = "expert_answering"
"""What transformers calls the attention of models that answer."""
EVEN = 16
"""Places of the memory are a multiple of this: kernels with a mask want its rows aligned."""


def register_answering() -> None:
    """Make the attention of answering known to transformers, with the masks of its SDPA."""
    interface = importlib.import_module("transformers").AttentionInterface
    masks = importlib.import_module("transformers.masking_utils")
    interface.register(ANSWERING, _answering_attention)
    masks.AttentionMaskInterface.register(ANSWERING, masks.sdpa_mask)


def _answering_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """SDPA; for one token a row without copying the keys that several heads share."""
    rows, heads, length, width = query.shape
    groups = key.shape[1]
    if others.get("softcap") is not None:
        return _capped(query, key, value, attention_mask, scaling, others["softcap"]), None
    if length > 1 or others.get("position_bias") is not None:
        plain = importlib.import_module("transformers.integrations.sdpa_attention")
        found: tuple[Tensor, None] = plain.sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return found
    # The heads that share keys ask like several tokens of one head.
    asking = query.reshape(rows, groups, heads // groups, width)
    told = F.scaled_dot_product_attention(asking, key, value, attention_mask, scale=scaling)
    return told.reshape(rows, 1, heads, value.shape[-1]), None


def _capped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    cap: float,
) -> Tensor:
    """Attention whose scores are held below a cap, which SDPA knows nothing of, written out."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scores = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    scores = cap * torch.tanh(scores / cap)
    if mask is None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        mask = seen.tril(scores.shape[-1] - scores.shape[-2])
    if mask.dtype == torch.bool:
        # Not infinite: a place of padding sees nothing, and must be a number all the same.
        least = max(torch.finfo(dtype).min for dtype in (scores.dtype, torch.float32))
        scores = scores.masked_fill(~mask, least)
    else:
        scores = scores + mask
    shares = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return (shares @ value).transpose(1, 2).contiguous()


def can_be_fixed(model: Any) -> bool:
    """Whether every layer of a model keeps all keys and values, and it takes positions."""
    cache = importlib.import_module("transformers.cache_utils")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    layers = cache.DynamicCache(config=model.config).layers
    return bool(layers) and all(type(layer) is cache.DynamicLayer for layer in layers)


class FixedCache:
    """What all layers remember of some rows: they have all been filled up to one place."""

    def __init__(self, rows: int, width: int, room: int) -> None:
        """For so many rows of at most so many tokens, with room for some more."""
        self.rows, self.filled = rows, width
        self.size = even(width + room)
        self.place: Any = None
        """Where the next token goes: a number on the device, so that a recorded step finds it."""
        self.layers: list[Any] = []

    @property
    def is_full(self) -> bool:
        return self.filled == self.size

    def put(self, past: Any, rows: Tensor) -> None:
        """Take what was remembered of some rows, which have these numbers here."""
        if not self.layers:
            keys = past.layers[0].keys
            self.place = torch.full((1,), self.filled, device=keys.device)
            self.layers = [self._empty(layer.keys, layer.values) for layer in past.layers]
        for own, layer in zip(self.layers, past.layers, strict=True):
            places = slice(self.filled - layer.keys.shape[2], self.filled)
            own.keys[rows, :, places] = layer.keys
            own.values[rows, :, places] = layer.values

    def for_transformers(self) -> Any:
        """The layers as transformers' models take them."""
        return importlib.import_module("transformers.cache_utils").Cache(layers=self.layers)

    def went_on(self) -> None:
        """A step has put a token to every row."""
        self.filled += 1

    def keep(self, index: Tensor) -> None:
        """These rows only, or some of them several times; layer by layer, as all of them at once
        may not fit twice."""
        self.rows = len(index)
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[index], layer.values[index]

    def reframe(self, before: int, after: int) -> None:
        """More places before those that are filled and after them; fewer where it is below 0."""
        self.filled += before
        self.size += before + after
        self.place.add_(before)
        for layer in self.layers:
            layer.keys = F.pad(layer.keys, (0, 0, before, after))
            layer.values = F.pad(layer.values, (0, 0, before, after))

    def _empty(self, keys: Tensor, values: Tensor) -> Any:
        """A layer without keys; what is not filled is masked, and must be a number all the same."""

        def room(like: Tensor) -> Tensor:
            shape = (self.rows, like.shape[1], self.size, like.shape[3])
            return torch.zeros(shape, dtype=like.dtype, device=like.device)

        return _layer_class()(room(keys), room(values), self.place)


def even(places: int) -> int:
    """So many places, and what is missing to whole blocks."""
    return -(-places // EVEN) * EVEN


@functools.cache
def _layer_class() -> Any:
    """The layer of a cache; made here, as transformers is not imported before it is needed."""
    mixin: Any = importlib.import_module("transformers.cache_utils").CacheLayerMixin

    class FixedLayer(mixin):  # type: ignore[misc]
        def __init__(self, keys: Tensor, values: Tensor, place: Tensor) -> None:
            super().__init__()
            self.keys, self.values, self._place = keys, values, place
            self.is_initialized = True

        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            self.keys.index_copy_(2, self._place, keys)
            self.values.index_copy_(2, self._place, values)
            return self.keys, self.values

        def lazy_initialization(self, keys: Tensor, values: Tensor) -> None:
            """There is nothing to be made."""

        def get_seq_length(self) -> Any:
            return self._place[0]

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.keys.shape[2], 0

        def get_max_length(self) -> int:
            return int(self.keys.shape[2])

    return FixedLayer

"""Decoding steps: the scores of every row's next token, in two implementations.

If a model allows it, the KV cache is at a fixed address: prompts are read in groups by length, and
on a GPU the step is captured as a CUDA graph and replayed. Other models (with sliding windows or
recurrent states) use transformers' growing cache.

Compared with transformers' generate (tiny, batched, one CPU thread, same answers): 147 tokens/s
here, 122 with its dynamic and 118 with its static cache on JSON rows; 327, 252 and 141 on SQL rows
(docs/benchmarks/answers-generate-cpu.json). It also has no CUDA graphs without compiling: captured
steps are 2.0 to 2.5 times as fast as the growing cache on an H200 (answers-h200.json).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

from expert.answer import cache
from expert.answer.cache import CACHE_ALIGNMENT, FixedLayer
from expert.parallel.graphs import Capture, CudaCapture, GraphsUnavailable, captured

COMPACT_BELOW = 0.75
"""Finished rows stay in the batch until only this share is unfinished: removing them copies the
whole cache."""
COMPACT_CAPTURED_BELOW = 0.5
"""The same threshold if the step must be captured again afterwards."""
NO_CONTEXT_LIMIT = 2**31
"""Context of a model that does not declare one."""
CACHE_GROWTH = {"cpu": 32, "cuda": 128}
"""Tokens by which the cache is extended at a time, or half its length if steps are captured. A
larger cache wastes attention on empty positions; a smaller one is extended more often, and each
time steps are captured again, which takes about as long as three uncaptured ones."""
OVERSIZED = 4
"""A cache is not used again for rows that need less than this share of its length."""

Group = Sequence[Sequence[int]]
"""Prompts that are read together, as tokens."""
Reader = Callable[[Group], tuple[Any, Tensor, Tensor]]
"""Reads left-padded prompts: returns the KV cache, the next tokens' scores and the mask."""


class AnswerModel:
    """A model that generates answers on its device."""

    def __init__(self, trained: Any, note: Callable[[str], None] = lambda text: None) -> None:
        """`trained`: a loaded model with its device, encoder and template."""
        self.trained, self.model, self.device = trained, trained.loaded.causal_lm, trained.device
        self.note = note
        prompts = trained.loaded.soft_prompts
        self.soft: Tensor | None = prompts.rows().detach() if prompts is not None else None
        self.soft_tokens = len(self.soft) if self.soft is not None else 0
        """Positions of the soft prompt before every prompt."""
        config = self.model.config.get_text_config()
        self.context: int = getattr(config, "max_position_embeddings", None) or NO_CONTEXT_LIMIT
        self.fixed = cache.supports_fixed_cache(self.model)
        self._can_capture = True

    @property
    def vocabulary(self) -> int:
        """Number of tokens that have a score."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values per token; 0 if the model's shape is unknown."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None)
        layers = getattr(config, "num_hidden_layers", None)
        if not (heads and layers):
            return 0
        differ = getattr(config, "is_heterogeneous", False)
        each = [config.per_layer_config[place] if differ else config for place in range(layers)]
        elements = sum(
            int(getattr(own, "num_key_value_heads", None) or heads)
            * int(getattr(own, "head_dim", None) or config.hidden_size // heads)
            for own in each
        )
        return 2 * elements * max(2, int(next(self.model.parameters()).element_size()))

    def free_bytes(self) -> int:
        """Free memory of the device, with what torch has reserved and does not use."""
        if self.device.type == "cuda":
            reserved = torch.cuda.memory_reserved(self.device)
            unused = reserved - torch.cuda.memory_allocated(self.device)
            return int(torch.cuda.mem_get_info(self.device)[0]) + unused
        return int(psutil.virtual_memory().available)

    def begin(self, prompts: Group, room: int) -> Steps:
        """Read prompts in one pass, for answers of at most `room` tokens."""
        if not self.fixed:
            return GrowingSteps(self, prompts)
        steps = FixedSteps(self, room, len(prompts))
        steps.join([prompts], range(len(prompts)))
        return steps

    def width_of(self, groups: Iterable[Group]) -> int:
        """Positions that the longest prompt takes."""
        return max(len(prompt) for group in groups for prompt in group) + self.soft_tokens

    def read(self, group: Group) -> tuple[Any, Tensor, Tensor]:
        """Read left-padded prompts: returns the KV cache, the next tokens' scores and the mask."""
        soft, soft_tokens = self.soft, self.soft_tokens
        width = self.width_of([group])
        ids, mask = (part.to(self.device) for part in padded(group, len(group), width))
        inputs = {"input_ids": ids}
        if soft is not None:
            words = self.model.get_input_embeddings()(ids)
            for place, prompt in enumerate(group):
                end = width - len(prompt)
                mask[place, end - soft_tokens :] = 1
                words[place, end - soft_tokens : end] = soft.to(words.device, words.dtype)
            inputs = {"inputs_embeds": words}
        output = self.model(
            **inputs,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
        )
        return output.past_key_values, output.logits[:, -1].float(), mask

    def recorder(self) -> Capture | None:
        """Captures the steps of one batch. Each batch gets its own: after running out of memory
        during a capture it cannot be trusted any more."""
        return step_capture(self.device) if self._can_capture else None

    def disable_graphs(self, reason: str) -> None:
        """Stop capturing: slower, with the same answers."""
        if self._can_capture:
            self._can_capture = False
            self.note(f"answers were generated without CUDA graphs, more slowly: a step {reason}")


def step_capture(device: torch.device) -> Capture | None:
    """Captures steps; None if kernels are launched one by one."""
    return CudaCapture() if device.type == "cuda" else None


def padded(group: Group, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """The tokens of prompts, padded on the left and below, and the mask of those that are used."""
    ids = torch.zeros((rows, width), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for place, prompt in enumerate(group):
        ids[place, width - len(prompt) :] = torch.tensor(prompt)
        mask[place, width - len(prompt) :] = 1
    return ids, mask


def cache_growth(device: str, filled: int, *, captured: bool) -> int:
    """Tokens by which a cache with `filled` positions is extended."""
    least = CACHE_GROWTH.get(device, CACHE_GROWTH["cpu"])
    return max(least, filled // 2) if captured else least


class GrowingSteps:
    """Rows continued token by token, with transformers' cache, which is copied at every step.
    `scores`: of the next token of every row."""

    @property
    def compact_below(self) -> float:
        return COMPACT_BELOW

    def __init__(self, answer_model: AnswerModel, prompts: Group) -> None:
        self._answer_model = answer_model
        self._past, self.scores, self._mask = answer_model.read(prompts)

    def advance(self, tokens: Tensor, live: Sequence[int] = ()) -> None:
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        # Finished rows continue past the context, and are ignored.
        positions = (self._mask.sum(1, keepdim=True) - 1).clamp(max=self._answer_model.context - 1)
        output = self._answer_model.model(
            input_ids=tokens[:, None],
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._past,
            use_cache=True,
            logits_to_keep=1,
        )
        self._past, self.scores = output.past_key_values, output.logits[:, -1].float()

    def keep(self, index: Tensor) -> None:
        """Continue only with these rows."""
        self._past.reorder_cache(index)  # which layers with a state support, too
        self._mask = self._mask[index]


class FixedSteps:
    """The same with a KV cache at a fixed address, and CUDA graphs if possible.

    A row has a slot, and the first positions in it. Only the first `active` of `rows` slots are
    computed. There is a graph for each number of active slots; they stay valid while rows join,
    leave and are moved, until memory is allocated anew.
    """

    def __init__(
        self, answer_model: AnswerModel, room: int, rows: int, reader: Reader | None = None
    ) -> None:
        """For `rows` prompts and answers of at most `room` tokens. `reader`: reads prompts instead
        of the model's `read`."""
        self._answer_model, self._room, device = answer_model, room, answer_model.device
        self._read = reader or answer_model.read
        self._capture = answer_model.recorder()
        self.rows, self.active, self.size = 0, rows, 0
        self._filled: list[int] = []
        """Used positions of every slot, as on the device: the next token's position."""
        self._lengths = torch.zeros(0, dtype=torch.int64, device=device)
        self._places = torch.zeros_like(self._lengths)
        self._tokens = torch.zeros((0, 1), dtype=torch.int64, device=device)
        self._scores = torch.zeros((0, 0), device=device)
        self.layers: list[FixedLayer] = []
        self._forget()

    @property
    def scores(self) -> Tensor:
        """Of the next token of every active slot."""
        return self._scores[: self.active]

    @property
    def compact_below(self) -> float:
        return COMPACT_BELOW if self._capture is None else COMPACT_CAPTURED_BELOW

    def suits(self, rows: int, length: int) -> bool:
        """Whether there is memory for so many rows, and not for much longer ones: every step
        attends to all positions, used or not."""
        return rows <= self.rows and self.size <= OVERSIZED * self._size_for(length)

    def join(self, groups: Sequence[Group], slots: Sequence[int]) -> None:
        """Read more prompts into these free slots, in their order."""
        width = self._answer_model.width_of(groups)
        if width > self.size or not self.layers:
            self._resize(width)
        first = 0
        for group in groups:
            self._put(group, slots[first : first + len(group)])
            first += len(group)

    def widen(self, rows: int, live: Sequence[int] = ()) -> None:
        """Compute `rows` slots; all but the `live` ones have no prompt yet."""
        self.active = rows
        if rows > self.rows:
            self._resize(max((self._filled[slot] for slot in live), default=0))

    def keep(self, index: Tensor) -> None:
        """Continue only with these slots, moved to the front in place."""
        rows = [self._lengths, self._tokens, self._scores]
        for tensor in [*rows, *(t for layer in self.layers for t in (layer.keys, layer.values))]:
            tensor[: len(index)] = tensor[index]
        self._filled[: len(index)] = [self._filled[slot] for slot in index.tolist()]
        self.active = len(index)

    def advance(self, tokens: Tensor, live: Sequence[int] = ()) -> None:
        """Add a token to every active slot, and compute the scores of the next. All but the `live`
        ones (by default all) continue with whatever comes, and are ignored."""
        longest = max(self._filled[slot] for slot in live or range(self.active))
        if longest >= self.size:
            self._resize(longest)
        self._tokens[: self.active].copy_(tokens[:, None])
        if self.active in self._warm and self._capture is not None:
            self._capture_step(self._capture)
        if (replay := self._replays.get(self.active)) is not None:
            replay()
        else:
            self._step()
            self._warm.add(self.active)
        self._filled = [filled + 1 for filled in self._filled]

    def _put(self, group: Group, slots: Sequence[int]) -> None:
        distinct: dict[tuple[int, ...], int] = {}
        places = [distinct.setdefault(tuple(prompt), len(distinct)) for prompt in group]
        past, scores, mask = self._read([*distinct])
        if not self.layers:
            self.layers = [FixedLayer.like(layer, self.rows, self.size) for layer in past.layers]
            self._scores = scores.new_zeros((self.rows, scores.shape[1]))
        index, width = torch.tensor(slots, device=mask.device), mask.shape[1]
        which = torch.tensor(places, device=mask.device)  # several answers may have one prompt
        lengths = mask.sum(1)[which]
        # Prompts are padded on the left; in a slot they come first.
        at = (torch.arange(width, device=mask.device) + lengths[:, None]) % width
        for own, layer in zip(self.layers, past.layers, strict=True):
            own.keys[index[:, None], :, at] = layer.keys[which].transpose(1, 2)
            own.values[index[:, None], :, at] = layer.values[which].transpose(1, 2)
        self._lengths[index], self._scores[index] = lengths, scores[which]
        for slot, prompt in zip(slots, group, strict=True):
            self._filled[slot] = len(prompt) + self._answer_model.soft_tokens

    def _size_for(self, filled: int) -> int:
        """Positions of slots that are filled so far, with room for more tokens."""
        device, captured = self._answer_model.device.type, self._capture is not None
        room = cache_growth(device, filled, captured=captured)
        places = filled + max(1, min(room, self._room))
        return -(-places // CACHE_ALIGNMENT) * CACHE_ALIGNMENT

    def _resize(self, filled: int) -> None:
        """Allocate memory anew for the active slots, filled up to here."""
        self._forget()
        rows, size = self.active, self._size_for(filled)
        more = rows - self.rows
        for layer in self.layers:  # one by one: a second copy of all layers may not fit
            places = (0, 0, 0, size - self.size, 0, 0, 0, more)
            layer.keys, layer.values = F.pad(layer.keys, places), F.pad(layer.values, places)
        for name in ("_lengths", "_places"):
            setattr(self, name, F.pad(getattr(self, name), (0, more)))
        for name in ("_tokens", "_scores"):
            setattr(self, name, F.pad(getattr(self, name), (0, 0, 0, more)))
        self._filled = [*self._filled[:rows], *[0] * more]
        self.rows, self.size = rows, size

    def _forget(self) -> None:
        """Drop the graphs, which read memory that is no longer in use."""
        self._replays: dict[int, Callable[[], None]] = {}
        self._pasts: dict[int, Any] = {}
        self._warm: set[int] = set()
        """Numbers of slots of which one step was computed, but none captured: in the first one
        kernels are tuned and given workspace."""

    def _capture_step(self, record: Capture) -> None:
        self._warm.discard(self.active)
        try:
            _, self._replays[self.active] = captured(lambda: [self._step()], record)
        except GraphsUnavailable as error:
            self._capture = None
            self._answer_model.disable_graphs(str(error))

    def _step(self) -> Tensor:
        """Scores of the next tokens; everything a step changes is on the device."""
        rows, size = self.active, self.size
        lengths, places = self._lengths[:rows], self._places[:rows]
        if rows not in self._pasts:
            self._pasts[rows] = Cache(layers=[layer.first(rows) for layer in self.layers])
        places.copy_(lengths).clamp_(max=size - 1)
        indices: dict[int, Tensor] = {}
        for layer in self._pasts[rows].layers:
            heads = layer.keys.shape[1]
            if heads not in indices:
                starts = torch.arange(0, rows * heads * size, size, device=lengths.device)
                indices[heads] = starts + places[:, None].expand(rows, heads).flatten()
            layer.places, layer.index = places, indices[heads]
        seen = torch.arange(size, device=lengths.device) <= places[:, None]
        output = self._answer_model.model(
            input_ids=self._tokens[:rows],
            attention_mask=seen[:, None, None],
            position_ids=lengths.clamp(max=self._answer_model.context - 1)[:, None],
            past_key_values=self._pasts[rows],
            use_cache=True,
            logits_to_keep=1,
        )
        lengths.add_(1)
        return self.scores.copy_(output.logits[:, -1])


Steps = GrowingSteps | FixedSteps

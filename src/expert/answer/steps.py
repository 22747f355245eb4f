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
from expert.answer.cache import FixedLayer, aligned_length
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
MOVED_FROM, CUT_FROM = 0.25, 0.75
"""A full cache whose first positions are unused is moved in place, so that graphs stay valid, if
this share of it is unused; if less, that would be due again soon; if more, every step attends to
many positions in vain."""
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
        width = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
        if not (heads and layers and width):
            return 0
        groups = getattr(config, "num_key_value_heads", None) or heads
        element_bytes = max(2, int(next(self.model.parameters()).element_size()))
        return 2 * int(layers) * int(groups) * int(width) * element_bytes

    def free_bytes(self) -> int:
        """Free memory of the device, with what torch has reserved and does not use."""
        if self.device.type == "cuda":
            reserved = torch.cuda.memory_reserved(self.device)
            unused = reserved - torch.cuda.memory_allocated(self.device)
            return int(torch.cuda.mem_get_info(self.device)[0]) + unused
        return int(psutil.virtual_memory().available)

    def begin(self, prompts: Group, room: int) -> Steps:
        """Read prompts in one pass, for answers of at most `room` tokens."""
        return FixedSteps(self, [prompts], room) if self.fixed else GrowingSteps(self, prompts)

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

    def advance(self, tokens: Tensor) -> None:
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
        self._past.batch_select_indices(index)
        self._mask = self._mask[index]

    def make_room(self, needed: Tensor) -> None:
        """Nothing to do: it grows at every step."""


class FixedSteps:
    """The same with a KV cache at a fixed address, and CUDA graphs if possible.

    Rows with prompts of different lengths are right-aligned; the padding on the left is masked.
    All are `filled` up to the same position of `size`. Only the first `active` of `rows` rows are
    computed. There is a graph for each number of active rows; they stay valid while rows join,
    leave and are moved, until memory is allocated anew.
    """

    def __init__(
        self,
        answer_model: AnswerModel,
        groups: Sequence[Group],
        room: int,
        *,
        rows: int = 0,
        reader: Reader | None = None,
    ) -> None:
        """Read groups of prompts, longest first, for answers of at most `room` tokens. `rows`:
        memory is allocated for at least so many. `reader`: reads prompts instead of the model's
        `read`."""
        self._answer_model, device = answer_model, answer_model.device
        self._read = reader or answer_model.read
        self._capture = answer_model.recorder()
        count = sum(map(len, groups))
        self.rows = self.active = max(rows, count)
        self.filled = answer_model.width_of(groups)
        self._most = self.filled + room
        self.size = aligned_length(self.filled + self._more_room(self.filled))
        self._mask = torch.zeros((self.rows, 1, 1, self.size), dtype=torch.bool, device=device)
        self._positions = torch.zeros((self.rows, 1), dtype=torch.int64, device=device)
        self._tokens = torch.zeros_like(self._positions)
        self._scores = torch.empty(0)
        # The position of the next token is on the device, so that a CUDA graph can read it.
        self.place = torch.full((1,), self.filled, device=device)
        self.layers: list[FixedLayer] = []
        self._forget()
        self._put(groups, range(count))

    @property
    def scores(self) -> Tensor:
        """Of the next token of every active row."""
        return self._scores[: self.active]

    @property
    def compact_below(self) -> float:
        return COMPACT_BELOW if self._capture is None else COMPACT_CAPTURED_BELOW

    def suits(self, rows: int, length: int) -> bool:
        """Whether there is memory for so many rows, and not for much longer ones: every step
        attends to all positions, used or not."""
        return rows <= self.rows and self.size <= OVERSIZED * (length + self._more_room(length))

    def join(self, groups: Sequence[Group], rows: Sequence[int]) -> None:
        """Read more prompts into these finished rows, in their order."""
        width = self._answer_model.width_of(groups)
        missing = width - self.filled
        if missing > 0 and self._capture is not None and width < self.size:
            self._move(missing)
        elif missing > 0:
            self._reframe(missing, self._more_room(width))
        self._put(groups, rows)

    def make_room(self, needed: Tensor) -> None:
        """If the cache is full, drop positions that no `needed` row uses; extend it if that gains
        little, or if graphs must not be kept."""
        if self.filled < self.size:
            return
        spare = self._spare(needed)
        if self._capture is not None and MOVED_FROM <= spare / self.size <= CUT_FROM:
            self._move(-spare)
        else:
            self._reframe(-spare, self._more_room(self.filled - spare))

    def clear(self, rows: int) -> None:
        """Forget all rows; prompts that join next start at the first position of `rows` rows."""
        self._move(-self.filled)
        self.active = rows

    def widen(self, rows: int, needed: Tensor) -> None:
        """Compute `rows` rows; all but the `needed` ones have no prompt yet."""
        self.active = rows
        if rows > self.rows:
            spare = self._spare(needed)
            self._reframe(-spare, self._more_room(self.filled - spare))

    def advance(self, tokens: Tensor) -> None:
        """Add a token to every active row, and compute the scores of the next."""
        if self.filled == self.size:
            self._reframe(0, self._more_room(self.filled))
        self._tokens[: self.active].copy_(tokens[:, None])
        if self.active in self._warm and self._capture is not None:
            self._capture_step(self._capture)
        if (replay := self._replays.get(self.active)) is not None:
            replay()
        else:
            self._step()
            self._warm.add(self.active)
        self.filled += 1

    def keep(self, index: Tensor) -> None:
        """Continue only with these rows, moved to the front in place."""
        rows = [self._mask, self._positions, self._tokens, self._scores]
        for tensor in [*rows, *self._memory()]:
            tensor[: len(index)] = tensor[index]
        self.active = len(index)

    def _memory(self) -> list[Tensor]:
        return [tensor for layer in self.layers for tensor in (layer.keys, layer.values)]

    def _spare(self, needed: Tensor) -> int:
        """Number of positions at the start that none of the `needed` rows uses."""
        return int(self._mask[needed, 0, 0].int().argmax(1).min())

    def _put(self, groups: Sequence[Group], rows: Sequence[int]) -> None:
        first = 0
        for group in groups:
            past, scores, mask = self._read(group)
            if not self.layers:
                self.layers = [
                    FixedLayer.like(layer, self.rows, self.size, self.place)
                    for layer in past.layers
                ]
                self._scores = scores.new_zeros((self.rows, scores.shape[1]))
            index = torch.tensor(rows[first : first + len(group)], device=mask.device)
            places = slice(self.filled - mask.shape[1], self.filled)
            for own, layer in zip(self.layers, past.layers, strict=True):
                own.keys[index, :, places] = layer.keys
                own.values[index, :, places] = layer.values
            used = torch.zeros((len(group), self.size), dtype=torch.bool, device=mask.device)
            used[:, places] = mask.bool()
            self._mask[index, 0, 0] = used
            self._positions[index] = mask.sum(1, keepdim=True) - 1
            self._scores[index] = scores
            first += len(group)
            del past  # before the next group's cache is allocated

    def _move(self, by: int) -> None:
        """Move what is filled by some positions, in place: graphs stay valid."""
        old, first = self.filled, max(0, -by)
        for tensor in self._memory():
            tensor[:, :, first + by : old + by] = tensor[:, :, first:old].clone()
        used = self._mask[..., first:old].clone()
        self._mask.zero_()
        self._mask[..., first + by : old + by] = used
        self.filled += by
        self.place.add_(by)

    def _reframe(self, before: int, room: int) -> None:
        """Allocate memory for the active rows, with positions added at the start, or dropped if
        negative, and room for more tokens."""
        self._forget()
        rows, more = self.active, max(0, self.active - self.rows)
        after = aligned_length(self.filled + before + room) - self.size - before
        for layer in self.layers:  # one by one: a second copy of all layers may not fit
            layer.keys = F.pad(layer.keys[:rows], (0, 0, before, after, 0, 0, 0, more))
            layer.values = F.pad(layer.values[:rows], (0, 0, before, after, 0, 0, 0, more))
        self._mask = F.pad(self._mask[:rows], (before, after, 0, 0, 0, 0, 0, more))
        for name in ("_positions", "_tokens", "_scores"):
            setattr(self, name, F.pad(getattr(self, name)[:rows], (0, 0, 0, more)))
        self.rows, self.filled, self.size = rows, self.filled + before, self.size + before + after
        self.place.add_(before)

    def _more_room(self, filled: int) -> int:
        room = cache_growth(self._answer_model.device.type, filled, captured=bool(self._capture))
        return max(1, min(room, self._most - filled))

    def _forget(self) -> None:
        """Drop the graphs, which read memory that is no longer in use."""
        self._replays: dict[int, Callable[[], None]] = {}
        self._pasts: dict[int, Any] = {}
        self._warm: set[int] = set()
        """Numbers of rows of which one step was computed, but none captured: in the first one
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
        rows = self.active
        if rows not in self._pasts:
            self._pasts[rows] = Cache(layers=[layer.first(rows) for layer in self.layers])
        positions, mask = self._positions[:rows], self._mask[:rows]
        # Finished rows continue past the context, and are ignored.
        positions.add_(1).clamp_(max=self._answer_model.context - 1)
        mask.index_fill_(3, self.place, True)
        output = self._answer_model.model(
            input_ids=self._tokens[:rows],
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._pasts[rows],
            use_cache=True,
            logits_to_keep=1,
        )
        self.place.add_(1)
        return self.scores.copy_(output.logits[:, -1])


Steps = GrowingSteps | FixedSteps

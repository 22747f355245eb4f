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

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from expert.parallel.graphs import Capture
    from expert.run.stored.load import Trained

CLEAR_BELOW = 0.75
"""Finished rows stay in the batch until only this share is unfinished: removing them copies the
whole cache."""
CLEAR_RECORDED_BELOW = 0.5
"""The same threshold if the step must be captured again afterwards."""
ENDLESS = 2**31
"""Context of a model that does not declare one."""
ROOM = {"cpu": 32, "cuda": 128}
"""Tokens by which the cache is extended at a time. A larger cache wastes attention on empty
positions; a smaller one is extended more often, and each time the step is captured again, which
takes about as long as three uncaptured steps."""
MOST_ROWS = {"cpu": 128, "cuda": 512}
"""Largest batch. 300 answers of 25 tokens took `tiny` 4.1 s on one CPU core with 128 rows, 4.0 s
with 64, 5.5 s with 32. On a GPU, a step of a small model takes as long for a few rows as for
hundreds: 512 is derived from that, not measured."""
CACHE_SHARE = 0.4
"""Share of free memory for keys and values."""

Group = Sequence[Sequence[int]]
"""Prompts that are read together, as tokens."""


class Speaker:
    """A model that generates answers on its device."""

    def __init__(self, trained: Trained, note: Callable[[str], None] = lambda text: None) -> None:
        from expert.model.fixed_cache import can_be_fixed

        self.model, self.device, self.note = trained.loaded.causal_lm, trained.device, note
        prompts = trained.loaded.soft_prompts
        self.soft: Tensor | None = prompts.rows().detach() if prompts is not None else None
        self.lead = len(self.soft) if self.soft is not None else 0
        """Positions of the soft prompt before every prompt."""
        config = self.model.config.get_text_config()
        self.context: int = getattr(config, "max_position_embeddings", None) or ENDLESS
        self.fixed = can_be_fixed(self.model)
        self._can_record = True

    @property
    def vocabulary(self) -> int:
        """Number of tokens that have a score."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def number_bytes(self) -> int:
        return max(2, int(next(self.model.parameters()).element_size()))

    @property
    def remembered_bytes(self) -> int:
        """Bytes of keys and values per token; 0 if the model's shape is unknown."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None)
        layers = getattr(config, "num_hidden_layers", None)
        width = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
        if not (heads and layers and width):
            return 0
        groups = getattr(config, "num_key_value_heads", None) or heads
        return 2 * int(layers) * int(groups) * int(width) * self.number_bytes

    def free_bytes(self) -> int:
        import psutil
        import torch

        if self.device.type == "cuda":
            reserved = torch.cuda.memory_reserved(self.device)
            unused = reserved - torch.cuda.memory_allocated(self.device)
            return int(torch.cuda.mem_get_info(self.device)[0]) + unused
        return int(psutil.virtual_memory().available)

    def begin(self, groups: Sequence[Group], room: int) -> Steps:
        """Read prompts, longest first, for answers of at most `room` tokens; all must be in one
        group if the cache cannot be fixed."""
        return FixedSteps(self, groups, room) if self.fixed else GrowingSteps(self, groups)

    def recorder(self) -> Capture | None:
        """Captures the steps of one batch. Each batch gets its own: after running out of memory
        during a capture it cannot be trusted any more."""
        return recorder_of(self.device) if self._can_record else None

    def cannot_record(self, reason: str) -> None:
        """Stop capturing: slower, with the same answers."""
        self._can_record = False
        self.note(f"answers were generated without CUDA graphs, more slowly: a step {reason}")


def recorder_of(device: torch.device) -> Capture | None:
    """Captures steps; None if kernels are launched one by one."""
    from expert.parallel.graphs import CudaCapture

    return CudaCapture() if device.type == "cuda" else None


def read(speaker: Speaker, group: Group) -> tuple[Any, Tensor, Tensor]:
    """Read left-padded prompts: returns the KV cache, the next tokens' scores and the mask."""
    import torch

    model, soft, lead, device = speaker.model, speaker.soft, speaker.lead, speaker.device
    width = max(map(len, group)) + lead
    ids = torch.zeros((len(group), width), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for place, prompt in enumerate(group):
        ids[place, width - len(prompt) :] = torch.tensor(prompt)
        mask[place, width - len(prompt) - lead :] = 1
    ids, mask = ids.to(device), mask.to(device)
    inputs = {"input_ids": ids}
    if soft is not None:
        words = model.get_input_embeddings()(ids)
        for place, prompt in enumerate(group):
            end = width - len(prompt)
            words[place, end - lead : end] = soft.to(words.device, words.dtype)
        inputs = {"inputs_embeds": words}
    output = model(
        **inputs,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=True,
        logits_to_keep=1,
    )
    return output.past_key_values, output.logits[:, -1].float(), mask


class GrowingSteps:
    """Rows continued token by token, with transformers' cache, which is copied at every step.
    `scores`: of the next token of every row."""

    clear_below = CLEAR_BELOW

    def __init__(self, speaker: Speaker, groups: Sequence[Group]) -> None:
        (group,) = groups
        self._speaker = speaker
        self._past, self.scores, self._mask = read(speaker, group)

    def go_on(self, tokens: Tensor) -> None:
        import torch

        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        # Finished rows continue past the context, and are ignored.
        positions = (self._mask.sum(1, keepdim=True) - 1).clamp(max=self._speaker.context - 1)
        output = self._speaker.model(
            input_ids=tokens[:, None],
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._past,
            use_cache=True,
            logits_to_keep=1,
        )
        self._past, self.scores = output.past_key_values, output.logits[:, -1].float()

    def keep(self, index: Tensor) -> None:
        self._past.batch_select_indices(index)
        self._mask = self._mask[index]


class FixedSteps:
    """The same with a KV cache at a fixed address, and CUDA graphs if possible."""

    def __init__(self, speaker: Speaker, groups: Sequence[Group], room: int) -> None:
        import torch

        from expert.model.fixed_cache import FixedCache

        self._speaker, device = speaker, speaker.device
        self._record = speaker.recorder()
        width = max(len(prompt) for group in groups for prompt in group) + speaker.lead
        self._most = width + room
        self._cache = cache = FixedCache(sum(map(len, groups)), width, self._more_room(width))
        self._mask = torch.zeros((cache.rows, 1, 1, cache.size), dtype=torch.bool, device=device)
        self._positions = torch.zeros((cache.rows, 1), dtype=torch.int64, device=device)
        self._tokens = torch.zeros_like(self._positions)
        self.scores = torch.empty(0)
        self._replay: Callable[[], None] | None = None
        self._warm = False
        self._past: Any = None
        self._put(groups, range(cache.rows))
        self._forget()

    def join(self, groups: Sequence[Group], rows: Sequence[int]) -> None:
        """Read more prompts into these finished rows, in their order."""
        width = max(len(prompt) for group in groups for prompt in group) + self._speaker.lead
        if width > self._cache.filled:
            self._reframe(width - self._cache.filled, self._more_room(width))
        self._put(groups, rows)

    def make_room(self, needed: Tensor) -> None:
        """If the cache is full, drop positions that no `needed` row uses, and extend it."""
        if not self._cache.is_full:
            return
        spare = int(self._mask[needed, 0, 0].int().argmax(1).min())
        self._reframe(-spare, self._more_room(self._cache.filled - spare))

    def _put(self, groups: Sequence[Group], rows: Sequence[int]) -> None:
        import torch

        cache, first = self._cache, 0
        for group in groups:
            past, scores, mask = read(self._speaker, group)
            index = torch.tensor(rows[first : first + len(group)], device=self._speaker.device)
            cache.put(past, index)
            own = torch.zeros((len(group), cache.size), dtype=torch.bool, device=mask.device)
            own[:, cache.filled - mask.shape[1] : cache.filled] = mask.bool()
            self._mask[index, 0, 0] = own
            self._positions[index] = mask.sum(1, keepdim=True) - 1
            if not len(self.scores):
                self.scores = scores.new_zeros((cache.rows, scores.shape[1]))
            self.scores[index] = scores
            first += len(group)
            del past  # before the next group's cache is allocated

    @property
    def clear_below(self) -> float:
        return CLEAR_BELOW if self._record is None else CLEAR_RECORDED_BELOW

    def go_on(self, tokens: Tensor) -> None:
        if self._cache.is_full:
            self._reframe(0, self._more_room(self._cache.filled))
        self._tokens.copy_(tokens[:, None])
        if self._replay is None and self._record is not None and self._warm:
            self._record_it(self._record)
        if self._replay is not None:
            self._replay()
        else:
            self.scores = self._step()
            self._warm = True
        self._cache.went_on()

    def keep(self, index: Tensor) -> None:
        self._forget()
        self._cache.keep(index)
        self._mask, self._positions = self._mask[index], self._positions[index]
        self._tokens, self.scores = self._tokens[index], self.scores[index]

    def _reframe(self, before: int, room: int) -> None:
        """Add positions at the start, or drop them if negative, with room for more tokens."""
        import torch.nn.functional as F

        from expert.model.fixed_cache import even

        self._forget()
        cache = self._cache
        after = even(cache.filled + before + room) - cache.size - before
        cache.reframe(before, after)
        self._mask = F.pad(self._mask, (before, after))

    def _more_room(self, filled: int) -> int:
        at_once = ROOM.get(self._speaker.device.type, ROOM["cpu"])
        return max(1, min(at_once, self._most - filled))

    def _forget(self) -> None:
        """Drop the graph, which reads memory that is no longer in use. The first step of a new
        shape is not captured, because kernels are tuned and given workspace in it."""
        self._replay = None
        self._past = self._cache.for_transformers()
        self._warm = False

    def _record_it(self, record: Capture) -> None:
        from expert.parallel.graphs import GraphsUnavailable, captured

        try:
            (scores,), self._replay = captured(lambda: [self._step()], record)
        except GraphsUnavailable as error:
            self._record = None
            self._speaker.cannot_record(str(error))
            return
        assert scores is not None
        self.scores = scores

    def _step(self) -> Tensor:
        """Scores of the next tokens; everything a step changes is on the device."""
        # Finished rows continue past the context, and are ignored.
        self._positions.add_(1).clamp_(max=self._speaker.context - 1)
        self._mask.index_fill_(3, self._cache.place, True)
        output = self._speaker.model(
            input_ids=self._tokens,
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=self._past,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache.place.add_(1)
        scores: Tensor = output.logits[:, -1].float()
        return scores


Steps = GrowingSteps | FixedSteps

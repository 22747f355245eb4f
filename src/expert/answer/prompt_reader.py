"""Reads prompts with CUDA graphs, one for each shape of a group of prompts.

Launching the kernels of a pass over a few short prompts takes longer than running them. So prompts
are padded to a shape whose pass was captured; a shape whose kernels take longer than their launches
is not captured, and its prompts are not padded. On an H200 a prompt of 50 tokens takes a model of
135M 6 ms instead of 61 (docs/benchmarks/serving-h200.json).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expert.answer.cache import PromptMemory, last_positions
from expert.answer.steps import AnswerModel, Group, padded
from expert.parallel.graphs import Capture, GraphsUnavailable, captured

WIDTH_MULTIPLE = 32
"""Prompts are padded to a multiple of this, and their number to a power of two."""
MOST_ROWS = 64
MOST_TOKENS = 8192
"""Tokens of the largest shape, padding included."""
MEMORY_BYTES = 2**28
"""Memory for the keys and values of a shape; one that needs more is not captured."""
MEMORY_SHARE = 0.02
"""The same as a share of free memory."""
MOST_SHAPES = 64
LAUNCH_BOUND = 0.8
"""A shape is captured if launching its kernels takes at least this share of its time."""


@dataclass(eq=False)
class _Shape:
    """The memory that the pass over one shape reads and writes."""

    ids: Tensor
    mask: Tensor
    past: Any
    scores: Tensor
    passes: int = 0
    """Passes without a graph: in the first, kernels are loaded and tuned, the second is timed."""
    replay: Callable[[], None] | None = None


class PromptReader:
    """Reads the prompts of one model; used by one thread. Nothing is allocated before the first."""

    def __init__(self, answer_model: AnswerModel) -> None:
        self._answer_model = answer_model
        self._enabled = answer_model.fixed and answer_model.soft is None
        self._capture: Capture | None = None
        self._past: PromptMemory | None = None
        """Memory that all shapes share, since one is read at a time; `_scores` too."""
        self._scores, self._most_tokens = torch.empty(0), 0
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._busy: set[tuple[int, int]] = set()
        """Shapes whose kernels take longer than their launches."""

    def __call__(self, group: Group) -> tuple[Any, Tensor, Tensor]:
        """What `AnswerModel.read` returns; valid until the next call."""
        if not self._enabled:
            return self._answer_model.read(group)
        try:
            if (found := self._read_padded(group)) is not None:
                return found
        except torch.OutOfMemoryError:
            self._give_up("needs more memory than there is")
        except GraphsUnavailable as error:
            self._give_up(str(error))
        past, scores, mask = self._answer_model.read(group)
        if self._enabled and self._past is None:
            self._allocate(past)
        return past, scores, mask

    def _give_up(self, reason: str) -> None:
        """Read prompts without graphs from now on, and free their memory."""
        self._enabled, self._past, self._scores, self._shapes = False, None, torch.empty(0), {}
        text = f"prompts are read without CUDA graphs, more slowly: a pass {reason}"
        self._answer_model.note(text)

    def _allocate(self, past: Any) -> None:
        """Allocate memory for a model with such a cache; without graphs if there is too little."""
        model = self._answer_model
        self._capture, token_bytes = model.recorder(), model.kv_bytes_per_token
        most_bytes = min(MEMORY_BYTES, MEMORY_SHARE * model.free_bytes())
        self._most_tokens = min(MOST_TOKENS, int(most_bytes / token_bytes)) if token_bytes else 0
        self._enabled = self._capture is not None and self._most_tokens > 0
        if not self._enabled:
            return
        try:
            self._scores = torch.zeros((MOST_ROWS, model.vocabulary), device=model.device)
            self._past = PromptMemory(past, self._most_tokens)
        except torch.OutOfMemoryError:
            self._give_up("needs more memory than there is")

    def _read_padded(self, group: Group) -> tuple[Any, Tensor, Tensor] | None:
        """Read a group in the shape that it is padded to; None if that is not captured."""
        rows, width = len(group), max(map(len, group))
        key = (2 ** (rows - 1).bit_length(), -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
        if (shape := self._shape(key)) is None or self._capture is None:
            return None
        for memory, values in zip((shape.ids, shape.mask), padded(group, *key), strict=True):
            memory.copy_(values)
        if shape.replay is None and shape.passes == 2:
            _, shape.replay = captured(lambda: [self._pass(shape)], self._capture)
        if shape.replay is not None:
            shape.replay()
        elif shape.passes == 0:
            self._pass(shape)
        elif not is_launch_bound(lambda: self._pass(shape), shape.ids.device):
            self._busy.add(key)
            del self._shapes[key]
        shape.passes += 1
        past = last_positions(shape.past, rows, width)
        return past, shape.scores[:rows], shape.mask[:rows, -width:]

    def _shape(self, key: tuple[int, int]) -> _Shape | None:
        rows, width = key
        if self._past is None or rows > MOST_ROWS or rows * width > self._most_tokens:
            return None
        if key not in self._shapes and key not in self._busy and len(self._shapes) < MOST_SHAPES:
            ids = torch.zeros((rows, width), dtype=torch.int64, device=self._answer_model.device)
            past = self._past.for_transformers(rows, width)
            self._shapes[key] = _Shape(ids, torch.zeros_like(ids), past, self._scores[:rows])
        return self._shapes.get(key)

    def _pass(self, shape: _Shape) -> Tensor:
        width = shape.mask.shape[1]
        whole = torch.ones((width, width), dtype=torch.bool, device=shape.mask.device)
        # Padding attends to itself: attention to nothing would be NaN.
        itself = torch.eye(width, dtype=torch.bool, device=shape.mask.device)
        output = self._answer_model.model(
            input_ids=shape.ids,
            attention_mask=whole.tril() & shape.mask.bool()[:, None, None] | itself,
            position_ids=(shape.mask.cumsum(1) - 1).clamp(min=0),
            past_key_values=shape.past,
            use_cache=True,
            logits_to_keep=1,
        )
        return shape.scores.copy_(output.logits[:, -1])


def is_launch_bound(run: Callable[[], Any], device: torch.device) -> bool:
    """Whether the kernels of a function take little longer than launching them."""
    event: Any = torch.cuda.Event
    began, ended = event(enable_timing=True), event(enable_timing=True)
    with torch.cuda.device(device):
        start = time.perf_counter()
        began.record()
        run()
        launching = time.perf_counter() - start
        ended.record()
        ended.synchronize()
    return bool(launching >= LAUNCH_BOUND * began.elapsed_time(ended) / 1000)

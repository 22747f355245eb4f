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
from typing import TYPE_CHECKING, Any

from expert.jobs.sample.answer_steps import AnswerModel, Group

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from expert.model.fixed_cache import PromptMemory

WIDTH_MULTIPLE = 32
"""Prompts are padded to a multiple of this, and their number to a power of two."""
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
    launch_bound: bool = True
    replay: Callable[[], None] | None = None


class PromptReader:
    """Reads the prompts of one model; used by one thread."""

    def __init__(self, answer_model: AnswerModel) -> None:
        self._answer_model = answer_model
        alike = answer_model.fixed and answer_model.soft is None
        self._capture = answer_model.recorder() if alike else None
        most_bytes = min(MEMORY_BYTES, MEMORY_SHARE * answer_model.free_bytes())
        token_bytes = answer_model.kv_bytes_per_token
        self._most_tokens = min(MOST_TOKENS, int(most_bytes / token_bytes)) if token_bytes else 0
        self._memory: PromptMemory | None = None
        self._shapes: dict[tuple[int, int], _Shape] = {}

    def __call__(self, group: Group) -> tuple[Any, Tensor, Tensor]:
        """What `AnswerModel.read` returns; valid until the next call."""
        from expert.model.fixed_cache import PromptMemory, last_positions

        shape = self._shape_for(group)
        if shape is None or not shape.launch_bound:
            past, scores, mask = self._answer_model.read(group)
            if self._capture is not None and self._memory is None and self._most_tokens:
                self._memory = PromptMemory(past, self._most_tokens)
            return past, scores, mask
        self._fill(shape, group)
        self._compute(shape)
        rows, width = len(group), max(map(len, group))
        past = last_positions(shape.past, rows, width)
        return past, shape.scores[:rows], shape.mask[:rows, -width:]

    def _shape_for(self, group: Group) -> _Shape | None:
        """The shape that a group is padded to; None if it is read without a graph."""
        import torch

        rows = 2 ** (len(group) - 1).bit_length()
        width = -(-max(map(len, group)) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        if self._capture is None or self._memory is None or rows * width > self._most_tokens:
            return None
        if (rows, width) not in self._shapes and len(self._shapes) < MOST_SHAPES:
            device = self._answer_model.device
            ids = torch.zeros((rows, width), dtype=torch.int64, device=device)
            self._shapes[rows, width] = _Shape(
                ids=ids,
                mask=torch.zeros_like(ids),
                past=self._memory.for_transformers(rows, width),
                scores=torch.zeros((rows, self._answer_model.vocabulary), device=device),
            )
        return self._shapes.get((rows, width))

    def _fill(self, shape: _Shape, group: Group) -> None:
        import torch

        ids = torch.zeros(shape.ids.shape, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for place, prompt in enumerate(group):
            ids[place, -len(prompt) :] = torch.tensor(prompt)
            mask[place, -len(prompt) :] = 1
        shape.ids.copy_(ids)
        shape.mask.copy_(mask)

    def _compute(self, shape: _Shape) -> None:
        from expert.parallel.graphs import GraphsUnavailable, captured

        if shape.replay is None and shape.passes == 2 and self._capture is not None:
            try:
                _, shape.replay = captured(lambda: [self._pass(shape)], self._capture)
            except GraphsUnavailable as error:
                self._capture = None
                self._answer_model.disable_graphs(str(error))
        if shape.replay is not None:
            shape.replay()
        elif shape.passes == 1:
            shape.launch_bound = is_launch_bound(lambda: self._pass(shape), shape.ids.device)
        else:
            self._pass(shape)
        shape.passes += 1

    def _pass(self, shape: _Shape) -> Tensor:
        import torch

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
    import torch

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

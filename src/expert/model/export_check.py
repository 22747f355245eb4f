"""Whether a model on disk says the same as the one that was trained: their logits, compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {"fp32": 1e-3, "fp16": 2.5e-2, "bf16": 2e-1}
"""How far logits may lie apart, as a share of their spread (standard deviation). Another order of
sums moves the farthest float32 logit by 5e-6 of it. Weights and activations of 8 bits (bfloat16)
moved it by up to 11 % in random models 64 wide, those of 11 bits (float16) by up to 1.4 %; both are
let pass almost twice that."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The two logits that lie farthest apart, among all places and tokens."""

    largest: float
    """In logits."""
    share: float
    """Of the spread of the expected logits."""


@torch.no_grad()
def logits_of(model: Any, ids: Sequence[int], soft_rows: Tensor | None = None) -> Tensor:
    """[places, vocabulary] in float32 on the CPU, at the places of `ids`; soft prompts in front."""
    embedding = model.get_input_embeddings()
    tokens = torch.tensor([list(ids)], device=embedding.weight.device)
    if soft_rows is None:
        found = model(input_ids=tokens, use_cache=False)
    else:
        words = embedding(tokens)
        rows = soft_rows.to(words.device, words.dtype)[None]
        found = model(inputs_embeds=torch.cat([rows, words], dim=1), use_cache=False)
    logits: Tensor = found.logits[0, -len(ids) :]
    return logits.float().cpu()


def compare(expected: Sequence[Tensor], found: Sequence[Tensor]) -> Difference:
    """How far the found logits lie from the expected ones, text by text."""
    pairs = list(zip(expected, found, strict=True))
    # On tensors, so that what is not a number stays the largest.
    largest = float(torch.stack([(one - other).abs().max() for one, other in pairs]).max())
    spread = float(torch.cat([one.flatten() for one in expected]).std())
    return Difference(largest=largest, share=largest / max(spread, 1e-12))

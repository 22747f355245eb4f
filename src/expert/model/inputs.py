"""What a model reads from a batch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class ModelInput(Protocol):
    """Packed documents, [rows, length]; all tensors are on the run's device."""

    @property
    def tokens(self) -> Tensor:
        """int32 [rows, length]."""

    @property
    def positions(self) -> Tensor:
        """int32 [rows, length], restarting at 0 in every document, soft prompt included."""

    @property
    def labels(self) -> Tensor:
        """int32 [rows, length], already shifted: the next token of the document, or -100."""

    @property
    def boundaries(self) -> Tensor:
        """int32 [constant]: starts of all documents in the flattened batch, in order, padded with
        rows * length. Padding at the end of a row counts as a document."""

    @property
    def longest(self) -> int:
        """Upper bound of the document length."""

    @property
    def soft_mask(self) -> Tensor | None:
        """bool [rows, length]: soft-prompt positions; their position is the index into it."""

    @property
    def target_places(self) -> Tensor:
        """int32 [rows * length]: flat indices that have a label, padded with rows * length - 1."""

    @property
    def targets(self) -> int:
        """Number of positions with a label."""

    @property
    def whole_rows(self) -> bool:
        """Whether every row is a single document, possibly padded."""


class BranchedInput(ModelInput, Protocol):
    """Documents with several answers to one prompt; `BranchArrays` in data/feed/branches.py
    describes their arrays. For attention there are also `key_places`, `key_boundaries` and
    `key_copies`: the keys that each sequence sees."""

    @property
    def branch(self) -> Tensor:
        """int32 [rows, length]: 0 where all answers share, else which branch of its document."""

    @property
    def answers(self) -> Tensor:
        """int32 [rows * length]: the answer that each target is part of."""

    @property
    def reference(self) -> Tensor:
        """float32 [answers]: their log-probabilities under the starting weights."""


def documents_of(positions: Tensor) -> Tensor:
    """int32 [rows, length]: a number for each position that identifies its document in the row."""
    return (positions == 0).cumsum(1, dtype=torch.int32)

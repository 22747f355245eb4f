"""What a model reads from a batch."""

from __future__ import annotations

from typing import Protocol

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

    @property
    def branch(self) -> Tensor | None:
        """int32 [rows, length], if documents branch into several answers: 0 where all of them
        share, else which branch. Then also `key_places`, `key_boundaries`, `key_copies` (the keys
        that each sequence sees, for attention), and `answers` and `reference` (for the loss), as
        BranchArrays in data/feed/branches.py describes them."""

    @property
    def answers(self) -> Tensor | None:
        """int32 [rows * length]: the answer that each target is part of."""

    @property
    def reference(self) -> Tensor | None:
        """float32 [answers]: their log-probabilities under the starting weights."""

"""What a model reads from a batch. The batches themselves are made elsewhere."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ModelInput(Protocol):
    """Rows of documents, [rows, length], all tensors on the run's device."""

    @property
    def tokens(self) -> Tensor:
        """int32 [rows, length]."""

    @property
    def positions(self) -> Tensor:
        """int32 [rows, length], counted from 0 in every document, its soft prompt included."""

    @property
    def labels(self) -> Tensor:
        """int32 [rows, length], already shifted: the next token of the document, or -100."""

    @property
    def boundaries(self) -> Tensor:
        """int32 [constant]: starts of all documents over the flattened places, in order, then
        rows * length repeated. Padding at the end of a row is a document of its own."""

    @property
    def longest(self) -> int:
        """No document is longer."""

    @property
    def soft_mask(self) -> Tensor | None:
        """bool [rows, length]: places of the soft prompt, whose position is the index into it."""

    @property
    def target_places(self) -> Tensor:
        """int32 [rows * length]: the flat places that have a label, then rows * length - 1."""

    @property
    def targets(self) -> int:
        """How many places have a label."""

    @property
    def real_tokens(self) -> int:
        """How many positions are not padding."""

    @property
    def examples(self) -> int:
        """How many examples of the data set are in the rows."""

    @property
    def whole_rows(self) -> bool:
        """True where every row is one document, or one followed by padding."""

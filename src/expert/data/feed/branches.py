"""Documents with several answers to one prompt, as attention and loss need them.

A document is [shared | branch | branch]; a branch sees what is shared and itself, and its positions
continue those of what is shared. For attention every branch but the first is a sequence of its own,
whose keys are the shared ones again and then its own: keys and values are gathered in that order,
and their gradients summed in a fixed one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False, slots=True)
class BranchArrays:
    """The arrays of a batch of such documents, reusable like the others."""

    count: int
    """Branches of each document."""
    branch: NDArray[np.int32]
    """For each place: 0 if shared, else which branch of its document."""
    key_places: NDArray[np.int32]
    """The places whose keys are gathered, sequence by sequence."""
    key_boundaries: NDArray[np.int32]
    """Where the keys of each sequence begin among those gathered."""
    key_copies: NDArray[np.int32]
    """[branches, places]: where the key of each place is among those gathered; -1: nowhere else."""
    answers: NDArray[np.int32]
    """For each target, in order, which answer of the batch it is part of; the rest is the number of
    answers that a batch has room for."""
    reference: NDArray[np.float32]
    """For each answer, its log-probability under the starting weights; 0 if not known yet."""

    @staticmethod
    def room(shape: Any) -> dict[str, int]:
        """How many 32-bit numbers each array takes in batches of this shape."""
        count, places = shape.branches, shape.places
        return {
            "branch": places,
            "key_places": count * places,
            "key_boundaries": shape.max_documents + 1,
            "key_copies": count * places,
            "answers": places,
            "reference": shape.answers,
        }

    def shaped(self, places: int) -> BranchArrays:
        """The beginning of the same memory, for so many places."""
        copies = self.key_copies.reshape(-1)[: self.count * places]
        return replace(
            self,
            branch=self.branch[:places],
            key_places=self.key_places[: self.count * places],
            key_copies=copies.reshape(self.count, places),
            answers=self.answers[:places],
        )

    def clear(self) -> None:
        """No target is part of an answer any more."""
        self.answers.fill(len(self.reference))


@dataclass(frozen=True, eq=False, slots=True)
class Branches:
    """The branches of the documents of a batch; arrays but the first are [documents, branches]."""

    begins: Numbers
    """The place where each document begins."""
    starts: Numbers
    """Where each branch begins in its document."""
    sizes: Numbers
    """The tokens of each branch."""
    trained: Numbers
    """The targets of each answer."""
    reference: NDArray[np.float32] | None
    """Log-probabilities of the answers under the starting weights, if known."""

    def later(self) -> tuple[Numbers, Numbers]:
        """Where the branches after the first begin, and how many tokens each continues."""
        there = self.sizes[:, 1:] > 0
        places = (self.begins[:, None] + self.starts)[:, 1:][there]
        return places, np.broadcast_to(self.starts[:, :1], there.shape)[there]

    def fill(self, out: BranchArrays, edges: Numbers) -> None:
        """Fill the arrays of a batch whose sequences for attention lie between `edges`."""
        count, places = out.count, len(out.branch)
        numbers = np.tile(np.arange(count), len(self.begins))
        firsts, sizes = (self.begins[:, None] + self.starts).ravel(), self.sizes.ravel()
        out.branch.fill(0)
        out.branch[counted_from(firsts, sizes)] = np.repeat(numbers + 1, sizes)

        # Sequences: a document up to its second branch, each later branch, padding.
        begins, lengths = edges[:-1], np.diff(edges)
        later = np.flatnonzero((numbers > 0) & (sizes > 0))
        at = np.searchsorted(begins, firsts[later])
        shared, shared_from, branch = (np.zeros(len(begins), np.int64) for _ in range(3))
        shared[at] = np.repeat(self.starts[:, 0], count)[later]
        shared_from[at] = np.repeat(self.begins, count)[later]
        branch[at] = numbers[later]

        # The keys of a sequence: what is shared, then its own.
        keys = shared + lengths
        key_starts = np.cumsum(keys) - keys
        total = int(keys.sum())
        starts, counts = np.stack((shared_from, begins), 1), np.stack((shared, lengths), 1)
        out.key_places[:total] = counted_from(starts.ravel(), counts.ravel())
        out.key_places[total:] = 0
        out.key_boundaries.fill(total)
        out.key_boundaries[: len(begins)] = key_starts
        out.key_copies.fill(-1)
        out.key_copies[0, : edges[-1]] = counted_from(key_starts + shared, lengths)
        copies = (np.repeat(branch, shared), counted_from(shared_from, shared))
        out.key_copies[copies] = counted_from(key_starts, shared)

        answers = np.repeat(np.arange(len(numbers)), self.trained.ravel())
        out.answers[: len(answers)] = answers
        out.answers[len(answers) : places] = len(out.reference)
        out.reference.fill(0.0)
        if self.reference is not None:
            out.reference[: len(numbers)] = self.reference.ravel()


def counted_from(firsts: Numbers, counts: Numbers) -> NDArray[np.int64]:
    """Concatenated ranges: `counts[i]` consecutive numbers starting at `firsts[i]`."""
    stops = np.cumsum(counts)
    total = int(stops[-1]) if len(stops) else 0
    numbers: NDArray[np.int64] = np.arange(total)
    numbers += np.repeat(firsts - (stops - counts), counts)
    return numbers

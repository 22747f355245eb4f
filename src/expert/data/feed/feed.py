"""Batches for the model, prefetched: a thread fills a ring of buffers ahead of the GPU.

A buffer holds all batches of one step. It is filled in page-locked memory, copied to the GPU with
one call on its own stream, and reused when the model has finished with it. Nothing is read back
from the GPU. On a CPU the model reads the buffer directly.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expert.core.world import SINGLE_PROCESS, World
from expert.data.feed.batches import BatchArrays, BatchCounts, BatchShape, fill_batch
from expert.data.feed.branches import BranchArrays
from expert.data.feed.order import DataOrder, StepBins, rank_batches
from expert.data.pack.pack_index import PackIndex
from expert.data.tokens.documents import FlatDocuments

ALIGNMENT = 16  # int32 numbers: every array of a buffer starts at a multiple of 64 bytes
POLL_SECONDS = 0.2
BRANCH_TENSORS = ("branch", "key_places", "key_boundaries", "key_copies", "answers", "reference")
FLAT_TO = 256
"""Rows laid end to end are padded to a multiple of this: it suits the tiles of matrix products and
keeps the number of different sizes small."""
TRIMMED_TO = 64
"""Rows of varying length are trimmed to multiples of this."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Batch:
    """A micro-batch. Valid until the next step is taken."""

    tokens: Tensor
    labels: Tensor
    """Already shifted: the token that follows each place, or IGNORED."""
    positions: Tensor
    boundaries: Tensor
    soft_mask: Tensor | None
    target_places: Tensor
    """Flat places with a label, `targets` of them, followed by a place without one."""
    counts: BatchCounts
    longest: int
    """Upper bound for the length of a document."""
    whole_rows: bool
    """Every row is one document, so that plain causal attention is correct."""
    bins: tuple[int, ...]
    branch: Tensor | None = None
    """If documents branch into several answers, what `BranchArrays` describes, from here on."""
    key_places: Tensor | None = None
    key_boundaries: Tensor | None = None
    key_copies: Tensor | None = None
    answers: Tensor | None = None
    reference: Tensor | None = None

    @property
    def targets(self) -> int:
        return self.counts.targets


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class FedStep:
    """The batches of one step, and how long they took."""

    step: StepBins
    batches: tuple[Batch, ...]
    made_seconds: float | None = None
    """Time spent making them; None if worker processes did."""
    copied: tuple[Any, Any] | None = None
    """CUDA events with timing around the copy, if `new_event` was given."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """Numbers about the step, for its log line."""


@dataclass(frozen=True, eq=False, slots=True)
class StepWork:
    """The bins of a step, and where their data is."""

    step: StepBins
    index: PackIndex
    store: FlatDocuments


class _Layout:
    """Positions of the arrays of one batch in a block of int32 numbers."""

    def __init__(self, shape: BatchShape, *, soft: bool) -> None:
        self.shape = shape
        self.soft = soft
        sizes = {
            "tokens": shape.places,
            "labels": shape.places,
            "positions": shape.places,
            "target_places": shape.places,
            "boundaries": shape.max_documents + 1,
            "soft_mask": -(-shape.places // 4) if soft else 0,
            **(BranchArrays.room(shape) if shape.branches else {}),
        }
        self._slices: dict[str, slice] = {}
        end = 0
        for name, size in sizes.items():
            self._slices[name] = slice(end, end + size)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.size = end

    def parts(self, block: Any) -> dict[str, Any]:
        """Views of a block, by name."""
        return {name: block[where] for name, where in self._slices.items()}

    def arrays(self, block: NDArray[np.int32]) -> BatchArrays:
        """Views of a block in ordinary or page-locked memory, to be filled."""
        parts = self.parts(block)
        flags = parts.pop("soft_mask")
        soft_mask = np.zeros(self.shape.places, np.bool_)  # not sent without a soft prompt
        if self.soft:
            soft_mask = flags.view(np.bool_)[: self.shape.places]
        branches = None
        if count := self.shape.branches:
            own = {name: parts.pop(name) for name in BRANCH_TENSORS}
            own["key_copies"] = own["key_copies"].reshape(count, -1)
            own["reference"] = own["reference"].view(np.float32)
            branches = BranchArrays(count=count, **own)
        return BatchArrays(shape=self.shape, soft_mask=soft_mask, branches=branches, **parts)

    def tensors(self, parts: dict[str, Tensor], rows: int, length: int) -> dict[str, Any]:
        """The beginning of a block's parts on the device, in so many rows."""
        places = rows * length
        shaped = {
            name: parts[name][:places].view(rows, length)
            for name in ("tokens", "labels", "positions")
        }
        soft_mask = None
        if self.soft:
            soft_mask = parts["soft_mask"].view(torch.bool)[:places].view(rows, length)
        if count := self.shape.branches:
            shaped |= {
                "branch": parts["branch"][:places].view(rows, length),
                "key_places": parts["key_places"][: count * places],
                "key_boundaries": parts["key_boundaries"],
                "key_copies": parts["key_copies"][: count * places].view(count, places),
                "answers": parts["answers"][:places],
                "reference": parts["reference"].view(torch.float32),
            }
        return {
            **shaped,
            "boundaries": parts["boundaries"],
            "target_places": parts["target_places"][:places],
            "soft_mask": soft_mask,
        }


class _Slot:
    """A buffer for one step, on the host and on the device."""

    def __init__(self, layout: _Layout, batches: int, device: torch.device, *, pin: bool) -> None:
        cuda = device.type == "cuda"
        self.host = torch.zeros(batches, layout.size, dtype=torch.int32, pin_memory=pin and cuda)
        self.device = torch.empty_like(self.host, device=device) if cuda else self.host
        blocks: NDArray[np.int32] = self.host.numpy()
        self.arrays = [layout.arrays(block) for block in blocks]
        self.parts = [layout.parts(block) for block in self.device]
        event: Any = torch.cuda.Event
        self.sent = event() if cuda else None
        self.released = event() if cuda else None
        if self.released is not None:
            # The memory may have been freed while work on the model's stream still uses it.
            self.released.record(torch.cuda.current_stream(device))
        self.copied: tuple[Any, Any] | None = None

    def send(self, batches: int, stream: Any, new_event: Callable[[], Any] | None) -> None:
        """Copy what was filled, after the model has finished with the old content."""
        if self.sent is None:
            return
        self.copied = (new_event(), new_event()) if new_event else None
        with torch.cuda.stream(stream):
            stream.wait_event(self.released)
            if self.copied:
                self.copied[0].record(stream)
            self.device[:batches].copy_(self.host[:batches], non_blocking=True)
            if self.copied:
                self.copied[1].record(stream)
            self.sent.record(stream)

    def take(self) -> None:
        """Let the model's stream read the content from here on."""
        if self.sent is not None:
            torch.cuda.current_stream().wait_event(self.sent)

    def release(self) -> None:
        """Mark the work queued so far as the last that reads the content."""
        if self.released is not None:
            self.released.record(torch.cuda.current_stream())


@dataclass(eq=False)
class PackedFeed:
    """The steps of `works`, in order, in batches of one fixed shape."""

    works: Iterable[StepWork]
    shape: BatchShape
    _: KW_ONLY
    batches_per_step: int
    device: torch.device
    soft: bool = False
    whole_rows: bool = False
    ready_ahead: int = 2
    pin: bool = True
    trim: bool = False
    """Rows are as long as the longest of their batch."""
    flat: bool = False
    """A batch is one row, with its bins end to end, padded to the next of `widths` or else all
    places."""
    widths: tuple[int, ...] = ()
    new_event: Callable[[], Any] | None = None
    world: World = SINGLE_PROCESS
    """Only this rank's share of each step is made."""

    def __post_init__(self) -> None:
        self._layout = layout = _Layout(self.shape, soft=self.soft)
        batches, device = self.batches_per_step, self.device
        # One in use by the model, and enough for `ready_ahead` batches.
        count = 1 + max(1, -(-self.ready_ahead // batches))
        slots = [_Slot(layout, batches, device, pin=self.pin) for _ in range(count)]
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for slot in slots:
            self._free.put(slot)
        self._ready: queue.SimpleQueue[tuple[_Slot, FedStep] | BaseException | None]
        self._ready = queue.SimpleQueue()
        stream: Any = torch.cuda.Stream
        self._stream = stream(device) if device.type == "cuda" else None
        self._closed = threading.Event()
        self._held: _Slot | None = None
        self._thread = threading.Thread(target=self._run, name="expert-feed", daemon=True)

    def __enter__(self) -> PackedFeed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        if self._stream is not None:
            self._stream.synchronize()  # a pending copy still writes to memory about to be freed

    def __iter__(self) -> Iterator[FedStep]:
        while True:
            if self._held is not None:
                self._held.release()
                self._free.put(self._held)
                self._held = None
            filled = self._ready.get()
            if filled is None:
                return
            if isinstance(filled, BaseException):
                raise filled
            self._held, fed = filled
            self._held.take()
            yield fed

    def _run(self) -> None:
        """The thread: fills buffer after buffer; passes errors on."""
        try:
            if self.device.type == "cuda" and self.device.index is not None:
                torch.cuda.set_device(self.device)
            began = time.perf_counter()
            for work in self.works:
                found_seconds = time.perf_counter() - began
                slot = None
                while slot is None:
                    if self._closed.is_set():
                        return
                    with contextlib.suppress(queue.Empty):
                        slot = self._free.get(timeout=POLL_SECONDS)
                if slot.sent is not None:
                    slot.sent.synchronize()  # only this thread waits, not the model
                self._ready.put(self._fill(slot, work, found_seconds))
                began = time.perf_counter()
            self._ready.put(None)
        except BaseException as error:  # noqa: BLE001 - raised again in __iter__
            self._ready.put(error)

    def _fill(self, slot: _Slot, work: StepWork, found_seconds: float) -> tuple[_Slot, FedStep]:
        began = time.perf_counter()
        batches = rank_batches(work.step.bins, self.shape.rows, self.world)
        shapes = [self._rows_of(work.index, batch.bins) for batch in batches]
        counts = [
            fill_batch(out.shaped(*shape), work.index, batch.bins, work.store, flat=self.flat)
            for out, shape, batch in zip(slot.arrays, shapes, batches, strict=False)
        ]
        for number, batch in enumerate(batches):
            if batch.filler and number < len(counts):
                slot.arrays[number].shaped(*shapes[number]).clear_labels()
                counts[number] = BatchCounts()
        if len(counts) < len(batches):
            room = len(slot.arrays)
            raise ValueError(f"{len(batches)} batches in a step with room for {room}")
        seconds = found_seconds + time.perf_counter() - began
        slot.send(len(counts), self._stream, self.new_event)
        fed = tuple(
            Batch(
                **self._layout.tensors(parts, *shape),
                counts=count,
                # The same for all widths: kernels may be compiled for it.
                longest=self.shape.length if self.widths else min(shape[1], self.shape.length),
                whole_rows=self.whole_rows and not self.flat,
                bins=tuple(batch.bins.tolist()),
            )
            for parts, shape, count, batch in zip(slot.parts, shapes, counts, batches, strict=False)
        )
        return slot, FedStep(step=work.step, batches=fed, made_seconds=seconds, copied=slot.copied)

    def _rows_of(self, index: PackIndex, bins: NDArray[np.int64]) -> tuple[int, int]:
        """Rows and row length of a batch."""
        rows, length = self.shape.rows, self.shape.length
        if self.flat:
            needed = -(-int(index.lengths_of(bins).sum()) // FLAT_TO) * FLAT_TO
            if self.widths:  # the most that there can be is a width too
                needed = next((width for width in self.widths if width >= needed), rows * length)
            return 1, min(rows * length, max(FLAT_TO, needed))
        if not self.trim:
            return rows, length
        needed = -(-int(index.lengths_of(bins).max(initial=0)) // TRIMMED_TO) * TRIMMED_TO
        return rows, min(length, max(TRIMMED_TO, needed))


# --- a few widths for batches whose rows lie end to end: each can be captured once --------------


def few_widths(needed: NDArray[np.int64], most: int) -> tuple[int, ...]:
    """At most `most` widths, ascending, that hold these batches with the least padding in all."""
    widths, counts = np.unique(-(-needed // FLAT_TO) * FLAT_TO, return_counts=True)
    before = np.concatenate(([0], np.cumsum(counts)))
    # least[j]: places of the batches of the j smallest widths, with as many widths as rounds so far
    least = np.full(len(widths) + 1, np.inf)
    least[0] = 0
    chosen: list[list[int]] = [[] for _ in least]
    for _ in range(min(most, len(widths))):
        last, of_last = least.copy(), list(chosen)
        for j in range(1, len(least)):
            places = last[:j] + widths[j - 1] * (before[j] - before[:j])
            first = int(places.argmin())
            if places[first] < least[j]:
                least[j], chosen[j] = places[first], [*of_last[first], int(widths[j - 1])]
    return tuple(chosen[-1])


def widths_of(
    order: DataOrder, index: PackIndex, rows: int, most: int, world: World
) -> tuple[int, ...]:
    """Widths for this rank's batches of `rows` sequences, from those of the first epoch. Other
    epochs are shuffled differently: a batch may need more than the largest of them."""
    bins, step = order.epoch(0), order.bins_per_step
    places = np.add.outer(np.arange(0, len(bins), step), np.arange(world.rank, step, world.size))
    lengths = np.append(index.bin_lengths()[bins], 0)[np.minimum(places, len(bins))]
    needed = [lengths[:, first : first + rows].sum(1) for first in range(0, places.shape[1], rows)]
    return few_widths(np.concatenate([one[one > 0] for one in needed]), most)

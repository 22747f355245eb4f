"""How batches are made and copied to the device."""

from __future__ import annotations

import math

from expert.core.text import percent, span
from expert.insight.findings.evidence import Evidence
from expert.insight.findings.finding import Answer, Noted
from expert.insight.step.anatomy import StepAnatomy
from expert.planning.choose.length import CACHE_BYTES_PER_TOKEN

WAITING_SHARE = 0.10
"""Less than 10 % of waiting is not worth a change; healthy runs on an H200 waited below 1 %."""
THREAD_SWITCH_SECONDS = 0.005
"""Python's thread switch interval is 5 ms: shorter waits come from threading, not from the data."""
COPY_SHARE_OF_WAIT = 0.5
"""If copying takes half of the wait, the device waits for the copy rather than for the batch."""
COPY_BOUND_SHARE = 0.9
"""Back-to-back copies for nine tenths of a step set its pace. The phases need not show idle time:
on an H200 a copy from pageable memory delayed reading the loss back, and the device was idle in
none of its phases (copies of 1.01 s in steps of 1.00 s: docs/benchmarks/planted-faults-h200.json).
"""
LINK_FIX = (
    "nvidia-smi -q shows how wide the card's link is (GPU Link Info), expert clear-cuda-cache who "
    "else uses the card"
)
PADDING_SHARE = 0.2
"""Rows grouped by length need less than 10 % padding; from 20 % on, packing is worth the change."""
PACKED_PADDING_SHARE = 0.4
"""Packed sequences are at least 90 % full, except with very few rows."""
SHORT_ROWS = 0.5
"""At half of the longest row, at least two rows fit into its place on average."""
WORSE_THAN_UNPACKED = 0.6
"""Padding share of packed rows; padding each batch to its longest row mostly wastes less."""


def tokenised_late(found: Evidence) -> Answer:
    step = found.step
    if found.feed_kind != "late" or (found.before is None and step is None):
        return None
    waits = found.before is not None or _waits(found)
    return Noted(
        f"tokenize is late, {found.workers} workers{f'; {_waiting(step)}' if step else ''}",
        severity="warning" if waits else "note",
        gain=_without_waiting(step) if waits else None,
    )


def no_workers(found: Evidence) -> Answer:
    """Before a run; packed tokens are fed by a thread and need no workers."""
    path, made_here = "loader.workers", found.on_gpu and found.feed_kind != "packed"
    if found.before is None or not made_here or found.workers or not found.requested(path):
        return None
    return found.setting_words(path)


def too_few_workers(found: Evidence) -> Answer:
    step = found.step
    if step is None or found.feed_kind not in ("padded", "stream") or not _waits(found):
        return None
    if found.feed_kind == "stream":
        return Noted(
            f"a stream is read; {_waiting(step)}",
            fix="training.dataset.streaming: false (the data is prepared once)",
            keys=("training.dataset.streaming=false",),
            gain=_without_waiting(step),
        )
    cores, workers = found.cores or 1, found.workers
    needed = 2 * max(1, workers)
    if step.feed and step.compute:
        needed = math.ceil(step.feed / step.compute) + 1
    more = f", or dataloader_num_workers: {min(cores, needed)}" if workers < cores else ""
    return Noted(
        f"{_waiting(step)}; {workers} workers on {cores} cores",
        fix=f"training.config.packing: true{more}",
        gain=_without_waiting(step),
    )


def too_many_workers(found: Evidence) -> Answer:
    cores, workers = found.cores, found.workers
    if cores is None or workers <= cores:
        return None
    waits = found.before is not None or _waits(found)
    waiting = f"; {_waiting(found.step)}" if found.step else ""
    text = f"{workers} workers on {cores} cores{waiting}"
    return Noted(text, severity="warning" if waits else "note")


def pin_memory_off(found: Evidence) -> Answer:
    """Before a run; after it the time that copies took is known."""
    path = "loader.pin_memory"
    off = found.on_gpu and found.planned(path) is False
    return found.setting_words(path) if found.before and off else None


def no_prefetch(found: Evidence) -> Answer:
    """Before a run."""
    path = "loader.prefetch"
    few = found.on_gpu and (found.amount(path) or 0) <= 1
    return found.setting_words(path) if found.before and few else None


def no_packing(found: Evidence) -> Answer:
    """Before a run: short rows that will be padded."""
    rows, tokens = found.amount("length.rows"), found.amount("length.tokens_per_epoch")
    if found.before is None or found.feed_kind not in ("padded", "late") or not rows or not tokens:
        return None
    mean, longest = tokens / rows, found.amount("data.sequence_length") or 0
    if mean > SHORT_ROWS * longest:
        return None
    return f"rows of {mean:.0f} tokens on average and up to {longest:.0f}"


def slow_disk(found: Evidence) -> Answer:
    """Prepared tokens arrive late: the disk or its cache is too slow, or the host too busy."""
    step = found.step
    if step is None or found.feed_kind != "packed" or not _waits(found):
        return None
    read = "how fast they were read is unknown"
    if step.feed and step.tokens:
        speed = step.tokens / step.feed * CACHE_BYTES_PER_TOKEN
        read = f"{speed / 1e6:,.3g} MB/s were read, 100 and more are usual"
    return Noted(f"{_waiting(step)}; {read}", gain=_without_waiting(step))


def padding_waste(found: Evidence) -> Answer:
    padding = found.step.padding if found.step is not None else None
    packed = found.planned("data.packing") != "none"
    if padding is None or padding < (PACKED_PADDING_SHARE if packed else PADDING_SHARE):
        return None
    setting = found.setting_words("data.packing")
    return Noted(
        f"{percent(padding)} of the places of a batch hold no token; {setting}",
        severity="warning" if not packed or padding >= WORSE_THAN_UNPACKED else "note",
        fix="training.config.max_seq_length: smaller, or more rows per step (batch_size)"
        if packed
        else "training.config.packing: true",
        keys=() if packed else ("packing=true",),
        gain=1 / (1 - padding) if padding < 1 else None,
    )


def slow_copies(found: Evidence) -> Answer:
    """Copies that the device waits for, or that come from pageable memory."""
    step = found.step
    if step is None or not found.on_gpu:
        return None
    unpinned, held_up = found.planned("loader.pin_memory") is False, _waits_for_copies(step)
    if not unpinned and not held_up:
        return None
    setting, copy = found.setting_words("loader.pin_memory"), span(step.of("copy"))
    narrow = {"consequence": "the card waits for its batch", "fix": LINK_FIX, "keys": ()}
    return Noted(
        f"{setting}; a copy takes {copy}; {_waiting(step)}",
        severity="warning" if held_up else "note",
        gain=_without_waiting(step) if held_up else None,
        **({} if unpinned else narrow),
    )


def is_significant_wait(waited: float, step: StepAnatomy) -> bool:
    """Whether a wait is at least a tenth of the step, and longer than a thread switch."""
    return waited >= max(WAITING_SHARE * step.wall, THREAD_SWITCH_SECONDS)


def is_copy_bound(step: StepAnatomy) -> bool:
    """Whether overlapped copies fill the whole step while the device does not."""
    fill = step.copies_beside and step.of("copy") >= COPY_BOUND_SHARE * step.wall
    return fill and is_significant_wait(step.wall - step.compute, step)


def _waits_for_copies(step: StepAnatomy) -> bool:
    if is_copy_bound(step):
        return True
    waited = step.of("data_wait")
    return is_significant_wait(waited, step) and step.of("copy") >= COPY_SHARE_OF_WAIT * waited


def _waits(found: Evidence) -> bool:
    """Whether the device waits for batches, and not only for their copies."""
    step = found.step
    if step is None or _waits_for_copies(step):
        return False
    return is_significant_wait(step.of("data_wait"), step)


def _waiting(step: StepAnatomy) -> str:
    waited = _idle(step)
    made = f"; making a batch takes {span(step.feed)}" if step.feed else ""
    share = percent(waited / step.wall)
    return f"the device waits {span(waited)} of {span(step.wall)} ({share}){made}"


def _without_waiting(step: StepAnatomy | None) -> float | None:
    """The speedup if the device never waited for a batch."""
    if step is None or step.wall <= _idle(step):
        return None
    return step.wall / (step.wall - _idle(step))


def _idle(step: StepAnatomy) -> float:
    return step.wall - step.compute if is_copy_bound(step) else step.of("data_wait")

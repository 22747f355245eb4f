"""How batches are made and copied to the device."""

from __future__ import annotations

import math
from typing import Any

from expert.core.text import percent, span
from expert.insight.findings.evidence import PADDING_SHARE, Evidence
from expert.insight.findings.finding import RuleResult, Severity
from expert.insight.findings.verdict import (
    LINK_FIX,
    feeding_verdict,
    is_copy_bound,
    is_significant_wait,
    padding_fix,
)
from expert.insight.step.anatomy import StepAnatomy
from expert.planning.choose.length import CACHE_BYTES_PER_TOKEN

SLOW_TOKENS_PER_SECOND = 5e6
"""The feeder thread filled 22 to 50 million tokens a second from a warm cache on two cores
(docs/benchmarks/data-loading.json); below a fifth of that, its reads are held up."""
WORSE_THAN_UNPACKED = 0.6
"""Padding share of packed rows; padding each batch to its longest row mostly wastes less."""
SHORT_ROWS = 8
"""Rows this many times shorter than a sequence leave most of a launch unused unless packed."""
GROUPED_GAIN, MAX_GAIN = 1.2, 3.0
"""Gain of packing rows that are already grouped by length, and the most it gains otherwise."""


def tokenised_late(found: Evidence) -> RuleResult | None:
    step = found.step
    if found.feed_kind != "late" or (found.before is None and step is None):
        return None
    waits = found.before is not None or _waits(found)
    feed = f"; making a batch takes {span(step.feed)}" if step and step.feed else ""
    waiting = f"; {_waiting(step)}{feed}" if step else ""
    return RuleResult(
        f"tokenize is late, {found.workers} workers{waiting}",
        severity="warning" if waits else "note",
        gain=_without_waiting(found) if waits else None,
        numbers=_numbers(found),
    )


def no_workers(found: Evidence) -> RuleResult | None:
    """Before a run; prepared tokens are fed by a thread and need no workers."""
    if found.before is None or found.amount("loader.workers") or not found.on_gpu:
        return None
    padded = "0 workers, and rows are tokenised or padded while training"
    return RuleResult(padded) if _makes_batches(found) else None


def too_few_workers(found: Evidence) -> RuleResult | None:
    step = found.step
    if step is None or found.feed_kind not in ("padded", "stream") or not _waits(found):
        return None
    cores, workers = found.cores or 1, found.workers
    needed = 2 * max(1, workers)
    if step.feed and step.compute:
        needed = math.ceil(step.feed / step.compute) + 1
    more = f", or dataloader_num_workers: {min(cores, needed)}" if workers < cores else ""
    feed = f"; making a batch takes {span(step.feed)}" if step.feed else ""
    return RuleResult(
        f"{_waiting(step)}{feed}; {workers} workers on {cores} cores",
        name="too-few-workers" if workers < cores else "slow-loader",
        title=f"{workers} workers cannot keep up with the device",
        fix=f"training.config.packing: true{more}",
        gain=_without_waiting(found),
        numbers=_numbers(found),
    )


def too_many_workers(found: Evidence) -> RuleResult | None:
    cores, workers = found.cores, found.workers
    if cores is not None and workers > cores:
        waiting = f"; {_waiting(found.step)}" if found.step else ""
        return RuleResult(
            f"{workers} workers on {cores} cores{waiting}",
            severity="warning" if found.before is not None or _waits(found) else "note",
            numbers={"workers": float(workers), "cores": float(cores)},
        )
    return None


def few_cores(found: Evidence) -> RuleResult | None:
    if found.before is None or found.before.named_card or not found.on_gpu:
        return None
    needed = int(found.amount("loader.workers") or 0) + 1 if _makes_batches(found) else 2
    if (cores := found.before.cores) >= needed:
        return None
    return RuleResult(
        f"{cores} available, {needed} needed for the training loop and its batches",
        numbers={"cores": cores, "needed": needed},
    )


def pin_memory_off(found: Evidence) -> RuleResult | None:
    off = found.planned("loader.pin_memory") is False
    return RuleResult("pin_memory is off") if found.before and found.on_gpu and off else None


def no_prefetch(found: Evidence) -> RuleResult | None:
    ready = found.amount("loader.prefetch") or 0
    few = found.before is not None and found.on_gpu and ready <= 1
    return RuleResult(f"prefetch {ready:.0f}") if few else None


def no_packing(found: Evidence) -> RuleResult | None:
    """Before a run: short rows that will be padded."""
    before, length = found.before, int(found.amount("data.max_seq_length") or 0)
    if before is None or not found.padded or before.mean_tokens is None:
        return None
    mean, longest = before.mean_tokens, min(before.longest_tokens or length, length)
    if mean > longest / 2:
        return None
    grouped = bool(found.planned("data.group_by_length"))
    sliced = found.micro_batches > 1  # a step in one micro-batch is padded to its longest row
    return RuleResult(
        f"rows of {mean:.0f} tokens on average, {longest} the longest, "
        f"{'' if grouped else 'not '}grouped by length",
        gain=GROUPED_GAIN if grouped and sliced else min(MAX_GAIN, longest / mean),
        numbers={"mean_tokens": mean},
    )


def slow_disk(found: Evidence) -> RuleResult | None:
    """Prepared tokens arrive late: the disk or its cache is too slow, or the host too busy."""
    step = found.step
    if step is None or found.feed_kind != "packed" or not _waits(found) or _waits_for_copies(step):
        return None
    rate, read = None, "how fast they were read is unknown"
    if step.feed and step.tokens:
        rate = step.tokens / step.feed
        size = rate * CACHE_BYTES_PER_TOKEN
        words = f"{size / 1e6:,.1f} MB/s" if size >= 1e6 else f"{size / 1e3:,.0f} kB/s"
        read = f"{words} were read ({rate:,.0f} tokens/s)"
    changes: dict[str, Any] = {}
    if rate is not None and rate >= SLOW_TOKENS_PER_SECOND:
        changes = {
            "name": "slow-feed",
            "title": "batches are used up faster than one thread fills them",
            "keys": ("dataloader_prefetch_factor=16",),
        }
    return RuleResult(
        f"{_waiting(step)}; {read}, 100 MB/s and more are usual",
        gain=_without_waiting(found),
        numbers={**_numbers(found), "tokens_read_per_second": rate or 0.0},
        **changes,
    )


def padding_waste(found: Evidence) -> RuleResult | None:
    padding = found.padding_share
    if padding is None:
        return None
    packed = found.planned("data.packing") != "none"
    severity: Severity = "warning" if not packed or padding >= WORSE_THAN_UNPACKED else "note"
    setting = found.setting_words("data.packing")
    return RuleResult(
        f"{percent(padding)} of the places of a batch hold no token; {setting}",
        severity=severity,
        title=f"{percent(padding)} of what is computed is padding",
        fix=padding_fix(found),
        keys=() if packed else ("packing=true",),
        gain=1 / (1 - padding) if padding < 1 else None,
        numbers={"padding": padding},
    )


def packing_off(found: Evidence) -> RuleResult | None:
    """Unpacked rows with little padding: short ones still leave most of a kernel launch unused."""
    step = found.step
    if step is None or not found.padded:
        return None
    if step.padding is not None and step.padding >= PADDING_SHARE:
        return None  # reported as padding-waste
    length, rows = found.amount("data.max_seq_length"), None
    if step.tokens_per_second and step.samples_per_second:
        rows = step.tokens_per_second / step.samples_per_second
    short = bool(rows and length and rows * SHORT_ROWS <= length)
    mean = f"; a row has {rows:,.0f} tokens on average, a sequence {length:,.0f}" if short else ""
    return RuleResult(
        f"{found.setting_words('data.packing')}{mean}",
        name="short-rows-alone" if short else "packing-off",
        severity="warning" if short and found.on_gpu else "note",
        numbers={"tokens_per_row": rows or 0.0},
    )


def slow_copies(found: Evidence) -> RuleResult | None:
    """Copies that the device waits for, or that come from pageable memory."""
    step = found.step
    if step is None or not found.on_gpu:
        return None
    unpinned, held_up = found.planned("loader.pin_memory") is False, _waits_for_copies(step)
    if not unpinned and not held_up:
        return None
    rate = ""
    if step.of("copy") and step.tokens:
        rate = f"; a copy takes {span(step.of('copy'))} for {step.tokens:,.0f} tokens"
    other: dict[str, Any] = {
        "consequence": "the card waits for its batch",
        "fix": LINK_FIX,
        "keys": (),
    }
    return RuleResult(
        f"{found.setting_words('loader.pin_memory')}{rate}; {_waiting(step)}",
        severity="warning" if held_up else "note",
        gain=_without_waiting(found) if held_up else None,
        numbers={**_numbers(found), "copy": step.of("copy")},
        **({} if unpinned else other),
    )


def _makes_batches(found: Evidence) -> bool:
    """Whether making a batch is real work: rows are tokenised or padded while training."""
    streaming = bool(found.written("dataset", "streaming"))
    return streaming or found.padded or found.planned("data.tokenize") == "late"


def _waits_for_copies(step: StepAnatomy) -> bool:
    verdict = feeding_verdict(step)
    return verdict is not None and verdict.kind == "copy-bound"


def _waits(found: Evidence) -> bool:
    step = found.step
    return step is not None and is_significant_wait(step.of("data_wait"), step)


def _waiting(step: StepAnatomy) -> str:
    waited = _idle(step)
    return f"the device waits {span(waited)} of {span(step.wall)} ({percent(waited / step.wall)})"


def _without_waiting(found: Evidence) -> float | None:
    step = found.step
    if step is None or step.wall <= _idle(step):
        return None
    return step.wall / (step.wall - _idle(step))


def _idle(step: StepAnatomy) -> float:
    return step.wall - step.compute if is_copy_bound(step) else step.of("data_wait")


def _numbers(found: Evidence) -> dict[str, float]:
    step = found.step
    if step is None:
        return {"workers": float(found.workers)}
    known = {"data_wait": step.of("data_wait"), "wall": step.wall, "workers": float(found.workers)}
    return known | ({"feed": step.feed} if step.feed is not None else {})

"""Faults in how batches are made and brought to the device."""

from __future__ import annotations

import math

from expert.core.text import percent, span
from expert.insight.findings.evidence import PADDING_SHARE, Evidence
from expert.insight.findings.finding import Finding, Severity
from expert.insight.findings.verdict import (
    COPY_OF_WAIT,
    NARROW_LINK,
    copies_set_the_pace,
    is_worth_telling,
    padding_fix,
)
from expert.insight.step.anatomy import StepAnatomy

BYTES_PER_TOKEN = 5
"""On disk: four for the number, and a share of the index (planning counts the same)."""
SLOW_TOKENS_PER_SECOND = 5e6
"""The feeder's thread made 22 to 50 million tokens a second from a warm cache on two cores
(docs/benchmarks/data-loading.json); below a fifth of that, something holds its reads up."""
WORSE_THAN_ALONE = 0.6
"""Of packed rows: most rows that are padded to the longest of their batch waste less."""
SHORT_ROWS = 8
"""Rows so many times shorter than a sequence leave most of a launch unused when they go alone."""


def tokenised_late(found: Evidence) -> Finding | None:
    step = found.step
    if step is None or found.feed_kind != "late":
        return None
    waits = _waits(found)
    feed = f"; making a batch takes {span(step.feed)}" if step.feed else ""
    return Finding(
        name="tokenised-late",
        severity="warning" if waits else "note",
        title="rows are tokenised while the device waits for them",
        evidence=f"the feed is late with {found.workers} workers; {_waiting(found)}{feed}",
        consequence="every epoch pays again for what could be done once",
        fix="training.config.tokenize: ahead (or once: expert pretokenize)",
        overrides=("training.config.tokenize=ahead",),
        gain=_without_waiting(found) if waits else None,
        numbers=_numbers(found),
    )


def slow_disk(found: Evidence) -> Finding | None:
    """Prepared tokens that arrive late: the disk or its cache is too slow, or its host too busy."""
    step = found.step
    if step is None or found.feed_kind != "packed" or not _waits(found):
        return None
    if _copies_hold_up(found):
        return None
    rate, read = None, "how fast they were read is not told"
    if step.feed and step.tokens:
        rate = step.tokens / step.feed
        size = rate * BYTES_PER_TOKEN
        words = f"{size / 1e6:,.1f} MB/s" if size >= 1e6 else f"{size / 1e3:,.0f} kB/s"
        read = f"{words} were read ({rate:,.0f} tokens/s)"
    slow = rate is None or rate < SLOW_TOKENS_PER_SECOND
    return Finding(
        name="slow-disk" if slow else "slow-feed",
        severity="warning",
        title="prepared tokens are read too slowly"
        if slow
        else "batches are used up faster than one thread fills them",
        evidence=f"{_waiting(found)}; {read}, 100 MB/s and more are usual",
        consequence="the device stands still until the next batch is read",
        fix="training.config.pretokenized_cache: a folder on a fast local disk"
        if slow
        else "training.config.dataloader_prefetch_factor: 16",
        overrides=() if slow else ("training.config.dataloader_prefetch_factor=16",),
        gain=_without_waiting(found),
        numbers={**_numbers(found), "tokens_read_per_second": rate or 0.0},
    )


def too_few_workers(found: Evidence) -> Finding | None:
    step = found.step
    if step is None or found.feed_kind not in ("padded", "stream"):
        return None
    if not _waits(found):
        return None
    cores, workers = found.cores or 1, found.workers
    needed = 2 * max(1, workers)
    if step.feed and step.compute:
        needed = math.ceil(step.feed / step.compute) + 1
    fix = f"training.config.packing: true, or dataloader_num_workers: {min(cores, needed)}"
    feed = f"; making a batch takes {span(step.feed)}" if step.feed else ""
    return Finding(
        name="too-few-workers" if workers < cores else "slow-loader",
        severity="warning",
        title=f"{workers} workers cannot keep up with the device",
        evidence=f"{_waiting(found)}{feed}; {workers} workers on {cores} cores",
        consequence="the device stands still until the next batch is made",
        fix=fix if workers < cores else "training.config.packing: true",
        overrides=("training.config.packing=true",),
        gain=_without_waiting(found),
        numbers=_numbers(found),
    )


def too_many_workers(found: Evidence) -> Finding | None:
    retuned = found.fell_back("DataBound")
    thrashed = "in each other's way" in str((retuned or {}).get("reason", ""))
    cores = found.cores
    crowded = cores is not None and found.workers > cores
    if not thrashed and not crowded:
        return None
    waits = _waits(found)
    return Finding(
        name="too-many-workers",
        severity="warning" if waits or thrashed else "note",
        title="more workers than cores take the processor from each other",
        evidence=f"{found.workers} workers on {cores} cores; {_waiting(found)}"
        if not thrashed
        else str((retuned or {}).get("reason")),
        consequence="each batch takes longer, and so does launching work for the device",
        fix="training.config.dataloader_num_workers: auto",
        overrides=("training.config.dataloader_num_workers=auto",),
        numbers={"workers": float(found.workers), "cores": float(cores or 0)},
    )


def padding_waste(found: Evidence) -> Finding | None:
    padding = found.wasted
    if padding is None:
        return None
    packed = found.run.planned("data.packing") != "none"
    severity: Severity = "warning" if not packed or padding >= WORSE_THAN_ALONE else "note"
    factor = 1 / (1 - padding) if padding < 1 else None
    return Finding(
        name="padding-waste",
        severity=severity,
        title=f"{percent(padding)} of what is computed is padding",
        evidence=f"{percent(padding)} of the places of a batch hold no token; "
        f"{found.who('data.packing')}",
        consequence="padding is computed like any token and teaches nothing",
        fix=padding_fix(found),
        overrides=() if packed else ("training.config.packing=true",),
        gain=factor,
        numbers={"padding": padding},
    )


def packing_off(found: Evidence) -> Finding | None:
    """Rows alone with little padding: on a card short ones still leave most of a launch unused."""
    step = found.step
    alone = found.run.planned("data.packing") == "none"
    if step is None or not alone or found.run.planned("model.name") == "char-gpt":
        return None
    if step.padding is not None and step.padding >= PADDING_SHARE:
        return None  # told as waste
    length, rows = found.amount("data.max_seq_length"), None
    if step.tokens_per_second and step.samples_per_second:
        rows = step.tokens_per_second / step.samples_per_second
    short = bool(rows and length and rows * SHORT_ROWS <= length)
    mean = (
        f"; a row has {rows:,.0f} tokens on average, a sequence holds {length:,.0f}"
        if short
        else ""
    )
    return Finding(
        name="short-rows-alone" if short else "packing-off",
        severity="warning" if short and found.run.on_gpu else "note",
        title="rows go to the device alone",
        evidence=f"{found.who('data.packing')}{mean}",
        consequence="widths vary, so nothing is compiled and small launches leave the card unused",
        fix="training.config.packing: true",
        overrides=("training.config.packing=true",),
        numbers={"tokens_per_row": rows or 0.0},
    )


def slow_copies(found: Evidence) -> Finding | None:
    """Copies that the device waits for, or that go through ordinary memory."""
    step = found.step
    if step is None or not found.run.on_gpu:
        return None
    unpinned = found.run.planned("loader.pin_memory") is False
    held_up = _copies_hold_up(found)
    if not unpinned and not held_up:
        return None
    rate = ""
    if step.of("copy") and step.tokens:
        rate = f"; a copy takes {span(step.of('copy'))} for {step.tokens:,.0f} tokens"
    return Finding(
        name="slow-copies",
        severity="warning" if held_up else "note",
        title="batches are copied to the card slowly",
        evidence=f"{found.who('loader.pin_memory')}{rate}; {_waiting(found)}",
        consequence="copies from ordinary memory take longer and do not run beside the computation"
        if unpinned
        else "the card computes nothing until its batch is there",
        fix="training.config.dataloader_pin_memory: true" if unpinned else NARROW_LINK,
        overrides=("training.config.dataloader_pin_memory=true",) if unpinned else (),
        gain=_without_waiting(found) if held_up else None,
        numbers={**_numbers(found), "copy": step.of("copy")},
    )


def _copies_hold_up(found: Evidence) -> bool:
    step = found.step
    if step is None:
        return False
    if copies_set_the_pace(step):
        return True
    waited = step.of("data_wait")
    if not is_worth_telling(waited + step.exposed_copy, step):
        return False
    return step.exposed_copy > waited or step.of("copy") >= COPY_OF_WAIT * waited > 0


def _waits(found: Evidence) -> bool:
    step = found.step
    return step is not None and is_worth_telling(step.of("data_wait"), step)


def _waiting(found: Evidence) -> str:
    step = found.step
    if step is None:
        return "no update was timed"
    waited = _stood_still(step)
    return f"the device waits {span(waited)} of {span(step.wall)} ({percent(waited / step.wall)})"


def _without_waiting(found: Evidence) -> float | None:
    step = found.step
    if step is None or step.wall <= _stood_still(step):
        return None
    return step.wall / (step.wall - _stood_still(step))


def _stood_still(step: StepAnatomy) -> float:
    return step.wall - step.compute if copies_set_the_pace(step) else step.of("data_wait")


def _numbers(found: Evidence) -> dict[str, float]:
    step = found.step
    if step is None:
        return {}
    told = {"data_wait": step.of("data_wait"), "wall": step.wall, "workers": float(found.workers)}
    return told | ({"feed": step.feed} if step.feed is not None else {})


RULES = (
    tokenised_late,
    slow_disk,
    too_few_workers,
    too_many_workers,
    padding_waste,
    packing_off,
    slow_copies,
)

"""Faults in how the card is used: too little work at once, waiting, company, heat, memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from expert.core.text import counted, gib, percent, span
from expert.insight.findings.evidence import CONTEXT_BYTES, Evidence
from expert.insight.findings.finding import Finding
from expert.insight.findings.verdict import (
    RETRIES_PER_UPDATE,
    free_cores_fix,
    is_starved,
    is_worth_telling,
    launch_fix,
    sync_places,
)
from expert.insight.step.anatomy import number

TOKENS_FILL_A_CARD = 8192
"""From here on 0.6B and 8B models computed at full use on an H200 (training-speed-h200.json)."""
TWICE = 2
"""Advice to take more rows at once is given where at least twice as many have room."""
OTHERS_BYTES = 1.5 * 2**30
"""Driver and display hold up to about 1 GiB of a card that nobody else uses."""
HEAT_SHARE = 0.2
POWER_SHARE = 0.9
"""A loaded card meets its power limit and is fine; that is worth a note, heat is not normal."""
NEARLY_FULL = 0.97


def host_syncs(found: Evidence) -> Finding | None:
    """Reads from the device inside an update."""
    count, step = found.syncs, found.step
    if not count or step is None:
        return None
    dry = step.ran_dry or 0.0
    costs = is_starved(step)
    return Finding(
        name="host-sync",
        severity="warning" if costs else "note",
        title="the host waits for the device inside an update",
        evidence=f"{count} times in one update of {found.micro_batches} micro-batches, at "
        f"{sync_places(found)}; the device ran dry in {percent(dry)} of the updates",
        consequence="nothing is launched ahead: the device waits for the host after each read",
        fix="keep numbers on the device (.detach(), not .item()) and read them an update later",
        numbers={"syncs": float(count), "ran_dry": dry},
    )


def slow_launches(found: Evidence) -> Finding | None:
    """Too little work in a launch, so that the host sets the pace."""
    step = found.step
    if step is None or not found.run.on_gpu or found.syncs:
        return None
    if (
        is_worth_telling(step.of("data_wait"), step)
        or found.retries_per_update >= RETRIES_PER_UPDATE
    ):
        return None
    dry, use = step.ran_dry, step.gpu_utilization
    if not is_starved(step):
        return None
    tokens = (step.tokens or 0.0) / found.micro_batches
    seen = f"the device ran dry in {percent(dry)} of the updates; " if dry is not None else ""
    used = f"GPU use {percent(use)}; " if use is not None else ""
    return Finding(
        name="launch-bound",
        severity="warning",
        title="the host cannot launch as fast as the device computes",
        evidence=f"{seen}{used}{span(step.wall)} an update, {tokens:,.0f} tokens a micro-batch",
        consequence="the device waits between kernels that are too small for it",
        fix=launch_fix(found)[0],
        overrides=launch_fix(found)[1],
        gain=1 / use if use else None,
        numbers={"ran_dry": dry or 0.0, "tokens_per_micro_batch": tokens},
    )


def one_row(found: Evidence) -> Finding | None:
    rows = found.amount("batch.examples_per_update")
    if rows != 1:
        return None
    return Finding(
        name="batch-1",
        severity="warning",
        title="every update learns from a single row",
        evidence=f"{found.who('batch.examples_per_update')}; "
        f"{(found.step.tokens or 0) if found.step else 0:,.0f} tokens an update",
        consequence="a launch, a reduction and an optimizer step for each row, and noisy gradients",
        fix="training.config.batch_size: 16",
        overrides=("training.config.batch_size=16",),
        numbers={"examples_per_update": 1.0},
    )


def few_rows_at_once(found: Evidence) -> Finding | None:
    """A micro-batch that was asked for although more rows have room."""
    micro, sequences = found.amount("batch.micro_batch"), found.amount("batch.sequences_per_update")
    budget, peak = found.amount("memory.budget_bytes"), found.peak_bytes
    if not micro or not sequences or not budget or peak is None:
        return None
    if not found.asked("batch.micro_batch") or micro >= sequences:
        return None
    per_row = sum(found.part(name) for name in ("activations", "workspace", "loss")) / micro
    fixed = max(0.0, peak - micro * per_row)
    room = int((0.95 * budget - fixed) / per_row) if per_row > 0 else 0
    possible = min(room, int(sequences))
    if possible < TWICE * micro:
        return None
    tokens = (found.step.tokens or 0.0) / found.micro_batches if found.step else 0.0
    full = tokens >= TOKENS_FILL_A_CARD and found.run.on_gpu
    return Finding(
        name="small-micro-batch",
        severity="note" if full else "warning",
        title=f"{micro:.0f} at once although {possible} would fit",
        evidence=f"{found.who('batch.micro_batch')}; the run holds {gib(peak)} of {gib(budget)}, a "
        f"sequence more takes {gib(per_row)}; {tokens:,.0f} tokens at once",
        consequence=f"an update takes {found.micro_batches} passes instead of "
        f"{-(-int(sequences) // possible)}",
        fix="training.config.micro_batch_size: auto",
        overrides=("training.config.micro_batch_size=auto",),
        numbers={"micro_batch": micro, "would_fit": float(possible)},
    )


def company(found: Evidence) -> Finding | None:
    """Memory of the card that this run does not hold."""
    used, own = found.median("gpu_memory_bytes"), found.median("gpu_process_memory_bytes")
    if own is None:
        reserved = found.last("peak_reserved_bytes")
        own = reserved + CONTEXT_BYTES if reserved is not None else None
    if used is None or own is None or used - own < OTHERS_BYTES:
        return None
    others = used - own
    return Finding(
        name="other-process",
        severity="warning",
        title="somebody else is on this GPU",
        evidence=f"{gib(used)} of the card are in use, {gib(own)} by this run: {gib(others)} are "
        f"another's{_names(found)}",
        consequence="memory is missing for larger batches, and kernels of both share the card",
        fix="expert clear-cuda-cache names who holds it; end it, or take another card",
        numbers={"others_bytes": others},
    )


def _names(found: Evidence) -> str:
    """Who held memory when the run began, as far as that was told."""
    holders, own = found.gpu_fact("holders"), number(found.newest("started"), "pid")
    named = [h for h in holders if isinstance(h, Mapping)] if isinstance(holders, list) else []
    others = [h for h in named if h.get("pid") != own]
    words = ", ".join(f"{h.get('name') or 'a process'} (pid {h.get('pid')})" for h in others)
    return f"; at the start: {words}" if words else ""


def busy_cores(found: Evidence) -> Finding | None:
    """A run whose threads have no core each, because others take them: on a CPU they all wait for
    the last one, beside a GPU the one that launches falls behind."""
    crowded = found.crowded
    if crowded is None:
        return None
    threads, cores, others = crowded
    waits = not found.run.on_gpu or (found.step is not None and is_starved(found.step))
    whose = "computes on" if not found.run.on_gpu else "launches from"
    return Finding(
        name="busy-cores",
        severity="warning" if waits else "note",
        title=f"other processes use the cores this run {whose}",
        evidence=f"{counted(threads, 'thread')} on {cores} cores, of which others used "
        f"{others:.1f} ({percent(others / cores)}){found.neighbours}",
        consequence="threads wait for the one that has no core; updates take several times as long"
        if not found.run.on_gpu
        else "the device waits where the host has no core to launch from",
        fix=free_cores_fix(*crowded),
        numbers={"threads": threads, "cores": cores, "others": others},
    )


def braked(found: Evidence) -> Finding | None:
    heat, power = found.median("throttled_heat"), found.median("throttled_power")
    clock = found.median("sm_clock_mhz")
    at = f"; the clock is at {clock:.0f} MHz" if clock else ""
    if heat is not None and heat >= HEAT_SHARE:
        return Finding(
            name="throttled",
            severity="warning",
            title="the card slows down because of heat or a fault",
            evidence=f"a brake was on in {percent(heat)} of the samples{at}",
            consequence="a lower clock for everything",
            fix="better cooling; nvidia-smi -q -d PERFORMANCE names the brake",
            numbers={"throttled_heat": heat},
        )
    if power is None or power < POWER_SHARE:
        return None
    watts = found.median("power_watts")
    drawn = f" at {watts:.0f} W" if watts else ""
    return Finding(
        name="power-limit",
        severity="note",
        title="the card runs at its power limit",
        evidence=f"in {percent(power)} of the samples{drawn}{at}",
        consequence="usual under full load; a lower limit than the maker's costs speed",
        fix="nvidia-smi -q -d POWER shows the limits",
        numbers={"throttled_power": power},
    )


def gpu_unused(found: Evidence) -> Finding | None:
    if found.run.on_gpu or not found.gpus or found.run.planned("kernels.device") != "cpu":
        return None
    name: Any = found.gpu_fact("name") or "a GPU"
    cuda = found.run.environment.get("cuda")
    why = "" if cuda else "; torch is installed without CUDA"
    return Finding(
        name="gpu-unused",
        severity="warning",
        title="the run computes on the CPU although there is a GPU",
        evidence=f"{name} is there; {found.who('kernels.device')}{why}",
        consequence="tens of times slower",
        fix="training.config.device: auto" if cuda else "install torch with CUDA",
        overrides=("training.config.device=auto",) if cuda else (),
    )


def memory_full(found: Evidence) -> Finding | None:
    retries = found.retries_per_update
    used, total = found.median("gpu_memory_bytes"), found.gpu_fact("memory_total_bytes")
    full = bool(used and isinstance(total, int) and used >= NEARLY_FULL * total)
    if retries < RETRIES_PER_UPDATE and not (full and (found.last("allocator_retries") or 0) > 0):
        return None
    filled = f"; {gib(used)} of {gib(total)} are in use" if used and total else ""
    return Finding(
        name="memory-full",
        severity="warning",
        title="the card's memory is so full that it is asked for again and again",
        evidence=f"{found.last('allocator_retries') or 0:.0f} times the allocator had to empty its "
        f"cache{filled}",
        consequence="each time the device is waited for, and the next step may not fit",
        fix="training.config.micro_batch_size: auto, or gradient_checkpointing: selective",
        overrides=("training.config.micro_batch_size=auto",),
        numbers={"retries_per_update": retries},
    )


def out_of_memory(found: Evidence) -> Finding | None:
    fallen = found.fell_back("OutOfMemory")
    if fallen is None:
        return None
    return Finding(
        name="out-of-memory",
        severity="warning",
        title="the run ran out of memory and went on with less at once",
        evidence=str(fallen.get("reason") or "the reason was not told"),
        consequence="smaller batches or recomputation, which take longer",
        fix="training.config.micro_batch_size: auto; expert plan shows what fits",
    )


RULES = (
    host_syncs,
    slow_launches,
    one_row,
    few_rows_at_once,
    company,
    busy_cores,
    braked,
    gpu_unused,
    memory_full,
    out_of_memory,
)

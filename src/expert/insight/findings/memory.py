"""How the device is used: batch size, waiting, other processes, heat, memory."""

from __future__ import annotations

from expert.core.text import counted, gib, percent, span
from expert.insight.findings.evidence import Evidence
from expert.insight.findings.finding import RuleResult
from expert.insight.findings.verdict import (
    RETRIES_PER_UPDATE,
    free_cores_fix,
    is_significant_wait,
    is_starved,
    launch_fix,
    sync_places,
)
from expert.insight.record import listed, mapping
from expert.insight.step.anatomy import number
from expert.planning.memory.fitting import MARGIN
from expert.planning.memory.memory import CONTEXT_BYTES

TOKENS_FILL_A_CARD = 8192
"""From here on 0.6B and 8B models fully used an H200 (training-speed-h200.json)."""
TWICE = 2
"""A larger micro-batch is advised if at least twice as many sequences fit."""
OTHERS_BYTES = 1.5 * 2**30
"""Driver and display use up to about 1 GiB of an otherwise idle card."""
HEAT_SHARE = 0.2
POWER_SHARE = 0.9
"""Reaching the power limit under load is normal and only worth a note; heat is not normal."""
NEARLY_FULL = 0.97


def host_sync(found: Evidence) -> RuleResult | None:
    """Reads from the device inside a step."""
    count, step = found.syncs, found.step
    if not count or step is None:
        return None
    dry = step.ran_dry or 0.0
    return RuleResult(
        f"{count} times in one step of {found.micro_batches} micro-batches, at "
        f"{sync_places(found)}; the device ran dry in {percent(dry)} of the steps",
        severity="warning" if is_starved(step) else "note",
        numbers={"syncs": float(count), "ran_dry": dry},
    )


def launch_bound(found: Evidence) -> RuleResult | None:
    """Too little work per launch, so that the host sets the pace."""
    step = found.step
    if step is None or not found.on_gpu or found.syncs or not is_starved(step):
        return None
    retries = found.retries_per_update >= RETRIES_PER_UPDATE
    if is_significant_wait(step.of("data_wait"), step) or retries:
        return None
    dry, use = step.ran_dry or 0.0, step.gpu_utilization
    tokens = (step.tokens or 0.0) / found.micro_batches
    used = f"GPU utilization {percent(use)}; " if use is not None else ""
    fix, keys = launch_fix(found)
    return RuleResult(
        f"the device ran dry in {percent(dry)} of the steps; {used}{span(step.wall)} a step, "
        f"{tokens:,.0f} tokens a micro-batch",
        fix=fix,
        keys=keys,
        gain=1 / use if use else None,
        numbers={"ran_dry": dry, "tokens_per_micro_batch": tokens},
    )


def batch_1(found: Evidence) -> RuleResult | None:
    if found.amount("batch.examples_per_update") != 1:
        return None
    tokens = f"; {found.step.tokens or 0:,.0f} tokens a step" if found.step else ""
    return RuleResult(
        f"{found.setting_words('batch.examples_per_update')}{tokens}",
        numbers={"examples_per_update": 1.0},
    )


def small_micro_batch(found: Evidence) -> RuleResult | None:
    """A micro-batch size that was set although a larger one fits."""
    micro, sequences = found.amount("batch.micro_batch"), found.amount("batch.sequences_per_update")
    budget, peak = found.amount("memory.budget_bytes"), found.peak_bytes
    if not micro or not sequences or not budget or peak is None:
        return None
    if not found.requested("batch.micro_batch") or micro >= sequences:
        return None
    per_row = sum(found.part(name) for name in ("activations", "workspace", "loss")) / micro
    fixed = max(0.0, peak - micro * per_row)
    room = int((MARGIN * budget - fixed) / per_row) if per_row > 0 else 0
    possible = min(room, int(sequences))
    if possible < TWICE * micro:
        return None
    tokens = (found.step.tokens or 0.0) / found.micro_batches if found.step else 0.0
    per_batch = f"; {tokens:,.0f} tokens a micro-batch" if found.step else ""
    return RuleResult(
        f"{found.setting_words('batch.micro_batch')}; the run holds {gib(peak)} of {gib(budget)}, "
        f"one more sequence takes {gib(per_row)}{per_batch}",
        severity="note" if tokens >= TOKENS_FILL_A_CARD and found.on_gpu else "warning",
        title=f"micro-batch size {micro:.0f} although {possible} would fit",
        consequence=f"a step takes {found.micro_batches} passes instead of "
        f"{-(-int(sequences) // possible)}",
        numbers={"micro_batch": micro, "would_fit": float(possible)},
    )


def other_process(found: Evidence) -> RuleResult | None:
    """GPU memory in use that is not this run's."""
    used, own = found.median("gpu_memory_bytes"), found.median("gpu_process_memory_bytes")
    if own is None:
        reserved = found.last("peak_reserved_bytes")
        own = reserved + CONTEXT_BYTES if reserved is not None else None
    if used is None or own is None or used - own < OTHERS_BYTES:
        return None
    holders, pid = listed(found.gpu_fact("holders")), number(found.newest("started"), "pid")
    words = ", ".join(
        f"{holder.get('name') or 'a process'} (pid {holder.get('pid')})"
        for holder in map(mapping, holders)
        if holder and holder.get("pid") != pid
    )
    at_start = f"; at the start: {words}" if words else ""
    return RuleResult(
        f"{gib(used)} in use on the card: {gib(own)} by this run, {gib(used - own)} by other "
        f"processes{at_start}",
        numbers={"others_bytes": used - own},
    )


def busy_cores(found: Evidence) -> RuleResult | None:
    """Other processes take cores that this run's threads need. On a CPU all threads wait for the
    slowest; with a GPU the launching thread falls behind."""
    crowded = found.crowded
    if crowded is None:
        return None
    threads, cores, others = crowded
    waits = not found.on_gpu or (found.step is not None and is_starved(found.step))
    return RuleResult(
        f"{counted(threads, 'thread')} on {cores} cores, of which other processes used "
        f"{others:.1f} ({percent(others / cores)}){found.neighbours}",
        severity="warning" if waits else "note",
        consequence="threads wait for the one without a core; steps take several times as long"
        if not found.on_gpu
        else "the device waits where the host has no core to launch from",
        fix=free_cores_fix(*crowded),
        numbers={"threads": threads, "cores": cores, "others": others},
    )


def throttled(found: Evidence) -> RuleResult | None:
    heat, power = found.median("throttled_heat"), found.median("throttled_power")
    clock, watts = found.median("sm_clock_mhz"), found.median("power_watts")
    at = f"; the clock is at {clock:.0f} MHz" if clock else ""
    if heat is not None and heat >= HEAT_SHARE:
        text = f"throttled in {percent(heat)} of the samples{at}"
        return RuleResult(text, numbers={"throttled_heat": heat})
    if power is None or power < POWER_SHARE:
        return None
    return RuleResult(
        f"in {percent(power)} of the samples{f' at {watts:.0f} W' if watts else ''}{at}",
        name="power-limit",
        severity="note",
        title="the card runs at its power limit",
        consequence="normal under full load; a lower limit than the maker's costs speed",
        fix="nvidia-smi -q -d POWER shows the limits",
        numbers={"throttled_power": power},
    )


def memory_full(found: Evidence) -> RuleResult | None:
    """Judged by the estimate before a run, and by allocator retries after it."""
    if found.before is not None:
        peak, budget = found.amount("memory.peak_bytes"), found.amount("memory.budget_bytes")
        share = peak / budget if peak and budget else 0.0
        if found.planned("memory.fits") is False or share <= MARGIN:
            return None
        return RuleResult(
            memory_words(found),
            title="almost all of the memory is planned for",
            consequence="another program on the card is enough to end the run, or to make it use "
            "a smaller micro-batch",
            keys=("micro_batch_size=auto",) if found.requested("batch.micro_batch") else (),
            numbers={"memory_share": share},
        )
    retries = found.retries_per_update
    used, total = found.median("gpu_memory_bytes"), found.gpu_bytes
    full = bool(used and total and used >= NEARLY_FULL * total)
    count = found.last("allocator_retries") or 0
    if retries < RETRIES_PER_UPDATE and not (full and count > 0):
        return None
    filled = f"; {gib(used)} of {gib(total)} are in use" if used and total else ""
    return RuleResult(
        f"{count:.0f} times the allocator had to empty its cache{filled}",
        numbers={"retries_per_update": retries},
    )


def does_not_fit(found: Evidence) -> RuleResult | None:
    misfit = found.before is not None and found.planned("memory.fits") is False
    return RuleResult(memory_words(found)) if misfit else None


def memory_words(found: Evidence) -> str:
    """`3.2 GiB of 22.0 GiB on RTX 4090`, as planned."""
    peak, budget = found.amount("memory.peak_bytes") or 0, found.amount("memory.budget_bytes") or 0
    return f"{gib(peak)} of {gib(budget)} on {found.run.plan.get('target')}"


def out_of_memory(found: Evidence) -> RuleResult | None:
    fallen = found.fell_back("OutOfMemory")
    return RuleResult(str(fallen.get("reason") or "the reason is unknown")) if fallen else None

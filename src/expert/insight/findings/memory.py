"""How the device is used: batch size, waiting, other processes, heat, memory."""

from __future__ import annotations

from expert.core.text import counted, gib, percent, span
from expert.insight.findings.evidence import Evidence
from expert.insight.findings.feeding import is_significant_wait
from expert.insight.findings.finding import CONFIG, Answer, Noted
from expert.insight.record import listed, mapping
from expert.insight.step.anatomy import StepAnatomy, number
from expert.manifest.schema.manifest import CHAR_GPT
from expert.planning.memory.fitting import MARGIN
from expert.planning.memory.memory import CONTEXT_BYTES

DRY_SHARE = 0.5
"""Half of the steps were launched too late: the host sets the pace."""
FULL_UTILIZATION = 0.97
"""A device this busy loses nothing even if its queue runs dry once in each step: on an H200 an 8B
model on NF4 weights did so in every step, at 100 % (training-speed-h200.json)."""
RETRIES_PER_UPDATE = 0.1
"""Emptying the allocator's cache waits for the device; once in ten steps is more than warm-up."""
TOKENS_FILL_A_CARD = 8192
"""From here on 0.6B and 8B models fully used an H200 (training-speed-h200.json)."""
TWICE = 2
"""A larger micro-batch is advised if at least twice as many sequences fit."""
OTHERS_BYTES = 1.5 * 2**30
"""Driver and display use up to about 1 GiB of an otherwise idle card."""
CROWDED_CORES = 0.3
"""Share of the cores that other processes may use; above it, they slow a run down."""
HEAT_SHARE = 0.2
"""Reaching the power limit under load is normal; heat is not."""
NEARLY_FULL = 0.97


def launch_bound(found: Evidence) -> Answer:
    """Too little work per launch, so that the host sets the pace."""
    step = found.step
    if step is None or not found.on_gpu or not is_starved(step):
        return None
    retries = found.retries_per_update >= RETRIES_PER_UPDATE
    if is_significant_wait(step.of("data_wait"), step) or retries:
        return None
    use, tokens = step.gpu_utilization, (step.tokens or 0.0) / found.micro_batches
    used = f"GPU utilization {percent(use)}; " if use is not None else ""
    # More work per launch first, then fewer launches: the fix in words, and as `--set` keys.
    micro = found.amount("batch.micro_batch")
    sequences = found.amount("batch.sequences_per_update")
    graphs_off = found.planned("kernels.cuda_graphs") is False
    if found.requested("batch.micro_batch") and micro and sequences and micro < sequences:
        setting = "micro_batch_size=auto"
    elif found.planned("data.packing") == "none" and found.planned("model.name") != CHAR_GPT:
        setting = "packing=true"
    elif graphs_off and not found.requested("kernels.cuda_graphs"):
        setting = "use_cuda_graphs=true"
    else:
        examples = found.amount("batch.examples_per_update") or 1
        setting = f"batch_size={max(16, int(2 * examples))}"
    setting = f"{CONFIG}.{setting}"
    fix, keys = setting.replace("=", ": "), (setting,)
    return Noted(
        f"the device ran dry in {percent(step.ran_dry or 0.0)} of the steps; {used}"
        f"{span(step.wall)} a step, {tokens:,.0f} tokens a micro-batch",
        fix=fix,
        keys=keys,
        gain=1 / use if use else None,
    )


def batch_1(found: Evidence) -> Answer:
    if found.amount("batch.examples_per_update") != 1:
        return None
    tokens = f"; {found.step.tokens or 0:,.0f} tokens a step" if found.step else ""
    return f"{found.setting_words('batch.examples_per_update')}{tokens}"


def small_micro_batch(found: Evidence) -> Answer:
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
    return Noted(
        f"{found.setting_words('batch.micro_batch')}, {possible} would fit; the run holds "
        f"{gib(peak)} of {gib(budget)}, one more sequence takes {gib(per_row)}; {tokens:,.0f} "
        "tokens a micro-batch",
        severity="note" if tokens >= TOKENS_FILL_A_CARD and found.on_gpu else "warning",
    )


def other_process(found: Evidence) -> Answer:
    """GPU memory in use that is not this run's."""
    used, own = found.median("gpu_memory_bytes"), found.median("gpu_process_memory_bytes")
    if own is None:
        reserved = found.last("peak_reserved_bytes")
        own = reserved + CONTEXT_BYTES if reserved is not None else None
    if used is None or own is None or used - own < OTHERS_BYTES:
        return None
    pid = number(found.newest("started"), "pid")
    words = ", ".join(
        f"{holder.get('name') or 'a process'} (pid {holder.get('pid')})"
        for holder in map(mapping, listed(found.gpu_fact("holders")))
        if holder and holder.get("pid") != pid
    )
    at_start = f"; at the start: {words}" if words else ""
    theirs = f"{gib(used - own)} by other processes"
    return f"{gib(used)} in use on the card: {gib(own)} by this run, {theirs}{at_start}"


def busy_cores(found: Evidence) -> Answer:
    """Other processes take cores that this run's threads need. On a CPU all threads wait for the
    slowest; with a GPU the launching thread falls behind."""
    event, share = found.newest("threads"), found.median("cpu_others")
    threads, cores = int(number(event, "threads") or 0), int(number(event, "cores") or 0)
    if found.on_gpu:
        threads, cores = 1, found.cores or 0  # the launching thread
    if share is None or not threads or not cores:
        return None
    others = share * cores
    if threads + others <= cores + CROWDED_CORES:
        return None
    waits = not found.on_gpu or (found.step is not None and is_starved(found.step))
    fix = "stop the other processes, or train on a machine with free cores"
    if threads > 1:
        fewer = max(1, min(threads - 1, int(cores - others + 0.5)))
        fix = f"OMP_NUM_THREADS={fewer} expert train …, or stop the other processes"
    return Noted(
        f"{counted(threads, 'thread')} on {cores} cores, of which other processes used "
        f"{others:.1f} ({percent(others / cores)})",
        severity="warning" if waits else "note",
        consequence="threads wait for the one without a core; steps take several times as long"
        if not found.on_gpu
        else "the device waits where the host has no core to launch from",
        fix=fix,
    )


def throttled(found: Evidence) -> Answer:
    heat, clock = found.median("throttled_heat"), found.median("sm_clock_mhz")
    if heat is None or heat < HEAT_SHARE:
        return None
    at = f"; the clock is at {clock:.0f} MHz" if clock else ""
    return f"throttled in {percent(heat)} of the samples{at}"


def memory_full(found: Evidence) -> Answer:
    """The allocator had to retry."""
    retries, count = found.retries_per_update, found.last("allocator_retries") or 0
    used, total = found.median("gpu_memory_bytes"), found.gpu_bytes
    full = bool(used and total and used >= NEARLY_FULL * total)
    if retries < RETRIES_PER_UPDATE and not (full and count > 0):
        return None
    filled = f"; {gib(used)} of {gib(total)} are in use" if used and total else ""
    return f"{count:.0f} times the allocator had to empty its cache{filled}"


def does_not_fit(found: Evidence) -> Answer:
    if found.before is None or found.planned("memory.fits") is not False:
        return None
    remarks = map(mapping, listed(found.run.plan.get("remarks")))
    return next(str(each["text"]) for each in remarks if each.get("path") == "memory.fits")


def out_of_memory(found: Evidence) -> Answer:
    fallen = found.fell_back("OutOfMemory")
    return str(fallen.get("reason") or "the reason is unknown") if fallen else None


def is_starved(step: StepAnatomy) -> bool:
    """Whether the device repeatedly waits for the host."""
    dry, use = step.ran_dry or 0.0, step.gpu_utilization
    return dry >= DRY_SHARE and (use is None or use < FULL_UTILIZATION)

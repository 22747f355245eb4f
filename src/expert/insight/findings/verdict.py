"""What limits a run's speed, in one sentence with numbers, and what fixing it would gain.

The rules run in a fixed order and the first match is the verdict: a device that waits for data says
nothing about its kernels, so feeding is judged before computing.
"""

from __future__ import annotations

from dataclasses import dataclass

from expert.core.text import gib, percent, span, times
from expert.insight.findings.evidence import Evidence
from expert.insight.findings.finding import CONFIG
from expert.insight.record import listed
from expert.insight.step.anatomy import StepAnatomy, number
from expert.planning.choose.kernels import NO_CHECKPOINTING_SPEEDUP

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
DRY_SHARE = 0.5
"""Half of the steps were launched too late: the host sets the pace."""
FULL_UTILIZATION = 0.97
"""A device this busy loses nothing even if its queue runs dry once in each step: on an H200 an 8B
model on NF4 weights did so in every step, at 100 % (training-speed-h200.json)."""
RETRIES_PER_UPDATE = 0.1
"""Emptying the allocator's cache waits for the device; once in ten steps is more than warm-up."""
MIN_START_SECONDS = 60.0
"""A shorter start (loading and compiling) is not reported."""
MIN_PAUSE_SECONDS = 2.0
"""Less evaluating and saving in total is not worth a change, whatever its share."""
PAUSE_BUDGET_SHARE = 0.05
"""Allowed time of evaluating or saving relative to training; sets the advised interval."""


PIN_MEMORY_FIX = (
    "training.config.dataloader_pin_memory: true and packing: true (copies overlap with computing)"
)
LINK_FIX = (
    "nvidia-smi -q shows how wide the card's link is (GPU Link Info), expert clear-cuda-cache who "
    "else uses the card"
)
FEEDING: dict[str, tuple[str, str, str]] = {
    "late": (
        "tokenising",
        "training.config.tokenize: ahead (or once: expert pretokenize)",
        "training.config.tokenize=ahead",
    ),
    "stream": (
        "reading the stream",
        "training.dataset.streaming: false (the data is prepared once)",
        "training.dataset.streaming=false",
    ),
    "padded": (
        "padding rows",
        "training.config.packing: true (or more dataloader_num_workers)",
        "training.config.packing=true",
    ),
    "packed": (
        "reading its tokens",
        "training.config.pretokenized_cache: a folder on a fast local disk",
        "",
    ),
}
"""By how batches are made: what the device waits for, the fix, and its key."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What limits the run."""

    kind: str
    """data-, copy-, launch-, sync-, memory-, compute-, evaluation-, saving- or start-bound, or
    unknown."""
    sentence: str
    fix: str = ""
    overrides: tuple[str, ...] = ()
    """The fix as `--set` takes it, if a key alone fixes it."""
    gain: float | None = None
    """The largest possible speedup, if anything can be gained."""


def judge(found: Evidence) -> Verdict:
    """The verdict on the whole run if most of its time was not training, else on a step."""
    return judge_run(found) or judge_step(found)


def judge_step(found: Evidence) -> Verdict:
    step = found.step
    if step is None or step.wall <= 0:
        return _without_log_lines(found)
    pinned = found.planned("loader.pin_memory") is not False
    waits = feeding_verdict(step, kind=found.feed_kind, pinned=pinned)
    return waits or _memory(found) or _host(found, step) or _computing(found, step)


def _without_log_lines(found: Evidence) -> Verdict:
    """No log line: the run ended before the first, or logging_steps is too large."""
    done = max((number(event, "step") or 0 for event in found.run.events), default=0)
    if done:
        why = f"{done:.0f} steps finished, but no log line shows how long they took."
        fix, overrides = "training.config.logging_steps: 1", ("training.config.logging_steps=1",)
        return Verdict(kind="unknown", sentence=f"unknown: {why}", fix=fix, overrides=overrides)
    error = found.newest("failed").get("error") or found.newest("stopped").get("reason")
    why = "no step was finished, so there is nothing to judge by."
    fix = f"the run ended with: {error}" if error else ""
    return Verdict(kind="unknown", sentence=f"unknown: {why}", fix=fix)


# --- feeding -------------------------------------------------------------------------------------


def is_significant_wait(waited: float, step: StepAnatomy) -> bool:
    """Whether a wait is at least a tenth of the step, and longer than a thread switch."""
    return waited >= max(WAITING_SHARE * step.wall, THREAD_SWITCH_SECONDS)


def is_copy_bound(step: StepAnatomy) -> bool:
    """Whether overlapped copies fill the whole step while the device does not."""
    fill = step.copies_beside and step.of("copy") >= COPY_BOUND_SHARE * step.wall
    return fill and is_significant_wait(step.wall - step.compute, step)


def feeding_verdict(
    step: StepAnatomy, *, kind: str = "late", pinned: bool = False
) -> Verdict | None:
    """Data-bound or copy-bound, from a step's phases alone; None if the device hardly waits.

    `kind` is how batches are made: "late" if rows are tokenised on demand. `pinned`: copies come
    from page-locked memory.
    """
    waited, copied = step.of("data_wait"), step.exposed_copy
    idle = step.wall - step.compute if is_copy_bound(step) else waited + copied
    if not is_significant_wait(idle, step):
        return None
    gain = step.wall / (step.wall - idle) if step.wall > idle else None
    beside = step.of("copy") if step.copies_beside else 0.0
    copies = copied > waited or beside >= COPY_SHARE_OF_WAIT * waited > 0
    if is_copy_bound(step) or copies:
        # If copies already overlap and come from page-locked memory, the link is the limit.
        return Verdict(
            kind="copy-bound",
            sentence=f"copy-bound: copying batches takes {span(step.of('copy'))} a step, and the "
            f"device is idle for {span(idle)} of its {span(step.wall)}.",
            fix=LINK_FIX if pinned and step.copies_beside else PIN_MEMORY_FIX,
            gain=gain,
        )
    doing, fix, key = FEEDING.get(kind, FEEDING["packed"])
    what = f"made it wait {span(waited)} for {doing}"
    if copied:
        what += f" and {span(copied)} for copying"
        fix += f"; {PIN_MEMORY_FIX}"
    return Verdict(
        kind="data-bound",
        sentence=f"data-bound: the device computes {span(step.compute)} of a step's "
        f"{span(step.wall)} and is idle {percent(step.idle_share or 0)} of the time; the feeding "
        f"{what}.",
        fix=fix,
        overrides=(key,) if key else (),
        gain=gain,
    )


# --- memory --------------------------------------------------------------------------------------


def _memory(found: Evidence) -> Verdict | None:
    """Memory is short: the allocator keeps retrying, or blocks are checkpointed to save memory."""
    if found.retries_per_update >= RETRIES_PER_UPDATE:
        return Verdict(
            kind="memory-bound",
            sentence="memory-bound: the allocator had to empty its cache "
            f"{found.retries_per_update:.1f} times a step, and each time everything waits.",
            fix="training.config.gradient_checkpointing: selective, or a smaller micro_batch_size",
        )
    gain = None
    if found.recomputes and not found.requested("kernels.checkpointing"):
        what = "blocks are checkpointed because memory is short"
        gain = gain_without_checkpointing(found)
    elif (event := found.fell_back("OutOfMemory")) is not None:
        reason = str(event.get("reason", "")).strip() or "out of memory"
        what = f"the run ran out of memory and continued with less: {reason}"
    else:
        return None
    peak = f"; it holds {gib(found.peak_bytes)}" if found.peak_bytes else ""
    return Verdict(
        kind="memory-bound",
        sentence=f"memory-bound: {what}{peak}.",
        fix="base_model.quantization: int4, a shorter training.config.max_seq_length, or a card "
        "with more memory",
        gain=gain,
    )


def gain_without_checkpointing(found: Evidence) -> float:
    """The speedup from keeping all activations; half as much if some blocks keep theirs."""
    if found.planned("kernels.checkpointing") == "full":
        return NO_CHECKPOINTING_SPEEDUP
    return 1 + (NO_CHECKPOINTING_SPEEDUP - 1) / 2


# --- the host ------------------------------------------------------------------------------------


def is_starved(step: StepAnatomy) -> bool:
    """Whether the device repeatedly waits for the host."""
    dry, use = step.ran_dry or 0.0, step.gpu_utilization
    return dry >= DRY_SHARE and (use is None or use < FULL_UTILIZATION)


def _host(found: Evidence, step: StepAnatomy) -> Verdict | None:
    """The device waits for the host, which stops to read from it or launches too slowly."""
    if not found.on_gpu or not is_starved(step):
        return None
    use, seen = step.gpu_utilization, f"in {percent(step.ran_dry or 0)} of the steps"
    gain = 1 / use if use else None
    if found.syncs:
        return Verdict(
            kind="sync-bound",
            sentence=f"sync-bound: the host stops {found.syncs} times a step to read from the "
            f"device, which runs dry {seen}.",
            fix=f"take the reads out of the step: {sync_places(found)}",
            gain=gain,
        )
    tokens = f" with {step.tokens:,.0f} tokens each" if step.tokens else ""
    fix, overrides = launch_fix(found)
    return Verdict(
        kind="launch-bound",
        sentence=f"launch-bound: the device runs dry {seen}: steps of {span(step.wall)}{tokens} "
        "are too small for the time it takes to launch them.",
        fix=fix,
        overrides=overrides,
        gain=gain,
    )


def sync_places(found: Evidence) -> str:
    places = listed(found.newest("syncs").get("places"))
    return ", ".join(map(str, places[:5])) or "places unknown"


def launch_fix(found: Evidence) -> tuple[str, tuple[str, ...]]:
    """More work per launch first, then fewer launches: the fix in words, and as `--set` keys."""
    micro = found.amount("batch.micro_batch")
    sequences = found.amount("batch.sequences_per_update")
    graphs_off = found.planned("kernels.cuda_graphs") is False
    if found.requested("batch.micro_batch") and micro and sequences and micro < sequences:
        setting = "micro_batch_size=auto"
    elif found.padded:
        setting = "packing=true"
    elif graphs_off and not found.requested("kernels.cuda_graphs"):
        setting = "use_cuda_graphs=true"
    else:
        examples = found.amount("batch.examples_per_update") or 1
        setting = f"batch_size={max(16, int(2 * examples))}"
    setting = f"{CONFIG}.{setting}"
    return setting.replace("=", ": "), (setting,)


# --- computing -----------------------------------------------------------------------------------


def padding_fix(found: Evidence) -> str:
    if found.planned("data.packing") == "none":
        return "training.config.packing: true"
    return "training.config.max_seq_length: smaller, or more rows per step (batch_size)"


def free_cores_fix(threads: int, cores: int, others: float) -> str:
    """Fewer threads, or fewer other processes."""
    if threads < 2:
        return "stop the other processes, or train on a machine with free cores"
    fewer = max(1, min(threads - 1, int(cores - others + 0.5)))
    return f"OMP_NUM_THREADS={fewer} expert train …, or stop the other processes"


def _computing(found: Evidence, step: StepAnatomy) -> Verdict:
    use, reached, band = step.gpu_utilization, step.tokens_per_second, found.band
    if step.idle_share is None and use is None:
        why = f"a step takes {span(step.wall)}, but this run does not record where that goes."
        return Verdict(kind="unknown", sentence=f"unknown: {why}")
    good, more, fix = "compute-bound: good.", "", ""
    crowded = found.crowded if not found.on_gpu else None
    padded = ""
    if found.padding_share is not None:
        padded = f"{percent(found.padding_share)} of what is computed is padding"
    if crowded is not None:
        _, cores, others = crowded
        good, fix = "compute-bound, on crowded cores.", free_cores_fix(*crowded)
        more = f", while other processes used {others:.1f} of {cores} cores{found.neighbours}"
        more += f"; {padded}" if padded else ""
    elif padded:
        good, fix = f"compute-bound, but {padded}.", padding_fix(found)
    elif band is not None and reached is not None and reached < band.acceptable_from:
        part = percent(reached / band.reference)
        good = f"compute-bound, but at {part} of the rate that this card reaches with such a model."
    busy = percent(1 - step.idle_share if step.idle_share is not None else use or 0.0)
    rate = f" at {reached:,.0f} tokens/s" if reached else ""
    device = "GPU" if found.on_gpu else "CPU"
    sentence = f"{good} The {device} computes {busy} of a step's {span(step.wall)}{rate}{more}"
    if found.on_gpu and step.mfu:
        card = found.gpu_fact("name") or "the card"
        sentence += f", which is {percent(step.mfu)} of the peak of {card} (MFU)"
        sentence += f"; the peak is {times(1 / step.mfu)} away"
    return Verdict(kind="compute-bound", sentence=f"{sentence}.", fix=fix)


# --- bound by something other than training ------------------------------------------------------


def judge_run(found: Evidence) -> Verdict | None:
    """A verdict if something else took longer than the training itself."""
    spent = found.anatomy.run
    parts: dict[str, float] = {}
    if len(found.run.of("eval")) > 1:  # a single one at the end is not too many
        parts["evaluation"] = spent.evaluating
    if len(found.run.of("saved")) > 1:
        parts["saving"] = spent.saving
    ended = any(found.run.of(kind) for kind in ("finished", "stopped"))
    if ended and spent.start >= MIN_START_SECONDS:
        parts["start"] = spent.start
    name = max(parts, key=lambda part: parts[part], default="")
    seconds = parts.get(name, 0.0)
    if found.step is None or seconds < max(MIN_PAUSE_SECONDS, spent.training):
        return None
    words = {"evaluation": "evaluating", "saving": "saving checkpoints",
             "start": "loading and compiling"}[name]  # fmt: skip
    fix, overrides = "train longer, or training.config.torch_compile: false", ()
    if name != "start":
        setting = advised_interval(found, "eval" if name == "evaluation" else "saved", seconds)
        fix, overrides = f"training.config.{setting.replace('=', ': ')}", (f"{CONFIG}.{setting}",)
    return Verdict(
        kind=f"{name}-bound",
        sentence=f"{name}-bound: {words} took {span(seconds)} of {span(spent.total)} "
        f"({percent(seconds / spent.total)}), training only {span(spent.training)}.",
        fix=fix,
        overrides=overrides,
    )


def advised_interval(found: Evidence, event: str, seconds: float) -> str:
    """The setting at which evaluations or checkpoints take 5 % of the training time in total."""
    key = "eval_steps" if event == "eval" else "save_steps"
    updates = sum(line.updates for line in found.anatomy.lines)
    count = max(1, len(found.run.of(event)))
    training = found.anatomy.run.training
    allowed = max(1.0, PAUSE_BUDGET_SHARE * training / (seconds / count)) if seconds else 1.0
    return f"{key}={max(1, round(updates / allowed))}"

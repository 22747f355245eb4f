"""What limits a run's speed, in one sentence with numbers, and what fixing it would gain.

The rules run in a fixed order and the first match is the verdict: a device that waits for data says
nothing about its kernels, so feeding is judged before computing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expert.core.text import gib, percent, span, times
from expert.insight.findings.evidence import Evidence
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


Kind = Literal[
    "data-bound", "copy-bound", "launch-bound", "memory-bound", "compute-bound",
    "evaluation-bound", "saving-bound", "start-bound", "unknown",
]  # fmt: skip
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

    kind: Kind
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
        every = found.amount("watch.logging_steps")
        requested = "" if every is None else f": logging_steps is {every:.0f}"
        why = f"{done:.0f} steps finished, but no log line shows how long they took{requested}."
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
    budget = found.amount("memory.budget_bytes")
    room = f" of {gib(budget)}" if budget else ""
    peak = f"; it holds {gib(found.peak_bytes)}{room}" if found.peak_bytes else ""
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
    """The device waits for the host, which launches too slowly."""
    if not found.on_gpu or not is_starved(step):
        return None
    use, seen = step.gpu_utilization, f"in {percent(step.ran_dry or 0)} of the steps"
    gain = 1 / use if use else None
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


def launch_fix(found: Evidence) -> tuple[str, tuple[str, ...]]:
    """More work per launch first, then fewer launches: the fix in words, and as `--set` keys."""
    micro = found.amount("batch.micro_batch")
    sequences = found.amount("batch.sequences_per_update")
    more = ""
    if found.requested("batch.micro_batch") and micro and sequences and micro < sequences:
        key, value = "micro_batch_size", "auto"
    elif found.padded:
        key, value = "packing", "true"
    elif found.planned("kernels.cuda_graphs") is False and not found.requested(
        "kernels.cuda_graphs"
    ):
        key, value = "use_cuda_graphs", "true"
    else:
        key = "batch_size"
        value = str(max(16, int(2 * (found.amount("batch.examples_per_update") or 1))))
        uncompiled = found.planned("kernels.compile") is False
        more = "torch_compile: true" if uncompiled else "torch_compile_mode: reduce-overhead"
        more = f", or {more}"
    return f"training.config.{key}: {value}{more}", (f"training.config.{key}={value}",)


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
        more = f", while other processes used {others:.1f} of {cores} cores"
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
    if name == "start":
        fix, gain = "train longer, or several experts one after the other on the same machine", None
        if spent.compiling > spent.loading:
            fix = "training.config.torch_compile: false (a run this short does not earn the time "
            fix += "back)"
            gain = spent.total / max(1e-9, spent.total - spent.compiling)
        return Verdict(
            kind="start-bound",
            sentence=f"start-bound: loading took {span(spent.loading)} and compiling "
            f"{span(spent.compiling)} of {span(spent.total)}, training only "
            f"{span(spent.training)}.",
            fix=fix,
            gain=gain,
        )
    kind: Kind = "evaluation-bound" if name == "evaluation" else "saving-bound"
    word = "evaluating" if name == "evaluation" else "saving checkpoints"
    key, interval = advised_interval(found, "eval" if name == "evaluation" else "saved", seconds)
    kept = spent.total - seconds + PAUSE_BUDGET_SHARE * spent.training
    return Verdict(
        kind=kind,
        sentence=f"{kind}: {word} took {span(seconds)} of {span(spent.total)} "
        f"({percent(seconds / spent.total)}), training only {span(spent.training)}.",
        fix=f"training.config.{key}: {interval}",
        overrides=(f"training.config.{key}={interval}",),
        gain=spent.total / max(1e-9, kept),
    )


def advised_interval(found: Evidence, event: str, seconds: float) -> tuple[str, int]:
    """The key and the interval in steps at which they take 5 % of the training time in total."""
    key = "eval_steps" if event == "eval" else "save_steps"
    updates = sum(line.updates for line in found.anatomy.lines)
    count = max(1, len(found.run.of(event)))
    training = found.anatomy.run.training
    allowed = max(1.0, PAUSE_BUDGET_SHARE * training / (seconds / count)) if seconds else 1.0
    return key, max(1, round(updates / allowed))

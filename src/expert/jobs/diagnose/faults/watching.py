"""Rules about looking, saving, and how long it all takes."""

from __future__ import annotations

from expert.jobs.diagnose.faults.asked import CONFIG, Answer, Asked, answer

LONG_RUN_SECONDS = 24 * 3600
LIKELY_SHARE_OF_PEAK = 0.4
"""As planning/choose/kernels.py reckons where no rate was measured."""


def saving(a: Asked) -> Answer:
    watch, length = a.plan.watch, a.plan.length
    if watch.save_strategy == "no":
        evidence = "save_strategy: no"
    elif (
        watch.save_strategy == "steps"
        and length.total_steps
        and (watch.save_steps or 0) >= length.total_steps
    ):
        evidence = f"save_steps {watch.save_steps}, and the run has {length.total_steps} updates"
    else:
        return None
    return answer(
        "saves-only-at-the-end",
        "warning",
        "nothing is saved before the end",
        evidence,
        "a crash, or a full disk, loses the whole run",
        set_to=("save_strategy=epoch", "save_steps=null"),
    )


def logging(a: Asked) -> Answer:
    if a.plan.watch.logging_steps > 1:
        return None
    return answer(
        "logging-often",
        "note",
        "every update writes a line",
        "logging_steps is 1",
        "numbers are read when they have arrived, so the card does not wait; the files grow",
    )


def evaluating(a: Asked) -> Answer:
    if a.plan.watch.evaluation_strategy != "no" or a.plan.data.validation == "none":
        return None
    return answer(
        "no-evaluation",
        "note",
        "the validation rows are never evaluated",
        f"evaluation_strategy: no; {a.plan.data.validation}",
        "nobody sees when the expert stops getting better",
        set_to=("evaluation_strategy=auto",),
    )


def clipping(a: Asked) -> Answer:
    if a.plan.optim.max_grad_norm > 0:
        return None
    return answer(
        "no-clipping",
        "note",
        "gradients are not clipped",
        "max_grad_norm is 0",
        "one bad batch can undo many updates",
        set_to=("max_grad_norm=1.0",),
    )


def warm_up(a: Asked) -> Answer:
    optim = a.plan.optim
    if optim.warmup_steps or optim.warmup_ratio:
        return None
    return answer(
        "no-warm-up",
        "note",
        "the rate begins at its peak",
        "warmup_steps and warmup_ratio are 0",
        "the first updates may be the worst of the run",
        set_to=("warmup_ratio=0.03", "warmup_steps=null"),
    )


def data_size(a: Asked) -> Answer:
    length, spec = a.plan.length, a.manifest.training.dataset
    seconds = length.seconds or (length.seconds_at_peak or 0) / LIKELY_SHARE_OF_PEAK
    if seconds <= LONG_RUN_SECONDS:
        return None
    tokens = (length.tokens_per_epoch or 0) * length.epochs
    limit = "training.dataset.max_chars" if spec.max_chars else f"{CONFIG}.max_steps"
    return answer(
        "long-run",
        "warning",
        "the run takes more than a day",
        f"{tokens:,.0f} tokens, about {seconds / 3600:.0f} hours",
        "more data than was meant, or more epochs than are needed",
        fix=f"look at the number of rows; --set {limit}=… or fewer epochs limit it",
        hours=seconds / 3600,
    )

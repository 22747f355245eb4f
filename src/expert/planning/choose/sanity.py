"""Warnings about settings that make training diverge or have no effect."""

from __future__ import annotations

from expert.core.text import percent
from expert.planning.draft import PlanDraft

# Far beyond any published run: a warning that is often wrong is ignored.
MOST_ADAM_RATE = 0.1
LEAST_RATE = 1e-8
MOST_WARMUP = 0.9


def warn_of_settings(draft: PlanDraft) -> None:
    """Warn about values of the plan that hardly anyone means."""
    rate, name = draft["optim.learning_rate"], draft["optim.optimizer"]
    total = draft["length.total_steps"]
    if rate >= MOST_ADAM_RATE and "sgd" not in name:
        draft.warn("optim.learning_rate", f"{rate:g} makes nearly every run with {name} diverge")
    if rate < LEAST_RATE:
        draft.warn("optim.learning_rate", f"{rate:g} is so small that hardly a weight changes")
    for option in ("min_lr", "lr_end"):
        least = draft["optim.scheduler_options"].get(option)
        if least is not None and least > rate:
            text = f"{option} {least:g} is above the learning rate of {rate:g}: the rate rises"
            draft.warn("optim.scheduler_options", text)
    warmup, ratio = draft["optim.warmup_steps"], draft["optim.warmup_ratio"]
    never = "the learning rate never reaches its peak"
    if ratio is not None and ratio > MOST_WARMUP:
        draft.warn("optim.warmup_ratio", f"{percent(ratio)} of the run is warm-up: {never}")
    if total is None:
        return
    if warmup is not None and warmup > total:
        text = f"{warmup} steps are more than the {total} of the whole run: {never}"
        draft.warn("optim.warmup_steps", text)
    # An evaluation or checkpoint that would come after the last step.
    for path, strategy in (
        ("watch.eval_steps", "watch.evaluation_strategy"),
        ("watch.save_steps", "watch.save_strategy"),
    ):
        every = draft[path]
        if every is not None and every > total and draft[strategy] == "steps":
            draft.warn(path, f"{every} steps are more than the {total} of the whole run")

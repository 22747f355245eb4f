"""Warnings about settings that make training diverge or have no effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from expert.core.text import percent
from expert.planning.decisions import Remark

# Far beyond any published run: a warning that is often wrong is ignored.
MOST_ADAM_RATE = 0.1
LEAST_RATE = 1e-8
MOST_WARMUP = 0.9


def sanity_warnings(value: Callable[[str], Any], total: int | None) -> list[Remark]:
    """Warnings about the values of a plan; `total`: its steps, if known."""
    return [Remark.warning(path, text) for path, text in _doubts(value, total)]


def _doubts(value: Callable[[str], Any], total: int | None) -> Iterator[tuple[str, str]]:
    rate, name = value("optim.learning_rate"), str(value("optim.optimizer"))
    if rate >= MOST_ADAM_RATE and "sgd" not in name:
        yield "optim.learning_rate", f"{rate:g} makes nearly every run with {name} diverge"
    if rate < LEAST_RATE:
        yield "optim.learning_rate", f"{rate:g} is so small that hardly a weight changes"
    for option in ("min_lr", "lr_end"):
        least = value("optim.scheduler_options").get(option)
        if least is not None and least > rate:
            text = f"{option} {least:g} is above the learning rate of {rate:g}: the rate rises"
            yield "optim.scheduler_options", text
    warmup, ratio = value("optim.warmup_steps"), value("optim.warmup_ratio")
    never = "the learning rate never reaches its peak"
    if ratio is not None and ratio > MOST_WARMUP:
        yield "optim.warmup_ratio", f"{percent(ratio)} of the run is warm-up: {never}"
    if total is None:
        return
    if warmup is not None and warmup > total:
        text = f"{warmup} steps are more than the {total} of the whole run: {never}"
        yield "optim.warmup_steps", text
    # An evaluation or checkpoint that would come after the last step.
    for path, strategy in (
        ("watch.eval_steps", "watch.evaluation_strategy"),
        ("watch.save_steps", "watch.save_strategy"),
    ):
        every = value(path)
        if every is not None and every > total and value(strategy) == "steps":
            yield path, f"{every} steps are more than the {total} of the whole run"

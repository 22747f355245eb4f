"""Warnings about settings that prevent training, make it diverge or have no effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from expert.core.text import percent
from expert.planning.decisions import Remark

# Far beyond any published run: a warning that is often wrong is ignored.
MOST_DROPOUT = 0.8
MOST_DECAY_A_STEP = 0.01
MOST_ADAM_RATE = 0.1
LEAST_RATE = 1e-8
MOST_EPSILON = 1e-2
LEAST_NORM = 1e-6
MOST_WARMUP = 0.9
MOST_IMPROVEMENT = 5.0
"""Nats: more than the loss of most runs at their start."""


def sanity_warnings(value: Callable[[str], Any], total: int | None) -> list[Remark]:
    """Warnings about the values of a plan; `total`: its steps, if known."""
    doubts = [*_about_weights(value), *_about_rates(value), *_about_steps(value, total)]
    return [Remark.warning(path, text) for path, text in doubts]


def _about_weights(value: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    dropout, decay = value("adapter.dropout"), value("optim.weight_decay")
    if dropout >= 1:
        text = "1 drops every input of the adapter: nothing is trained  (usual: 0 to 0.1)"
        yield "adapter.dropout", text
    elif dropout >= MOST_DROPOUT:
        share = percent(dropout)
        text = f"{dropout:g} drops {share} of the adapter's inputs  (usual: 0 to 0.1)"
        yield "adapter.dropout", text
    lost = decay * value("optim.learning_rate")
    if lost > MOST_DECAY_A_STEP:
        what = f"every step takes away {percent(lost)} of each weight"
        if lost >= 2:
            what = f"every step multiplies each weight by {1 - lost:.3g}, and they explode"
        elif lost > 0.5:
            what = "nearly nothing is left of a weight after each step"
        text = f"{decay:g} at a learning rate of {value('optim.learning_rate'):g}: {what}"
        yield "optim.weight_decay", f"{text}  (usual: 0 to 0.1)"


def _about_rates(value: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    rate, epsilon = value("optim.learning_rate"), value("optim.epsilon")
    name, norm = str(value("optim.optimizer")), value("optim.max_grad_norm")
    if rate >= MOST_ADAM_RATE and "sgd" not in name:
        yield "optim.learning_rate", f"{rate:g} makes nearly every run with {name} diverge"
    if rate < LEAST_RATE:
        yield "optim.learning_rate", f"{rate:g} is so small that hardly a weight changes"
    if epsilon >= MOST_EPSILON and "adam" in name:
        text = f"{epsilon:g} is larger than most gradients: hardly a weight changes  (usual: 1e-8)"
        yield "optim.epsilon", text
    if 0 < norm <= LEAST_NORM:
        text = f"gradients scaled down to {norm:g} hardly change a weight  (usual: 1; 0: none)"
        yield "optim.max_grad_norm", text
    for option in ("min_lr", "lr_end"):
        least = value("optim.scheduler_options").get(option)
        if least is not None and least > rate:
            text = f"{option} {least:g} is above the learning rate of {rate:g}: the rate rises"
            yield "optim.scheduler_options", text


def _about_steps(value: Callable[[str], Any], total: int | None) -> Iterator[tuple[str, str]]:
    """A warm-up, evaluation or checkpoint that would come at or after the last step."""
    warmup, ratio = value("optim.warmup_steps"), value("optim.warmup_ratio")
    never = "the learning rate never reaches its peak"
    if ratio is not None and ratio > MOST_WARMUP:
        yield "optim.warmup_ratio", f"{percent(ratio)} of the run is warm-up: {never}"
    if total is None:
        return
    if warmup is not None and warmup > total:
        text = f"{warmup} steps are more than the {total} of the whole run: {never}"
        yield "optim.warmup_steps", text
    for path, strategy in (
        ("watch.eval_steps", "watch.evaluation_strategy"),
        ("watch.save_steps", "watch.save_strategy"),
    ):
        every = value(path)
        if every is not None and every > total and value(strategy) == "steps":
            yield path, f"{every} steps are more than the {total} of the whole run"
    patience, least = (
        value("watch.early_stopping_patience"),
        value("watch.early_stopping_threshold"),
    )
    if patience is not None and least >= MOST_IMPROVEMENT:
        text = f"no evaluation improves by {least:g}: the run ends after {patience} of them"
        yield "watch.early_stopping_threshold", text

"""Converts files of mlx-lm; refuses those of AutoTrain."""

from __future__ import annotations

from expert.manifest.migrate.migration import Migration, take, with_value
from expert.manifest.peers.defaults import (
    default_constant_rate,
    default_no_clipping,
    put_default,
    steps_overrule_epochs,
)
from expert.manifest.peers.packed_batches import int_or_zero
from expert.manifest.text.item import Item, shown

_NAMES = {
    "iters": "max_steps",
    "steps_per_eval": "eval_steps",
    "steps_per_report": "logging_steps",
    "save_every": "save_steps",
    "fine_tune_type": "adapter_type",
    "grad_checkpoint": "gradient_checkpointing",
    "grad_accumulation_steps": "gradient_accumulation_steps",
}
_SUPERSEDED = {
    "train": "expert train trains",
    "test": "expert validate judges a run",
    "val_batches": "all validation rows are evaluated",
    "test_batches": "expert validate judges all test rows",
    "adapter_path": "the adapter is kept in the run folder",
}
_DECAYS = {"adam": 0, "adamw": 0.01}
_OPTIMIZER_KEYS = {"betas": "betas", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
# The schedule of Expert, and the positions of last rate and number of steps in `arguments`.
_SCHEDULES = {"cosine_decay": ("cosine", 2, 1), "linear_schedule": ("polynomial", 1, 2)}


def read_mlx(work: Migration) -> None:
    """Convert mlx-lm's files, which count iterations and give adapters a scale."""
    if "iters" not in work.root:
        return
    work.rename(_NAMES)
    if work.is_override:
        return
    # mlx-lm's default is false
    line = work.root["max_steps"].line
    work.root.setdefault("mask_prompt", Item(False, "mask_prompt", line))
    _optimizer(work)
    _iterations_to_steps(work)
    _schedule(work)
    steps_overrule_epochs(work, work.root)
    default_no_clipping(work, "mlx-lm")
    layers = take(work.root, "num_layers")
    if layers.value not in (None, -1):
        what = f"the last {shown(layers.plain())} blocks, but every block gets an adapter here"
        work.problem(layers, what, "write -1 for all blocks")
    for key, text in _SUPERSEDED.items():
        item = take(work.root, key)
        if item.value is not None:
            work.supersede(item, text)
    adapter = take(work.root, "lora_parameters").fields()
    rank, scale = (adapter.get(name, Item(None)) for name in ("rank", "scale"))
    if isinstance(rank.value, int) and isinstance(scale.value, int | float):
        alpha = round(rank.value * scale.value)
        work.root["lora_alpha"] = with_value(scale, alpha)
        work.read_as(scale, f"training.config.alpha: {alpha} (rank × scale)")
    names = adapter.get("keys", Item(None))
    if isinstance(names.value, list):
        for name in names.value:
            name.value = str(name.value).rpartition(".")[2]
        work.place(work.root, "target_modules", names, "training.config.target_modules")
    for key in ("rank", "dropout"):
        if key in adapter:
            work.place(work.root, key, adapter[key], f"training.config.{key}")


def _optimizer(work: Migration) -> None:
    """Convert `optimizer` and its part of `optimizer_config`; Adam is AdamW without decay."""
    name = work.root.get("optimizer", Item("adam", "optimizer"))
    decay = _DECAYS.get(str(name.value).lower())
    if decay is None:
        return  # the schema reports it
    settings = take(work.root, "optimizer_config").get(str(name.value)) or Item(None)
    for key, item in settings.fields().items():
        if key in _OPTIMIZER_KEYS:
            home = _OPTIMIZER_KEYS[key]
            work.place(work.root, home, item, f"training.config.{home}")
        elif not (key == "bias_correction" and item.value is True):
            work.without_effect(item, "AdamW of torch has no such setting")
    work.root["optimizer"] = with_value(name, "adamw_torch")
    work.read_as(name, "training.config.optim: adamw_torch")
    put_default(work, "weight_decay", decay, f"the default of {name.value} in mlx-lm", name)


def _schedule(work: Migration) -> None:
    """Convert `lr_schedule`, whose arguments are the rates and the steps between them. Steps of the
    optimizer, not iterations."""
    schedule = take(work.root, "lr_schedule")
    if schedule.value is None:
        default_constant_rate(work, "mlx-lm")
        return
    name, given = (schedule.get(key) or Item(None) for key in ("name", "arguments"))
    numbers = given.plain() if isinstance(given.value, list) else []
    schedule_kind = _SCHEDULES.get(name.value) if isinstance(name.value, str) else None
    if schedule_kind is None or not all(type(each) in (int, float) for each in numbers):
        what = f"{shown(schedule.plain())} is not a schedule that is known here"
        work.problem(schedule, what, "write lr_scheduler: linear, cosine or constant")
        return
    kind, last, length = schedule_kind
    work.root["lr_scheduler"] = with_value(schedule, kind)
    work.read_as(schedule, f"training.config.lr_scheduler: {kind}")
    if numbers:
        rate = work.root.get("learning_rate")
        if rate is not None and rate.value != numbers[0]:
            work.supersede(rate, f"lr_schedule starts at {numbers[0]:g}")
        work.root["learning_rate"] = with_value(given, numbers[0])
    if len(numbers) > last and numbers[last]:
        lowest = {"cosine": "min_lr", "polynomial": "lr_end"}[kind]
        options = {lowest: with_value(given, numbers[last])}
        work.root["lr_scheduler_kwargs"] = with_value(given, options)
    warmup = schedule.get("warmup") or with_value(schedule, 0)
    work.root["warmup_steps"] = warmup
    steps = int_or_zero(work.root["max_steps"])
    if len(numbers) > length and numbers[length] + int_or_zero(warmup) < steps:
        work.report("warning", given, "the learning rate falls until the end of the run")


def _iterations_to_steps(work: Migration) -> None:
    """With gradient accumulation, several iterations of mlx-lm are one optimizer step."""
    passes = int_or_zero(work.root.get("gradient_accumulation_steps", Item(None)))
    for key in ("max_steps", "eval_steps", "logging_steps", "save_steps") if passes > 1 else ():
        item = work.root.get(key, Item(None))
        if int_or_zero(item):
            steps = -(-int_or_zero(item) // passes)
            work.root[key] = with_value(item, steps)
            work.read_as(item, f"training.config.{key}: {steps} (one step is {passes} iterations)")


def refuse_autotrain(work: Migration) -> None:
    params = work.root.get("params", Item(None))
    if params.fields() and str(work.root.get("task", Item(None)).value).startswith("llm"):
        what = "settings of AutoTrain are not read"
        work.problem(params, what, "write them at the top level; docs/COMING_FROM.md has the names")

"""Converts config files of Unsloth Studio: `training`, `lora` and `logging`."""

from __future__ import annotations

from expert.manifest.migrate.migration import Entries, Migration, take, with_value
from expert.manifest.peers.defaults import steps_overrule_epochs
from expert.manifest.text.item import Item

_SIGNS = ("training_type", "train_on_completions")
_NEVER = {"save_steps": "save_strategy", "eval_steps": "evaluation_strategy"}


def read_unsloth_studio(work: Migration) -> None:
    training = work.root.get("training", Item(None)).fields()
    if work.is_expert_manifest or not any(sign in training for sign in _SIGNS):
        return
    _kind(work, training)
    for key, home in _NEVER.items():
        if training.get(key, Item(None)).value == 0:
            item = training.pop(key)
            training.setdefault(home, with_value(item, "no"))
            work.read_as(item, f"training.config.{home}: no")
    if training.get("num_epochs", Item(None)).value == 0:
        del training["num_epochs"]
    steps_overrule_epochs(work, training)
    _logging(work, take(work.root, "logging").fields(), training)


def _kind(work: Migration, training: Entries) -> None:
    """Convert `training_type`; with full training, the section `lora` has no effect."""
    kind = take(training, "training_type")
    word = str(kind.value).lower()
    if kind.value is None:
        return
    if not any(known in word for known in ("full", "lora")):
        work.refuse(kind, "lora or full")
        return
    home = "full" if "full" in word else "lora"
    training.setdefault("adapter_type", with_value(kind, home))
    work.read_as(kind, f"training.config.adapter_type: {home}")
    if home == "full" and "lora" in work.root:
        work.supersede(work.root.pop("lora"), "every weight is trained")


def _logging(work: Migration, fields: Entries, training: Entries) -> None:
    steps = take(fields, "log_frequency")
    if steps.value is not None:
        work.place(training, "logging_steps", steps, "training.config.logging_steps")
    project, enabled = take(fields, "wandb_project"), take(fields, "enable_wandb")
    if enabled.value is True and project.value:
        training["wandb_project"] = project
    elif enabled.value is True:
        training["use_wandb"] = enabled
    for key in ("enable_tensorboard", "tensorboard_dir"):
        item = take(fields, key)
        if item.value not in (None, True):
            work.supersede(item, "TensorBoard files are in the run folder")
    for item in fields.values():
        work.without_effect(item, "trackers decides what is logged where")

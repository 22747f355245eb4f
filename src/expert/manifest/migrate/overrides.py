"""Overrides from the command line: `--set path=value`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import reduce
from typing import Any

from expert.core.errors import ExpertError
from expert.manifest.migrate.aliases import sections_with_key
from expert.manifest.migrate.layout import migrate
from expert.manifest.migrate.migration import Migration, with_value
from expert.manifest.text.item import MAX_DEPTH, Item, join
from expert.manifest.text.yaml_text import parse_yaml

_STEP = re.compile(r"([^.\[\]]+)((?:\[[0-9]{1,6}\])*)")
# A key of --set, and what it implies for another key of the file.
_IMPLIED = (
    ("eval_steps", "evaluation_strategy", "steps"),
    ("save_steps", "save_strategy", "steps"),
    ("eval_every_epochs", "evaluation_strategy", "epoch"),
    ("warmup_steps", "warmup_ratio", None),
    ("batch_size", "batch_tokens", None),
    ("batch_tokens", "batch_size", "auto"),
    ("fp16", "bf16", False),
    ("bf16", "fp16", False),
)


def parse_override(text: str) -> tuple[list[str | int], Item]:
    """`training.config.epochs=2` -> the steps of the path and the value, read as YAML."""
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not path:
        raise ExpertError(
            f"--set {text}: expected path=value, such as --set training.config.epochs=2"
        )
    steps: list[str | int] = []
    for part in path.split("."):
        match = _STEP.fullmatch(part)
        if not match:
            raise ExpertError(f"--set {text}: {part!r} is not part of a path")
        is_index = part.isdecimal() and steps  # base_models.0.name is base_models[0].name
        steps.append(int(part) if is_index else match[1])
        steps.extend(int(index) for index in re.findall(r"\[(\d+)\]", match[2]))
    if len(steps) > MAX_DEPTH:
        raise ExpertError(f"--set {text[:60]}…: the path has more than {MAX_DEPTH} steps")
    item, problems = parse_yaml(value, f"--set {path}")
    if problems:
        raise ExpertError(f"--set {text}: {problems[0]}")
    if item.value is None and value.strip().startswith("#"):
        raise ExpertError(f"--set {text}: # starts a comment; put the value in quotes")
    for part_of_value in item.walk():
        part_of_value.path = f"--set {path}"
        part_of_value.line = None
        part_of_value.from_command_line = True
    return steps, item


def apply_overrides(root: Item, overrides: Sequence[str]) -> Migration:
    """Apply the overrides to the canonical tree; the same names and aliases work as in a file."""
    work = Migration(root.fields())
    for text in overrides:
        steps, item = parse_override(text)
        full = _full_path(steps, text)
        if full != steps:
            work.read_as(item, reduce(join, full, ""))
            steps = full
        if any(isinstance(step, int) for step in steps):
            if steps[0] in ("base_model", "adapters"):  # of layout 1.0
                steps = ["base_models", 0, *steps[steps[0] == "base_model" :]]
            if steps[:1] == ["base_models"] and len(steps) == 2 and isinstance(item.value, str):
                item = with_value(item, {"name": item})
            _set_at(root, steps, item, text)
            continue
        layer = Item({})
        _set_at(layer, steps, item, text)
        moved = migrate(layer, is_override=True)
        if item.value is None and not layer.fields():
            raise ExpertError(f"--set {text}: {steps[-1]} cannot be null")
        work.notices += moved.notices
        work.problems += moved.problems
        if steps == ["base_models"]:
            root.fields()["base_models"] = layer.fields()["base_models"]
        else:
            _overlay(root.fields(), layer.fields())
    config = (root.get("training", "config") or Item(None)).fields()
    for key, other, value in _IMPLIED:
        item, present = config.get(key, Item(None)), config.get(other, Item(None))
        is_from_file = present.value not in (None, "auto", value) and not present.from_command_line
        is_set = item.from_command_line and item.value not in (None, "auto")
        if is_set and item.value is not False and is_from_file:
            work.unused(present, f"{item.path} replaces it")
            config[other] = with_value(item, value)
    return work


def _full_path(steps: list[str | int], text: str) -> list[str | int]:
    """The full path of a single key, or of a key of a section of `training`; ExpertError if
    several sections have a key of this name."""
    if len(steps) != 1:
        return ["training", *steps] if steps[0] in ("config", "decoding") else steps
    homes = sections_with_key(str(steps[0]))
    if len(homes) > 1:
        names = ", ".join(reduce(join, [*home, *steps], "") for home in homes)
        raise ExpertError(f"--set {text}: several keys have this name  (use one of {names})")
    return [*homes[0], *steps] if homes else steps


def _set_at(root: Item, steps: Sequence[str | int], item: Item, text: str) -> None:
    """Put the value at its path; sections on the way are added, entries of lists must be there."""
    here = root
    for number, step in enumerate(steps):
        count = len(here.entries())
        if isinstance(step, int) and step >= count:
            raise ExpertError(f"--set {text}: {here.path} has {count} entries, none at [{step}]")
        if isinstance(step, str) and not isinstance(here.value, dict):
            raise ExpertError(f"--set {text}: {here.path} is not an object")
        inside: Any = here.value
        if number == len(steps) - 1:
            inside[step] = item
            return
        if isinstance(step, str) and step not in inside:
            empty: Any = [] if isinstance(steps[number + 1], int) else {}
            inside[step] = Item(empty, join(here.path, step))
        here = inside[step]


def _overlay(base: dict[str, Item], layer: dict[str, Item]) -> None:
    for key, item in layer.items():
        present = base.get(key)
        if present is not None and isinstance(item.value, dict) and isinstance(present.value, dict):
            _overlay(present.value, item.value)
        elif key == "base_models" and present is not None and present.value:
            first, layered = present.get(0), item.get(0)
            if first is not None and layered is not None:
                _overlay(first.fields(), layered.fields())
        else:
            base[key] = item
            if key == "betas" and present is not None and isinstance(item.value, list):
                # --set adam_beta2 keeps the first beta of the file
                for position, entry in enumerate(item.value):
                    from_file = present.get(position)
                    item.value[position] = entry if entry.from_command_line else from_file or entry

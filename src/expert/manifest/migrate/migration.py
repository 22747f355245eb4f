"""The tree of a manifest during migration, with its notices and problems."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expert.core.errors import Problem
from expert.core.text import counted
from expert.manifest.migrate.aliases import BASE_MODEL_KEYS, canonical_path
from expert.manifest.text.item import Item, Kind, Notice, shown

Entries = dict[str, Item]
NULL_IS_A_VALUE = ("max_grad_norm", "save_total_limit")
"""Keys of training.config whose null is not the same as leaving them out."""
# Keys that settle a default too: an evaluation needs rows, early stopping the best checkpoint.
_SETTLED_BY = {
    "warmup_steps": "warmup_ratio",
    "validation_split": "validation_path evaluation_strategy eval_steps early_stopping_patience",
    "load_best_model_at_end": "early_stopping_patience",
    "adapter_type": "use_peft use_dora rank alpha dropout target_modules quantization "
    "load_in_4bit load_in_8bit adapters",
}


def with_value(item: Item, value: Any) -> Item:
    """Another value with the path and line of `item`."""
    return Item(value, item.path, item.line, from_command_line=item.from_command_line)


def as_item(value: Any, at: Item) -> Item:
    """Plain data as items with the path and line of `at`."""
    inner: Any = value
    if isinstance(value, dict):
        inner = {str(key): as_item(entry, at) for key, entry in value.items()}
    elif isinstance(value, list | tuple | set):
        inner = [as_item(entry, at) for entry in value]
    elif not isinstance(value, str | int | float | None):
        inner = str(value)
    return with_value(at, inner)


def take(entries: Entries, key: str) -> Item:
    """Remove and return an entry; an item without a value if there is none."""
    return entries.pop(key, None) or Item(None)


@dataclass
class Migration:
    root: Entries
    folder: Path = Path()
    """Of the file, to look up names of data sets."""
    notices: list[Notice] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    later: list[tuple[Callable[[Migration, Item], None], Item]] = field(default_factory=list)
    """Conversions that need all other keys in place first."""
    seen: set[str] = field(default_factory=set)
    """Facts about another trainer's file, such as "no rows"."""
    trainer: str = ""
    """Whose file it is; "" for one of Expert, or if it does not show."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Of that trainer, where ours would train on something else."""
    is_override: bool = False
    """Whether this is a value of --set: a file of another trainer leaves keys to that trainer, a
    single value does not."""

    # --- places in the tree ------------------------------------------------------------------

    def section(self, *keys: str) -> Entries:
        """The mapping at `keys`, added if missing; a detached {} if it is not a mapping."""
        entries = self.root
        for number, key in enumerate(keys, 1):
            item = entries.setdefault(key, Item({}, path=".".join(keys[:number])))
            if not isinstance(item.value, dict):
                return {}
            entries = item.value
        return entries

    @property
    def dataset(self) -> Entries:
        """training.dataset, added if missing."""
        return self.section("training", "dataset")

    @property
    def config(self) -> Item | None:
        """training.config as the user wrote it, or None."""
        return self.root.get("training", Item(None)).get("config")

    @property
    def is_expert_manifest(self) -> bool:
        """Whether this is an Expert manifest, whose top level describes the expert."""
        return self.config is not None

    @property
    def first_base_model(self) -> Entries:
        """The first entry of base_models, added if missing."""
        models = self.root.setdefault("base_models", Item([], "base_models"))
        if not isinstance(models.value, list):
            return {}
        if not models.value:
            models.value.append(Item({}, "base_models[0]"))
        first = models.value[0]
        return first.value if isinstance(first.value, dict) else {}

    # --- moving ------------------------------------------------------------------------------

    def place(self, entries: Entries, key: str, item: Item, home: str) -> None:
        """Put a moved value into its section; two different values for one key are a problem."""
        is_unset = item.value is None and key not in NULL_IS_A_VALUE
        present = entries.get(key)
        if present is not None and present.value is None and key not in NULL_IS_A_VALUE:
            present = None
        if present is None:
            entries[key] = item
        elif not is_unset and present.plain() != item.plain():
            self.conflict(item, present)
            return
        reported = any(n.path == item.path and n.text.startswith(home) for n in self.notices)
        if item.path != home and not is_unset and not reported:
            self.read_as(item, home)

    def put(self, home: str, item: Item) -> None:
        """Put a moved value at its canonical path."""
        section, _, key = home.rpartition(".")
        in_model = section == "base_models[0]"
        entries = self.first_base_model if in_model else self.section(*section.split("."))
        self.place(entries, key, item, home)
        if key == "save_every_epochs" and item.value is not None:
            entries.setdefault("save_strategy", with_value(item, "epoch"))

    def put_defaults(self) -> None:
        """Set what a file of another trainer leaves to that trainer, and name it in one line."""
        has_sections = self.root.get("training", Item(None)).line is not None  # as in Expert's own
        if self.is_override or self.is_expert_manifest or has_sections:
            return
        written = set()
        for zone in (self.root, self.section("training"), self.dataset):
            for name, item in zone.items():
                key = (canonical_path(name) or name).rpartition(".")[2]
                is_evaluation_off = key == "evaluation_strategy" and item.value in ("no", False)
                if (item.value is not None or key in NULL_IS_A_VALUE) and not is_evaluation_off:
                    written.add(key)
                if (
                    self.trainer
                    and key == "output_dir"
                    and re.match(r"[\\/~]|\w:", str(item.value))
                ):
                    fix = f"--set output_dir={item.value} writes there"
                    self.unused(item, f"runs go to runs/ beside this file; {fix}")
                    item.value = None
        theirs, ours = [], []
        for key, value in self.defaults.items():
            if not written & {key, *_SETTLED_BY.get(key, "").split()}:
                self.root[key] = Item(value, canonical_path(key) or key)
                theirs.append(f"{key}: {shown(value)}")
            elif key == "validation_split" and not written & {key, "validation_path"}:
                ours.append("a tenth of the rows is held out for the evaluation (validation_split)")
        # Their loss counts all tokens, unless the rows have a column of their own for answers.
        is_all = self.trainer in ("TRL", "Transformers")
        if is_all and not written & {"train_on_prompt", "text_field"}:
            ours.append("only answers are trained on (train_on_prompt: true: all)")
        path = f"defaults of {self.trainer}"
        if theirs:
            self.notices.append(Notice("note", path, ", ".join(theirs)))
        if ours:
            self.notices.append(Notice("warning", path, f"not kept: {'; '.join(ours)}"))

    def put_batch_tokens(self, count: Item, length: int) -> None:
        """Set batch_tokens to `count` packed sequences of `length` tokens: batch_size of Expert
        counts rows."""
        self.root["batch_tokens"] = with_value(count, count.whole * length)
        packed = f"{counted(count.whole, 'packed sequence')} of {length} tokens"
        self.read_as(count, f"training.config.batch_tokens: {count.whole * length} ({packed})")

    def convert(self, zone: Entries, key: str, value: str | bool | float, item: Item) -> None:
        """Replace `item` by `key: value` in the same section, which is moved to its place later."""
        present = zone.get(key)
        if present is not None and present.value not in (None, "auto", value):
            self.conflict(item, present)
            return
        zone[key] = with_value(item, value)
        text = value if isinstance(value, str) else shown(value)
        in_model = f"base_models[0].{key}" if key in BASE_MODEL_KEYS else key
        self.read_as(item, f"{canonical_path(key) or in_model}: {text}")

    # --- reporting ---------------------------------------------------------------------------

    def report(self, kind: Kind, item: Item, text: str) -> None:
        self.notices.append(Notice(kind, item.path, text, item.line))

    def read_as(self, item: Item, home: str) -> None:
        self.report("read as", item, home)

    def unused(self, item: Item, reason: str = "") -> None:
        self.report("not used here", item, reason)

    def problem(self, item: Item, what: str, fix: str = "") -> None:
        self.problems.append(Problem(item.path, what, fix, item.line))

    def conflict(self, item: Item, other: Item) -> None:
        what = f"is {shown(item.plain())}, but {other.path} is {shown(other.plain())}"
        self.problem(item, what, "keep one of the two")

    def refuse(self, item: Item, expected: str, fix: str = "") -> None:
        self.problem(item, f"got {shown(item.plain())}, expected {expected}", fix)


def convert_values_to(key: str, values: Mapping[Any, Any], expected: str = "") -> Rule:
    """A rule that converts values to those of `key`; None: dropped. Text is compared in lower case.
    Any other value is refused with what is expected, or dropped if that is empty."""

    def rule(work: Migration, zone: Entries, item: Item) -> None:
        word = item.value.lower() if isinstance(item.value, str) else item.value
        # In Python 1 == True, so compare types too.
        known = [
            value for name, value in values.items() if type(name) is type(word) and name == word
        ]
        if known and known[0] is not None:
            work.convert(zone, key, known[0], item)
        elif not known and expected:
            work.refuse(item, expected)

    return rule


Rule = Callable[[Migration, Entries, Item], None]

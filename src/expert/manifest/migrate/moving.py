"""The tree of a manifest while its keys are moved to their homes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from expert.core.errors import Problem
from expert.manifest.notices import Notice, notice
from expert.manifest.text.document import Item, shown

Entries = dict[str, Item]
_NULL_IS_A_VALUE = ("max_grad_norm", "save_total_limit")


@dataclass
class Migration:
    """The tree being rewritten, and what there is to tell about it."""

    root: Entries
    notices: list[Notice] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    later: list[tuple[Callable[[Migration, Item], None], Item]] = field(default_factory=list)
    """Keys that become several or another one; they wait until all plain ones are in place."""
    seen: set[str] = field(default_factory=set)
    """What another trainer's file was found to have: "rows of a list", "no rows"."""

    def section(self, *keys: str) -> Entries:
        """The mapping at `keys`, made where it is missing; a stray {} where it is no mapping."""
        entries = self.root
        for key in keys:
            item = entries.setdefault(key, Item({}, path=".".join(keys[: keys.index(key) + 1])))
            if not isinstance(item.value, dict):
                return {}
            entries = item.value
        return entries

    def place(self, entries: Entries, key: str, item: Item, home: str) -> None:
        """Put a moved value where it belongs; two different values for one key are a problem."""
        says_nothing = item.value is None and key not in _NULL_IS_A_VALUE
        present = entries.get(key)
        if present is not None and present.value is None and key not in _NULL_IS_A_VALUE:
            present = None
        if present is None:
            entries[key] = item
        elif not says_nothing and present.plain() != item.plain():
            self.conflict(item, f"{present.path} says {shown(present.plain())}")
            return
        told = any(n.path == item.path and n.text.startswith(home) for n in self.notices)
        if item.path != home and not says_nothing and not told:
            off = " (0: no clipping)" if key == "max_grad_norm" and item.value == 0 else ""
            self.notices.append(notice("read as", item, home + off))

    def conflict(self, item: Item, other: str) -> None:
        """`item` says one thing and another key the opposite."""
        what = f"says {shown(item.plain())}, but {other}"
        self.problems.append(Problem(item.path, what, "keep one of the two", item.line))

    def refuse(self, item: Item, expected: str, fix: str = "") -> None:
        """`item` has a value that its key cannot have."""
        what = f"got {shown(item.plain())}, expected {expected}"
        self.problems.append(Problem(item.path, what, fix, item.line))


def first_base_model(work: Migration) -> Entries:
    models = work.root.setdefault("base_models", Item([], "base_models"))
    if not isinstance(models.value, list):
        return {}
    if not models.value:
        models.value.append(Item({}, "base_models[0]"))
    first = models.value[0]
    return first.value if isinstance(first.value, dict) else {}


def name_base_model(work: Migration, item: Item) -> None:
    work.place(first_base_model(work), "name", item, "base_models[0].name")

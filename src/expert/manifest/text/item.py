"""One value of a manifest file with its path and line, and notices about values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

MAX_DEPTH = 60
# The largest real manifest seen has 300 values; 5,000 are read, or refused, in 0.5 s.
MAX_ITEMS = 5_000

Scalar = str | int | float | bool | None


@dataclass(slots=True)
class Item:
    value: Scalar | list[Item] | dict[str, Item]
    path: str = ""
    line: int | None = None
    from_command_line: bool = False
    """From --set: trusted, unlike a downloaded file."""

    @property
    def key(self) -> str:
        """The last key of the path."""
        return self.path.removeprefix("--set ").rpartition(".")[2]

    @property
    def whole(self) -> int:
        """The value if it is a whole number, else 0."""
        return self.value if type(self.value) is int else 0

    def fields(self) -> dict[str, Item]:
        """The entries of a mapping; {} for other values."""
        return self.value if isinstance(self.value, dict) else {}

    def entries(self) -> list[Item]:
        """The entries of a list; [] for other values."""
        return self.value if isinstance(self.value, list) else []

    def get(self, *steps: str | int) -> Item | None:
        """The item at a path of keys and positions, or None."""
        item: Item | None = self
        for step in steps:
            if item is None:
                return None
            entries = item.entries()
            if isinstance(step, int):
                item = entries[step] if step < len(entries) else None
            else:
                item = item.fields().get(step)
        return item

    def plain(self) -> Any:
        """The value as Python data."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value

    def walk(self) -> Iterator[Item]:
        """This item and all items below it, in file order."""
        return (item for _, item in self.by_path())

    def by_path(self, path: str = "") -> Iterator[tuple[str, Item]]:
        """This item and all items below it, each with its path in this tree."""
        yield path, self
        for key, item in self.fields().items():
            yield from item.by_path(join(path, key))
        for number, item in enumerate(self.entries()):
            yield from item.by_path(join(path, number))


Kind = Literal["read as", "not used here", "note", "warning"]


@dataclass(frozen=True)
class Notice:
    kind: Kind
    path: str
    text: str
    """Of a key that is not used: the reason; it may be empty."""
    line: int | None = None

    def __str__(self) -> str:
        joint = " " if self.kind == "read as" else ": "
        return f"{self.where}: {self.kind}{joint if self.text else ''}{self.text}"

    @property
    def where(self) -> str:
        return f"line {self.line}: {self.path}" if self.line else self.path


def shown(value: Any) -> str:
    """A value for an error message: short, with true, false and null as in the file."""
    if isinstance(value, str):
        text = repr(value)
    elif isinstance(value, list) and len(value) > 8:
        text = f"a list of {len(value)}"
    else:
        text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"


def join(path: str, step: str | int) -> str:
    """`training.config` + `epochs` -> `training.config.epochs`; `adapters` + 0 -> `adapters[0]`."""
    if isinstance(step, int):
        return f"{path}[{step}]"
    return f"{path}.{step}" if path else step

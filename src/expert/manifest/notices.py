"""What the reader did with a key that was not simply honoured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expert.manifest.text.item import Item

Kind = Literal["read as", "superseded", "note", "warning"]


@dataclass(frozen=True)
class Notice:
    """One thing the reader tells: a renamed key, a superseded one, or one to look at."""

    kind: Kind
    path: str
    text: str
    line: int | None = None

    def __str__(self) -> str:
        joint = " " if self.kind == "read as" else ": "
        return f"{self.where}: {self.kind}{joint}{self.text}"

    @property
    def where(self) -> str:
        """Line and key."""
        return f"line {self.line}: {self.path}" if self.line else self.path


def notice(kind: Kind, item: Item, text: str) -> Notice:
    """A notice about the place where the user wrote `item`."""
    return Notice(kind, item.path, text, item.line)

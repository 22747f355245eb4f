"""What the reader did with a key that was not simply honoured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expert.manifest.document import Item

Kind = Literal["read as", "superseded", "note", "warning"]


@dataclass(frozen=True)
class Notice:
    """One thing the reader tells: a renamed key, a superseded one, or one to look at."""

    kind: Kind
    path: str
    text: str
    line: int | None = None

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        joint = " " if self.kind == "read as" else ": "
        return f"{where}{self.path}: {self.kind}{joint}{self.text}"


def notice(kind: Kind, item: Item, text: str) -> Notice:
    """A notice about the place where the user wrote `item`."""
    return Notice(kind, item.path, text, item.line)

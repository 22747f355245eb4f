"""Notices about keys that were renamed, are not used, or need attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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

"""Test cases: the prompt, the expected answer, and what its check needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Case:
    """One prompt with its expected answer."""

    id: str
    turns: tuple[tuple[str, str], ...]
    """(role, text) up to the answer; the last turn is the user's or a tool result."""
    expected: str
    task: str = ""
    domain: str = ""
    """For this case alone; "": the domain of the whole set."""
    check: Mapping[str, Any] = field(default_factory=dict)
    row: str = ""
    """The row it comes from, whose other answers are cases too; "": a row of its own."""
    turn: int = 0
    """Which turn of the row holds the expected answer, counted from 1; 0: unknown."""

    @property
    def prompt(self) -> str:
        """The last turn: the user's message or a tool result."""
        return self.turns[-1][1] if self.turns else ""

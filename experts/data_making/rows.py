"""Rows of an expert, drawn from a seed and split so that nothing leaks.

A row's skeleton is what is left of its answer without the values: the keys of an object, a query
without its literals. The skeleton alone decides which split a row belongs to. So no answer of the
test rows, nor anything of the same form, is ever seen in training.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
PARTS = 20
"""Of so many parts of all skeletons, two are for validation and two for the test."""
TRIES = 2_000
"""Draws in vain, one after the other, after which there are no more rows to be had."""


class NoMoreRows(Exception):
    """More rows were asked for than there are."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """One question with its answer, and what judges other answers."""

    task: str
    instruction: str
    input: str
    output: str
    skeleton: str
    """The form of the answer."""
    check: dict[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> str:
        return f"{self.instruction}\n{self.input}"

    def as_row(self) -> dict[str, Any]:
        return {
            "instruction": self.instruction,
            "input": self.input,
            "output": self.output,
            "task": self.task,
            "check": self.check,
        }

    def as_case(self, number: int) -> dict[str, Any]:
        return {
            "id": f"{self.task}-{number}",
            "task": self.task,
            "instruction": self.instruction,
            "input": self.input,
            "expected": self.output,
            "check": self.check,
        }


Wanted = Callable[[str], bool]
"""Whether a skeleton belongs to the split that is made."""
Draw = Callable[[random.Random, Wanted], Made | None]
"""Draws a row; None where what was drawn is of no use. What costs time is left undone where the
skeleton is not wanted."""


def split_of(skeleton: str) -> Split:
    """The split a skeleton belongs to, whatever the seed: rows of two seeds do not leak either."""
    part = int.from_bytes(hashlib.sha256(skeleton.encode("utf-8")).digest()[:8], "big") % PARTS
    return "test" if part < 2 else "validation" if part < 4 else "train"


def make_rows(draw: Draw, count: int, split: Split, seed: int) -> list[Made]:
    """So many different rows of a split; the same for the same seed."""
    source = random.Random(f"{seed} {split}")
    seen: set[str] = set()
    found: list[Made] = []
    vain = 0

    def wanted(skeleton: str) -> bool:
        return split_of(skeleton) == split

    while len(found) < count:
        made = draw(source, wanted)
        if made is None or not wanted(made.skeleton) or made.prompt in seen:
            vain += 1
            if vain == TRIES:
                raise NoMoreRows(f"after {len(found)} rows no new one was found for {split}")
            continue
        vain = 0
        seen.add(made.prompt)
        found.append(made)
    return found

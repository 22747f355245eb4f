"""How often a fault is made, and how often it was survived: counted for the table of the matrix."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SCALE = float(os.environ.get("FAULTS", "1.0"))


@dataclass
class Count:
    tried: int = 0
    survived: int = 0


now = Count()
"""Of the test that runs."""


def scaled(count: int) -> int:
    """A count of the matrix; `FAULTS=0.1` makes a tenth of all."""
    return max(1, round(count * SCALE))


@contextmanager
def case() -> Iterator[None]:
    """One fault: survived unless something is raised."""
    now.tried += 1
    yield
    now.survived += 1


def cases(count: int) -> Iterator[int]:
    """The numbers of as many faults as `count` is scaled to; each survived when the next begins."""
    for number in range(scaled(count)):
        with case():
            yield number

"""What is said of a command that was interrupted: one line, with what is left of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expert.core.interrupts import Interrupted

BEGINS_AGAIN = "the same command begins again"
WHAT_IS_LEFT = {
    "train": f"no run was begun; {BEGINS_AGAIN}",
    "pretokenize": "what is prepared stays so; the same command goes on from there",
    "validate": f"no verdict was written; {BEGINS_AGAIN}",
    "benchmark": f"no result was written; {BEGINS_AGAIN}",
    "export": f"nothing was exported; {BEGINS_AGAIN}",
    "watch": "the run itself goes on",
}


def tell(end: Interrupted, words: Sequence[str]) -> None:
    """Say on standard error what was interrupted, unless it was said; `words` follow `expert`."""
    if end.told:
        return
    end.told = True
    command = next((word for word in words if not word.startswith("-")), "")
    left = end.left or WHAT_IS_LEFT.get(command, BEGINS_AGAIN)
    with suppress(OSError, ValueError, AttributeError):  # closed, or nobody is there to read it
        sys.stderr.write(f"{' '.join(['expert', command]).strip()}: stopped by {end.by}: {left}\n")
        sys.stderr.flush()

"""The result of a run: read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended, and where it is."""

    folder: Path
    exit_code: int
    steps: int
    loss: float | None
    """The mean over all steps."""
    eval_loss: float | None
    """The best on the validation rows; None if another metric was tracked."""
    test_loss: float | None
    final: Path | None
    last_eval_loss: float | None = None
    """On the validation rows, at the last evaluation."""
    held_out: bool = True
    """Whether there are held-out rows to judge it by."""
    nothing_left: bool = False
    """The run had already ended as requested: nothing was done."""
    warnings: tuple[str, ...] = ()
    """Warnings of the plan and about the rows at the start of the run."""

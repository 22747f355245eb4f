"""What is exported, and the result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from expert.core.rundir import RunFolder
from expert.core.text import counted
from expert.planning.run_plan import RunPlan
from expert.run.stored.choose_checkpoint import Choice

if TYPE_CHECKING:
    import torch

Kind = Literal["adapter", "merged", "model"]
ROWS = 64
"""Held-out rows on which a GGUF file is measured by default."""


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Loss and token accuracy on held-out rows, before and after quantising."""

    test_set: str
    rows: int
    loss: tuple[float, float]
    token_accuracy: tuple[float | None, float | None]

    def in_words(self) -> str:
        (one, other), (before, after) = self.loss, self.token_accuracy
        words = f"loss {other:.4f} instead of {one:.4f}"
        if before is not None and after is not None:
            words += f", token accuracy {after:.2%} instead of {before:.2%}"
        return f"{words} on {counted(self.rows, 'row')} ({self.test_set})"


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    folder: RunFolder
    plan: RunPlan
    choice: Choice
    kind: Kind
    dtype: str
    device: torch.device
    to: Path
    gguf: str = ""
    """The type of a GGUF file, `lora` for an adapter; "" for other exports."""
    judged_rows: int = ROWS
    warnings: tuple[str, str] = ("", "")
    """About the run's validation and its base."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of an export, and how far it is from the trained model."""

    run: Path
    folder: Path
    kind: Kind
    checkpoint: str
    dtype: str
    bytes: int
    texts: int
    """Texts on which the logits were compared."""
    largest_difference: float
    """Between the logits of the export and of the trained model."""
    share: float
    """The root mean square of these differences, as a share of the logits' spread."""
    tolerance: float | None
    """The largest accepted share; None for quantised GGUF files, judged on held-out rows."""
    adapter_effect: float | None
    """How far the adapter moves the logits, as a share of their spread."""
    unquantised: bool
    """The base was quantised in training and is not in the export."""
    validation: str = ""
    """A warning about its validation; "" if it passed the gate or was never validated."""
    judged: str = ""
    """The result of the validation in words; "" without one."""
    base: str = ""
    """A warning about the base; "" if it is known to be the one used in training."""
    gguf: str = ""
    """The type of a GGUF file, `lora` for an adapter; "" for other exports."""
    file: str = ""
    """The GGUF file."""
    quality: Quality | None = None
    """The quality lost by quantising, if measured."""
    notes: tuple[str, ...] = ()
    """Further warnings."""

    def warnings(self) -> list[str]:
        """Warnings for the terminal and the model card."""
        found = [warning for warning in (self.validation, self.base) if warning]
        lost = self.adapter_effect is not None and self.share > 0.5 * self.adapter_effect
        if lost and self.kind == "merged" and self.tolerance is not None:
            what = f"rounding to {self.dtype} moves the logits by {self.share:.1%} of their spread"
            fix = "merge with --dtype fp32, or export the adapter"
            found.append(f"{what}, the adapter by {self.adapter_effect:.1%}  ({fix})")
        if self.unquantised:
            what = "the base was quantised in training and is not in the export"
            found.append(f"{what}: answers may differ from those that were validated")
        return [*found, *self.notes]

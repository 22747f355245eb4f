"""What is exported, and in which format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from expert.jobs.export.quality import ROWS

if TYPE_CHECKING:
    import torch

    from expert.core.rundir import RunFolder
    from expert.jobs.export.exported import Kind
    from expert.planning.run_plan import RunPlan
    from expert.run.stored.choose_checkpoint import Choice


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    folder: RunFolder
    plan: RunPlan
    choice: Choice
    kind: Kind
    dtype: str
    device: torch.device
    gguf: str = ""
    """The type of a GGUF file, `lora` for an adapter; "" for other exports."""
    judged_rows: int = ROWS

"""What an export is, and how far it is from what was trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from expert.jobs.export.quality import Quality

Kind = Literal["adapter", "merged", "model"]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written, and how far it is from what was trained."""

    run: Path
    folder: Path
    kind: Kind
    checkpoint: str
    dtype: str
    bytes: int
    texts: int
    """Texts on which the logits were compared."""
    largest_difference: float
    """Of the logits of the export and of the trained model."""
    share: float
    """The same, as a share of the logits' spread."""
    tolerance: float | None
    """The largest share that is accepted; None: quantised weights, judged by held-out rows."""
    adapter_effect: float | None
    """How far the adapter itself moves the logits, as a share of their spread."""
    quantised_share: float | None
    """How far the base as quantised in training is from the full one, as a share."""
    validation: str = ""
    """What is to be said of its validation; "" where it passed the gate or never was validated."""
    judged: str = ""
    """What the validation found, in words; "" where there was none."""
    base: str = ""
    """What is to be said of its base; "" where it is known to be the one that was trained upon."""
    gguf: str = ""
    """The type of a GGUF file, `lora` for an adapter; "" where it is none."""
    file: str = ""
    """The GGUF file."""
    quality: Quality | None = None
    """What rounding costs, where it was judged."""
    notes: tuple[str, ...] = ()
    """What else is to be said of it."""

    def warnings(self) -> list[str]:
        """What is right and yet worth to know."""
        found = [said for said in (self.validation, self.base) if said]
        lost = self.adapter_effect is not None and self.share > 0.5 * self.adapter_effect
        if lost and self.kind == "merged" and self.tolerance is not None:
            found.append(
                f"rounding to {self.dtype} moves the logits by {self.share:.1%} of their spread, "
                f"the adapter by {self.adapter_effect:.1%}  (merge with --dtype fp32, or export "
                "the adapter)"
            )
        if self.quantised_share is not None:
            found.append(
                "the base was quantised in training and is not in the export: its logits differ "
                f"by up to {self.quantised_share:.1%} of their spread"
            )
        if self.quality is not None and self.quality.unknown:
            found.append(f"what the rounding costs is unknown: {self.quality.unknown}")
        return [*found, *self.notes]

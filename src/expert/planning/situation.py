"""Everything the choices look at, gathered once before the first of them is made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from expert.manifest.schema.config import TrainingConfig
from expert.manifest.schema.manifest import CHAR_GPT, Adapter, BaseModelSpec, Manifest
from expert.planning.decisions import Ledger, Source
from expert.planning.machine.target import Target
from expert.planning.measurements import MeasuredRate
from expert.planning.memory.calibration import Calibrations
from expert.planning.models.resolve import ResolvedModel, basename
from expert.planning.survey import Survey

KEPT = "as the run that is resumed has it"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a run that is resumed has settled by the machine it began on and that changes what it
    computes: it stays so on any other. None: it is chosen again."""

    examples_per_update: int | None = None
    quantization: str | None = None


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What was asked, on what model, with what data, on what card."""

    manifest: Manifest
    folder: Path
    model: BaseModelSpec
    resolved: ResolvedModel
    target: Target
    survey: Survey
    rates: tuple[MeasuredRate, ...]
    calibrations: Calibrations
    best: MeasuredRate | None = None
    """What a ladder found fastest for this card, model and shape."""
    plain_text: bool | None = None
    """Whether the rows are texts without answers; None where nobody knows yet."""
    kept: Kept = Kept()

    @property
    def config(self) -> TrainingConfig:
        return self.manifest.training.config

    @property
    def is_char_model(self) -> bool:
        return self.model.name == CHAR_GPT

    @property
    def keeps_every_checkpoint(self) -> bool:
        """Whoever asks for one every few epochs, and for no limit, wants to find them all."""
        asked = self.config.model_fields_set
        every = "save_every_epochs" in asked and self.config.save_every_epochs > 1
        return every and "save_total_limit" not in asked

    @property
    def released_adapter(self) -> Adapter:
        """The adapter metadata that training.config falls back to."""
        return self.model.adapters[0] if self.model.adapters else Adapter()

    @property
    def on_gpu(self) -> bool:
        return self.target.device == "cuda"

    @property
    def card_key(self) -> str:
        """What measurements call this card."""
        return self.target.card.slug if self.target.card else self.target.name

    @property
    def model_key(self) -> str:
        """What measurements call this model."""
        return basename(self.model.name).lower()

    def parts_of_a_row(self, length: int) -> int:
        """Into how many a row is split on average, as far as a mean tells."""
        splits = self.overlong[0] == "split" or self.config.packing == "concat"
        mean = self.survey.mean_tokens
        return math.ceil(mean / length) if splits and mean and not self.is_char_model else 1

    @property
    def overlong(self) -> tuple[Literal["cut", "split", "drop"], str, Source]:
        """What becomes of rows that are too long, why, and who says so."""
        asked = self.config.overlong
        if asked != "auto":
            return asked, "set in the manifest", "manifest"
        if self.is_char_model:
            return "split", "a text is cut into blocks", "preset"
        if self.config.tokenize == "late":
            return "cut", "rows that are tokenised late are not known before", "preset"
        if self.plain_text is None:
            return "cut", "what the rows are is known when they are here", "preset"
        if self.plain_text:
            return "split", "plain text: every part of it is learnt", "preset"
        return (
            "cut",
            "rows with answers: a part without its beginning is another question",
            "preset",
        )

    def measured(self, path: str) -> tuple[Any, str] | None:
        """What a ladder found fastest for a value of the plan, and when; None where none did."""
        if self.best is None or path not in self.best.settings:
            return None
        gain = self.best.gains.get(path)
        times = f", {gain:.2f}x as fast as without" if gain else ""
        return self.best.settings[path], f"fastest in the ladder of {self.best.measured_on}{times}"

    def has_capability(self, least: tuple[int, int]) -> bool:
        """True on a card of at least this capability, and on one nobody named."""
        return self.on_gpu and (self.target.capability is None or self.target.capability >= least)

    @property
    def card_words(self) -> str:
        """`NVIDIA T4 (7.5)` for reasons."""
        capability = self.target.capability
        if capability is None:
            return self.target.name
        return f"{self.target.name} ({capability[0]}.{capability[1]})"

    def source_of(self, key: str) -> Source:
        """manifest where training.config has the key, preset where its default counts."""
        return "manifest" if key in self.config.model_fields_set else "preset"

    def pass_on(self, ledger: Ledger, path: str, key: str, value: object = ...) -> None:
        """Settle a key of training.config that needs no choice."""
        settled = getattr(self.config, key) if value is ... else value
        because = "set in the manifest" if self.source_of(key) == "manifest" else "the default"
        ledger.settle(path, settled, because, self.source_of(key))

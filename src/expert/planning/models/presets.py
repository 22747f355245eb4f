"""What guides recommend for single cards, and whether it fits.

Each preset is a common recommendation; `verdicts` checks it with the memory model. Plans use
nothing from here but the batch of the character model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from expert.manifest.schema.manifest import CharGptShape
from expert.planning.machine.cards import Card, find_card
from expert.planning.memory.memory import GIB, estimate
from expert.planning.memory.workload import Workload
from expert.planning.models.known_models import find_known_model
from expert.planning.models.resolve import char_gpt_shape

# Rows per step for the character GPT by memory, from its guide.
_CHAR_BATCHES = ((20, 192), (14, 128), (0, 96))


def char_gpt_batch(memory_bytes: int) -> tuple[int, str]:
    """Rows per step for the character GPT, and why."""
    least, batch = next(pair for pair in _CHAR_BATCHES if memory_bytes >= pair[0] * GIB)
    words = f"from {least} GiB on" if least else "below 14 GiB"
    return batch, f"the character GPT's preset {words}"


@dataclass(frozen=True)
class Preset:
    """A recommendation for cards: the model, its settings and a micro-batch."""

    cards: tuple[str, ...]
    model: str
    settings: str
    work: Workload


@dataclass(frozen=True)
class PresetCheck:
    """A preset on one card: what it needs, what is there, and what fits instead."""

    preset: Preset
    card: Card
    needed_gib: float
    largest_rows: int

    @property
    def fits_card(self) -> bool:
        return self.largest_rows >= self.preset.work.rows

    def words(self) -> str:
        has = f"{self.needed_gib:.1f} of {self.card.memory_gib:.1f} GiB"
        if self.fits_card:
            more = self.largest_rows > self.preset.work.rows
            return f"fits: {has}" + (f"; up to {self.largest_rows} fit" if more else "")
        if self.largest_rows == 0:
            return f"does not fit: {has}, not even one row fits"
        instead = f"a micro-batch of {self.largest_rows}"
        return f"does not fit: {has}; {instead} fits, with the same rows per step"


def _char_preset(rows: int, *cards: str) -> Preset:
    shape = char_gpt_shape(CharGptShape())
    work = Workload(shape=shape, rows=rows, row_tokens=256, adapter="full")
    settings = "compiled, TF32, mixed precision, fused AdamW, clipping at 1.0"
    return Preset(cards, "char-gpt", settings, work)


def _preset(card: str, name: str, rows: int, row_tokens: int, settings: str, **how: Any) -> Preset:
    known = find_known_model(name)
    assert known is not None
    work = Workload(shape=known.shape, rows=rows, row_tokens=row_tokens, fused_loss=False, **how)
    return Preset((card,), name, settings, work)


def presets() -> tuple[Preset, ...]:
    """All presets."""
    small = {"quantization": "int4", "adapter": "dora", "rank": 14}
    dora = "DoRA on NF4, bf16, TF32, SDPA, fused AdamW, no checkpointing"
    plain = "unquantised, flash attention, compiled, fused AdamW, no checkpointing"
    return (
        _char_preset(96, "rtx-3080-12gb", "rtx-4070"),
        _char_preset(128, "rtx-4080-super"),
        _char_preset(256, "rtx-4080-super"),  # reportedly too much for 16 GB
        _char_preset(192, "rtx-4090", "rtx-a5000"),
        _preset(
            "rtx-4090", "Qwen3-0.6B", 16, 2048, dora, compiled=False, attention="sdpa", **small
        ),
        _preset("rtx-5090", "Llama-3.1-8B", 32, 512, plain),
    )


def check_presets() -> list[PresetCheck]:
    """Every preset on each of its cards: whether it fits, and the largest micro-batch that does."""
    checks = []
    for preset in presets():
        peaks = [
            estimate(replace(preset.work, rows=rows)).total
            for rows in range(1, 4 * preset.work.rows + 1)
        ]
        for slug in preset.cards:
            card = find_card(slug)
            assert card is not None, slug
            fit = sum(peak <= card.memory_gib * GIB for peak in peaks)
            needed = peaks[preset.work.rows - 1] / GIB
            checks.append(PresetCheck(preset, card, needed, fit))
    return checks

"""What guides for single cards recommend, and whether it fits.

Each preset is a recommendation as it is handed around; `verdicts` checks it with the memory model.
The plan takes the batch of the character model from here; it works out everything else itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from expert.manifest.schema.manifest import CharGptShape
from expert.planning.machine.cards import Card, find_card
from expert.planning.memory.memory import GIB, estimate
from expert.planning.memory.workload import Workload
from expert.planning.models.known_models import find_known_model
from expert.planning.models.resolve import char_gpt_shape

# Rows per step for the character GPT by memory, as its guide gives them.
_CHAR_BATCHES = ((20, 192), (14, 128), (0, 96))


def char_gpt_batch(memory_bytes: int) -> tuple[int, str]:
    """Rows per step for the character GPT, and why."""
    gib = memory_bytes / GIB
    for least, batch in _CHAR_BATCHES:
        if gib >= least:
            words = f"from {least} GiB on" if least else "below 14 GiB"
            return batch, f"the character GPT's preset {words}"
    raise AssertionError("the last preset has no lower bound")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A recommendation for a card: the model, the micro-batch size, and what goes with it."""

    cards: tuple[str, ...]
    model: str
    rows: int
    row_tokens: int
    settings: str
    work: Workload

    def peak_bytes(self, rows: int) -> int:
        """Memory of a micro-batch of this size."""
        return estimate(replace(self.work, rows=rows, row_tokens=self.row_tokens)).total


@dataclass(frozen=True)
class PresetCheck:
    """A preset on one card: what it needs, what there is, and what fits instead."""

    preset: Preset
    card: Card
    needed_gib: float
    holds: bool
    largest_rows: int

    def words(self) -> str:
        has = f"{self.needed_gib:.1f} of {self.card.memory_gib:.1f} GiB"
        if self.holds:
            more = self.largest_rows > self.preset.rows
            return f"fits: {has}" + (f"; up to {self.largest_rows} fit" if more else "")
        if self.largest_rows == 0:
            return f"does not fit: {has}, not even one row fits"
        instead = f"a micro-batch of {self.largest_rows}"
        return f"does not fit: {has}; {instead} fits, with the same rows per step"


def _char_preset(cards: tuple[str, ...], rows: int) -> Preset:
    return Preset(
        cards=cards,
        model="char-gpt",
        rows=rows,
        row_tokens=256,
        settings="compiled, TF32, mixed precision, fused AdamW, clipping at 1.0",
        work=Workload(shape=char_gpt_shape(CharGptShape()), rows=1, row_tokens=256, adapter="full"),
    )


def _workload(name: str) -> Workload:
    known = find_known_model(name)
    assert known is not None
    return Workload(shape=known.shape, rows=1, row_tokens=2048, fused_loss=False)


def presets() -> tuple[Preset, ...]:
    """Every preset there is."""
    small = replace(_workload("Qwen3-0.6B"), quantization="int4", adapter="dora", rank=14)
    return (
        _char_preset(("rtx-3080-12gb", "rtx-4070"), 96),
        _char_preset(("rtx-4080-super",), 128),
        _char_preset(("rtx-4080-super",), 256),  # said to be too much for 16 GB
        _char_preset(("rtx-4090", "rtx-a5000"), 192),
        Preset(
            cards=("rtx-4090",),
            model="Qwen3-0.6B",
            rows=16,
            row_tokens=2048,
            settings="DoRA on NF4, bf16, TF32, SDPA, fused AdamW, no checkpointing",
            work=replace(small, compiled=False, attention="sdpa"),
        ),
        Preset(
            cards=("rtx-5090",),
            model="Llama-3.1-8B",
            rows=32,
            row_tokens=512,
            settings="unquantised, flash attention, compiled, fused AdamW, no checkpointing",
            work=_workload("Llama-3.1-8B"),
        ),
    )


def verdicts() -> list[PresetCheck]:
    """Every preset on each of its cards: whether it fits, and how large a micro-batch does."""
    found = []
    for preset in presets():
        for slug in preset.cards:
            card = find_card(slug)
            assert card is not None, slug
            budget, needed = card.memory_gib * GIB, preset.peak_bytes(preset.rows)
            sizes = range(1, 4 * preset.rows + 1)
            rows = next((n for n in sizes if preset.peak_bytes(n) > budget), len(sizes) + 1) - 1
            found.append(PresetCheck(preset, card, needed / GIB, needed <= budget, rows))
    return found

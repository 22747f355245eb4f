"""What guides for single cards recommend, and whether it is physically true.

Each preset is a recommendation as it is handed around; `judge` holds it to the memory model. The
plan takes the batch of the character model from here; everything else it works out itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from expert.manifest.schema.manifest import CharGptShape
from expert.planning.machine.cards import Card, find_card
from expert.planning.memory.memory import GIB, MemoryEstimate, estimate
from expert.planning.memory.workload import Workload
from expert.planning.models.known_models import find_known_model
from expert.planning.models.resolve import char_gpt_shape

# Rows per update for the character GPT by memory, as its guide gives them.
_CHAR_BATCHES = ((20, 192), (14, 128), (0, 96))


def char_gpt_batch(memory_bytes: int) -> tuple[int, str]:
    """Rows per update for the character GPT, and why."""
    gib = memory_bytes / GIB
    for least, batch in _CHAR_BATCHES:
        if gib >= least:
            words = f"from {least} GiB on" if least else "below 14 GiB"
            return batch, f"the character GPT's preset {words}"
    raise AssertionError("the last preset has no lower bound")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A recommendation for a card: the model, the rows at once, and what goes with them."""

    cards: tuple[str, ...]
    model: str
    rows: int
    row_tokens: int
    settings: str
    work: Workload

    def peak(self) -> MemoryEstimate:
        """Memory of the recommended rows at once."""
        return estimate(replace(self.work, rows=self.rows, row_tokens=self.row_tokens))


@dataclass(frozen=True)
class Verdict:
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
            return f"holds: {has}" + (f"; up to {self.largest_rows} rows fit" if more else "")
        if self.largest_rows == 0:
            return f"does not hold: {has}, not even one row fits"
        instead = f"{self.largest_rows} rows at once"
        return f"does not hold: {has}; {instead} fit, rows per update stay the same"


def _char_preset(cards: tuple[str, ...], rows: int) -> Preset:
    return Preset(
        cards=cards,
        model="char-gpt",
        rows=rows,
        row_tokens=256,
        settings="compiled, TF32, mixed precision, fused AdamW, clipping at 1.0",
        work=Workload(shape=char_gpt_shape(CharGptShape()), rows=1, row_tokens=256, adapter="full"),
    )


def _shape_of(name: str) -> Workload:
    known = find_known_model(name)
    assert known is not None
    return Workload(shape=known.shape, rows=1, row_tokens=2048)


def presets() -> tuple[Preset, ...]:
    """Every preset there is."""
    small = replace(
        _shape_of("Qwen3-0.6B"),
        quantization="int4",
        adapter="dora",
        rank=14,
        compiled=False,
        attention="sdpa",
        fused_loss=False,
    )
    large = replace(_shape_of("Llama-3.1-8B"), fused_loss=False)
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
            work=small,
        ),
        Preset(
            cards=("rtx-5090",),
            model="Llama-3.1-8B",
            rows=32,
            row_tokens=512,
            settings="unquantised, flash attention, compiled, fused AdamW, no checkpointing",
            work=large,
        ),
    )


def judge(preset: Preset, card: Card) -> Verdict:
    """Whether the recommended rows fit the card, and how many do."""
    budget = card.memory_gib * GIB
    needed = preset.peak().total
    rows = 0
    for candidate in range(1, 4 * preset.rows + 1):
        if (
            estimate(replace(preset.work, rows=candidate, row_tokens=preset.row_tokens)).total
            > budget
        ):
            break
        rows = candidate
    return Verdict(preset, card, needed / GIB, needed <= budget, rows)


def verdicts() -> list[Verdict]:
    """Every preset on each of its cards."""
    found = []
    for preset in presets():
        for slug in preset.cards:
            card = find_card(slug)
            assert card is not None, slug
            found.append(judge(preset, card))
    return found

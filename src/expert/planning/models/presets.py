"""What guides recommend for single cards, and whether it fits.

Each preset is a common recommendation; `check_presets` checks it with the memory model. Plans use
nothing from here but the batch of the character model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from expert.manifest.schema.manifest import CharGptShape
from expert.planning.machine.cards import find_card
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


def check_presets() -> list[tuple[str, Preset, str]]:
    """Every preset on each of its cards: the card, the preset, and whether it fits."""
    checks = []
    for preset in presets():
        rows = preset.work.rows
        peaks = [estimate(replace(preset.work, rows=n)).total for n in range(1, 4 * rows + 1)]
        for slug in preset.cards:
            card = find_card(slug)
            assert card is not None, slug
            most = sum(peak <= card.memory_gib * GIB for peak in peaks)
            has = f"{peaks[rows - 1] / GIB:.1f} of {card.memory_gib:.1f} GiB"
            verdict = f"does not fit: {has}, not even one row fits"
            if most >= rows:
                verdict = f"fits: {has}" + (f"; up to {most} fit" if most > rows else "")
            elif most:
                instead = f"a micro-batch of {most} fits, with the same rows per step"
                verdict = f"does not fit: {has}; {instead}"
            checks.append((slug, preset, verdict))
    return checks

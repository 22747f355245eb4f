"""The table of cards that plans can be made for."""

from __future__ import annotations

import json
from dataclasses import asdict

from expert.cli.display import Sheet
from expert.planning.machine.cards import CARDS


def cards_sheet() -> Sheet:
    """Slug, memory, capability, dense peaks and bandwidth; a dash where nobody knows."""
    rows = [
        (
            card.slug,
            f"{card.memory_gib:.1f}",
            f"{card.capability[0]}.{card.capability[1]}",
            *map(_number, (card.bf16_tflops, card.fp16_tflops, card.tf32_tflops, card.fp8_tflops)),
            _number(card.bandwidth_gbs),
        )
        for card in CARDS
    ]
    columns = ("card", "GiB", "capability", "bf16 TFLOP/s", "fp16", "tf32", "fp8", "GB/s")
    return Sheet(columns, [rows])


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def cards_as_json() -> str:
    return json.dumps([asdict(card) for card in CARDS], indent=2)

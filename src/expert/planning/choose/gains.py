"""What one change alone is worth: times as fast, the smaller number where several were measured."""

from __future__ import annotations

COMPILED = 1.3
"""Compiled blocks ran 1.3x (8B) to 2.0x (0.6B) as fast on an H200 with LoRA, two steps timed each
(docs/benchmarks/memory-h200.json). Of one card and one family: elsewhere expert benchmark tells."""
NOT_RECOMPUTED = 1.35
"""All blocks recomputed cost LoRA 1.35-1.46x of the time (docs/benchmarks/memory-h200.json)."""
COMPILE_PAYS_AFTER_SECONDS = 120
"""The first compiled step took 7-18 s there. At 1.3x, 18 s are won back after 80 s; other cards
compile no faster, so two minutes it is."""

"""The table of NVIDIA cards: memory, compute capability, dense tensor peaks, memory bandwidth.

Peaks are dense (never the doubled "with sparsity" figure) and with FP32 accumulation, in TFLOP/s:
the upper bound of a training step. None means that the unit does not exist or that the number is
unknown; nothing here is a guess. Memory is what nvidia-smi shows, in MiB.

The table is cards.csv. Rules from the FP32 shader rate (cores x 2 x boost clock):
- GeForce RTX 30, 40, 50: bf16 = fp16 = 2x, tf32 = 1x, fp8 = 4x from the RTX 40 on.
- The workstation cards with the same chips: bf16 = fp16 = 4x, tf32 = 2x, fp8 = 8x from Ada on.
- Turing: fp16 = 8x; GeForce RTX 20 halves that with FP32 accumulation. No bf16, tf32 or fp8.
- GTX 16: no tensor cores, fp16 is 2x on the shaders.
Data-centre peaks are from the data sheets; Pascal's are of its shaders, before tensor cores.
Published shader rates of the RTX PRO 4000, 4500, 5000 and of the 6000 Server Edition disagree, and
those of a laptop depend on the power limit set by its maker: their peaks stay unknown. Up to Turing
a laptop chip may carry the desktop name; its peaks are then an upper bound.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from expert.core.files import read_text

Capability = tuple[int, int]

VOLTA: Capability = (7, 0)
AMPERE: Capability = (8, 0)
ADA: Capability = (8, 9)
HOPPER: Capability = (9, 0)


@dataclass(frozen=True, kw_only=True)
class Card:
    """One card as sold; peaks in TFLOP/s, dense, with FP32 accumulation."""

    slug: str
    name: str
    memory_gib: float
    capability: Capability
    bf16_tflops: float | None = None
    fp16_tflops: float | None = None
    tf32_tflops: float | None = None
    fp8_tflops: float | None = None
    bandwidth_gbs: float | None = None
    nvml_names: tuple[str, ...]
    """NVML's product names of this card, as in current drivers."""


def _card(row: dict[str, str]) -> Card:
    major, minor = row["capability"].split(".")
    peaks = ("bf16", "fp16", "tf32", "fp8")
    return Card(
        slug=row["slug"],
        name=row["name"],
        memory_gib=int(row["mib"]) / 1024,
        capability=(int(major), int(minor)),
        bandwidth_gbs=float(row["gbs"]) if row["gbs"] else None,
        nvml_names=tuple(row["nvml_names"].split("|")),
        **{f"{peak}_tflops": float(row[peak]) for peak in peaks if row[peak]},
    )


_TABLE = read_text(Path(__file__).with_name("cards.csv"))
CARDS: tuple[Card, ...] = tuple(map(_card, csv.DictReader(_TABLE.splitlines())))
